"""A small environment for verifiers: a number is guessed in a few turns; and one with a tool."""

import verifiers as vf
from datasets import Dataset


class Guessing(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["guesses"] = []
        assert 4 * state["info"]["n"] == int(state["answer"])
        return state

    @vf.stop
    async def solved(self, state):
        return bool(state["guesses"]) and state["guesses"][-1] == int(state["answer"])

    async def env_response(self, messages, state, **kwargs):
        said = messages[-1].content
        if said == "crash":
            raise KeyError("not a number at all")
        state["guesses"].append(int(said))
        if state["guesses"][-1] == int(state["answer"]):
            state["final_env_response"] = [{"role": "user", "content": "yes"}]
            return state["final_env_response"]
        hint = "higher" if state["guesses"][-1] < int(state["answer"]) else "lower"
        return [{"role": "user", "content": f"{hint} than {said} <eos>"}]


class Rewriting(Guessing):
    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        return [{"role": "user", "content": "another question"}, *messages[1:]] if state["trajectory"] else messages


class Grouped(vf.Rubric):
    def __init__(self):
        super().__init__(funcs=[self.best])

    async def best(self, states) -> list[float]:
        return [1.0 for _ in states]


async def found(state) -> float:
    return float(bool(state["guesses"]) and state["guesses"][-1] == int(state["answer"]))


async def thrift(completion) -> float:
    return 1.0 / len([one for one in completion if one.role == "assistant"])


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


async def right(completion, answer) -> float:
    return float(completion[-1].content == answer)


def questions(count: int) -> Dataset:
    rows = [
        {"question": f"a number below {10 * n}?", "answer": str(4 * n), "info": {"n": n}} for n in range(1, count + 1)
    ]
    return Dataset.from_list(rows)


def load_environment(kind: str = "guessing", count: int = 2, max_turns: int = 5):
    rubric = vf.Rubric(funcs=[found, thrift], weights=[1.0, 0.1])
    if kind == "tool":
        return vf.ToolEnv(tools=[add], dataset=questions(count), rubric=vf.Rubric(funcs=[right]), max_turns=max_turns)
    if kind == "single":
        return vf.SingleTurnEnv(dataset=questions(count), rubric=vf.Rubric(funcs=[right]))
    if kind == "grouped":
        return Guessing(dataset=questions(count), rubric=Grouped())
    made = Rewriting if kind == "rewriting" else Guessing
    return made(dataset=questions(count), rubric=rubric, max_turns=max_turns, system_prompt="Guess.")
