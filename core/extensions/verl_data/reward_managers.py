"""Reward managers that were written for verl: called with the answers of a step, as they are under verl.

A manager's tensor of token rewards is summed over an answer: advantages here start from one number an answer. It runs
in this process, without a deadline, as ``reward_manager=naive`` does.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from core.config import registry
from core.config.frozen import thaw
from core.extensions.verl_classes.reward_score import as_dict, default_compute_score
from core.extensions.verl_data.batch import DataProto, FinishedAnswer, batch_of
from core.rewards.grading import Failure, Job, Scorers, TokenJob, as_scores, report
from core.rewards.managers import register as register_here
from reward_scores import SCORERS
from reward_scores.score import Score, ScoreStatus

if TYPE_CHECKING:
    from core.config.schema import Config
    from core.config.sections.reward import RewardModelConfig

log = logging.getLogger(__name__)
RawRewardFn = Callable[..., Any]


class AbstractRewardManager(ABC):
    """The base class of reward managers that were written for verl."""

    @abstractmethod
    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: RawRewardFn | None,
        reward_fn_key: str = "data_source",
        **kwargs: Any,
    ): ...

    @abstractmethod
    def __call__(self, data: DataProto, return_dict: bool = False) -> Any: ...


class NaiveRewardManager(AbstractRewardManager):
    """Scores each answer by itself, at its last token; public managers extend verl's class of this name."""

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: RawRewardFn | None = None,
        reward_fn_key: str = "data_source",
        **kwargs: Any,
    ):
        self.tokenizer, self.num_examine, self.reward_fn_key = tokenizer, num_examine, reward_fn_key
        self.compute_score = compute_score or default_compute_score

    def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
        import torch

        rewards = torch.zeros(data.batch["responses"].shape, dtype=torch.float32)
        extra: dict[str, list[Any]] = defaultdict(list)
        for row, item in enumerate(data):
            length = int(item.batch["attention_mask"][item.batch["prompts"].shape[-1] :].sum())
            score = self.compute_score(
                data_source=item.non_tensor_batch[self.reward_fn_key],
                solution_str=self.tokenizer.decode(item.batch["responses"][:length], skip_special_tokens=True),
                ground_truth=item.non_tensor_batch["reward_model"]["ground_truth"],
                extra_info=item.non_tensor_batch.get("extra_info", {}),
            )
            parts = score if isinstance(score, Mapping) else {"score": score}
            rewards[row, length - 1] = parts["score"]
            for name, value in parts.items():
                extra[name].append(value)
        return {"reward_tensor": rewards, "reward_extra_info": extra} if return_dict else rewards


REWARD_MANAGER_REGISTRY: dict[str, type] = {"naive": NaiveRewardManager}  # what users' files register, and verl's naive


def register(name: str) -> Callable[[type], type]:
    """Return a decorator that names a manager, as :func:`core.rewards.managers.register` does.

    A name of this repository's own is left to it: public files register ``naive`` and ``dapo`` again. Such a class is
    named by ``reward_model.source=importlib``.
    """

    def named(kind: type) -> type:
        if name in registry.REWARD_MANAGERS:
            return kind
        REWARD_MANAGER_REGISTRY[name] = kind
        return register_here(name)(kind)

    return named


def get_reward_manager_cls(name: str) -> type:
    """Return the manager that a user's file registered. Raises ValueError for another name, as verl does."""
    if name not in REWARD_MANAGER_REGISTRY:
        raise ValueError(f"Unknown reward manager: {name}; the user's files register {list(REWARD_MANAGER_REGISTRY)}")
    return REWARD_MANAGER_REGISTRY[name]


def adapt(kind: Any) -> Callable[[RewardModelConfig, Scorers], VerlRewardManager] | None:
    """Return what makes the manager of a run from a class on verl's base, or None for another class."""
    if not isinstance(kind, type) or hasattr(kind, "run"):
        return None
    called = any("__call__" in vars(base) for base in kind.__mro__[:-1])
    return (lambda reward, scorers: VerlRewardManager(kind, reward, scorers)) if called else None


class VerlRewardManager:
    """The manager of a run that a class on verl's base carries out.

    It is made when the run's configuration is known (:meth:`attach`): verl passes it the tokenizer.
    """

    batched = True  # the answers of a step in one call, with their token ids

    def __init__(self, kind: type, reward: RewardModelConfig, scorers: Scorers):
        self.kind, self.reward, self.scorers = kind, reward, scorers
        self.manager: Any = None
        self.warned = False

    def attach(self, config: Config) -> None:
        """Make the manager. Raises what its constructor raises."""
        from core.learner.models import load_tokenizer

        self.tokenizer, data = load_tokenizer(config.actor_rollout_ref.model), config.data
        self.lengths = (data.max_prompt_length, data.max_response_length)
        self.source_key = data.reward_fn_key
        given = {name: thaw(value) for name, value in self.reward.reward_kwargs.items() if name not in _scorers()}
        offered = {"max_resp_len": data.max_response_length}
        parameters = inspect.signature(self.kind).parameters
        offered = {name: value for name, value in offered.items() if name in parameters}
        self.manager = self.kind(
            tokenizer=self.tokenizer,
            num_examine=self.reward.num_examine,
            compute_score=self.compute_score,
            reward_fn_key=self.source_key,
            **{**offered, **given},
        )

    def compute_score(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **options: Any
    ) -> Any:
        """Grade by the run's reward function, or by the table of scorers, as verl's function of this name does."""
        score = self.scorers(Job(data_source, solution_str, ground_truth, extra_info or {}))
        if not isinstance(score, Score):
            return score
        return as_dict(score) if self.scorers.scorer(data_source).name == "math_dapo" else score.value

    async def run(self, job: Job) -> Score | Failure:
        return (await self.run_together([job]))[0]

    async def run_together(self, jobs: Sequence[Job]) -> list[Score | Failure]:
        """Return the results of one call with all answers; what it raises is the failure of each."""
        try:
            with no_running_loop():
                results = self._results(jobs)
            return as_scores(results, len(jobs))
        except (Exception, SystemExit) as error:
            return [Failure(ScoreStatus.CRASH, report(error))] * len(jobs)

    def _results(self, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        data = batch_of([self._answer(job) for job in jobs], self.tokenizer.pad_token_id, *self.lengths)
        named = "return_dict" in inspect.signature(self.manager.__call__).parameters
        results = self.manager(data, return_dict=True) if named else self.manager(data)
        rewards, extra = results, {}
        if isinstance(results, Mapping):
            rewards, extra = results["reward_tensor"], results.get("reward_extra_info") or {}
        if rewards.dim() == 2:
            self._warn_of_steps(rewards)
            rewards = rewards.sum(dim=1)
        extra = {key: values for key, values in extra.items() if key != "score" and len(values) == len(jobs)}
        rows = ({key: values[row] for key, values in extra.items()} for row in range(len(jobs)))
        return [{**row, "score": value} for row, value in zip(rows, rewards.tolist(), strict=True)]

    def _warn_of_steps(self, rewards: Any) -> None:
        if not self.warned and bool(((rewards != 0).sum(dim=1) > 1).any()):
            self.warned = True
            log.warning("%s rewards several tokens of an answer: an answer has their sum", self.kind.__name__)

    def _answer(self, job: Job) -> FinishedAnswer:
        """Return an answer's ids and columns; a text that stands for an answer at start is encoded."""
        facts = dict(job.extra_info)
        columns = {
            self.source_key: job.data_source,
            "data_source": job.data_source,
            "reward_model": {"style": "rule", "ground_truth": job.ground_truth},
            "extra_info": facts,
            "__num_turns__": facts.get("num_turns"),
            "reward_scores": facts.get("rollout_reward_scores", {}),
        }
        if isinstance(job, TokenJob):
            columns |= {"uid": job.uid, "raw_prompt": list(job.messages)}
            return FinishedAnswer(job.prompt_ids, job.response_ids, job.response_mask, columns)
        ids = self.tokenizer.encode(job.response, add_special_tokens=False) or [self.tokenizer.pad_token_id]
        columns |= {"uid": "start", "raw_prompt": []}
        return FinishedAnswer([self.tokenizer.pad_token_id], ids, [True] * len(ids), columns)

    def close(self) -> None:
        """Do nothing: verl's managers hold nothing that they let go of."""


def _scorers() -> set[str]:
    return {scorer.name for scorer in SCORERS.values()}


@contextmanager
def no_running_loop() -> Iterator[None]:
    """Let code call ``asyncio.run`` though this thread's loop runs: managers of verl do, which calls them outside one.

    They stay in this thread, for time limits by signals work in no other.
    """
    running = asyncio.get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(running)
