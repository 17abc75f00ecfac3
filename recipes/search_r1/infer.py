"""Answer one question and print the episode turn by turn, by the loop of training and with its limits.

    python -m recipes.search_r1.infer "who wrote the score of Jaws?" actor_rollout_ref.model.path=MODEL [key=value ...]
    python -m recipes.search_r1.infer "who is the boss of bavu?" --prompt "Q: {question}" preset=study      # the lab's

Needs a retriever (``retriever.url``, or ``retriever.local`` in this process). Decoding is that of validation,
``actor_rollout_ref.rollout.val_kwargs``: greedy unless ``do_sample=True``. DRY_RUN=1 only checks the configuration.
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING, Any

from core.command_line import is_dry_run
from core.config import compose
from core.errors import InputError
from core.safe_text.printable import printable
from recipes.search_r1 import main_search_r1

if TYPE_CHECKING:
    from core.types import Trajectory
    from recipes.search_r1.config_schema import SearchR1Config

OVERRIDE = re.compile(r"[\w.+~]+=")


def prompt_of(question: str, config: SearchR1Config, tokenizer: Any, template: str | None = None) -> Any:
    """Return the prompt of the training data (the search prompt, or R1's without search) or of a ``template``."""
    from core.data.dataset import Encoder
    from core.types import Prompt
    from data_preprocess.open_qa import make_qa_row
    from data_preprocess.search_r1_prompts import PROMPTS

    row = make_qa_row(
        "question",
        {"question": question, "golden_answers": ["?"]},
        "infer",
        0,
        template or PROMPTS["search" if config.do_search else "r1"],
    )
    # Without a chat template the text goes in as it is, as the published code has it.
    chat = row["prompt"] if getattr(tokenizer, "chat_template", None) else row["prompt"][0]["content"]
    (ids,) = Encoder(tokenizer, config.data.apply_chat_template_kwargs).encode([chat])
    return Prompt(-1, "infer", tuple(ids), tuple(row["prompt"]), None, "question", row["extra_info"])


def answer(question: str, config: SearchR1Config, template: str | None = None) -> Trajectory:
    """Load the model into an engine and play the episode."""
    import asyncio

    from core.extensions.evaluation.engine_only import answering

    with answering(config, main_search_r1.TRAINER) as run:
        prompt = prompt_of(question, config, run.tokenizer, template)
        return asyncio.run(run.generate(prompt, 0, run.val_sampling))


def show(trajectory: Trajectory) -> str:
    """Return the segments in order, each under its author."""
    lines = [f"[{segment.role}]\n{segment.text.strip()}" for segment in trajectory.segments]
    end = f"[{trajectory.turns} turns, {trajectory.tool_calls} searches, ended by {trajectory.stop.value}]"
    return "\n\n".join([*lines, end])


def main(argv: list[str]) -> int:
    if not argv or OVERRIDE.match(argv[0]):
        print(__doc__, file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(prog="python -m recipes.search_r1.infer", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("question", help="The question, as one quoted text.")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Keys of the configuration, as a run's.")
    told = "The text around {question} (default: that of the training data)."
    parser.add_argument("--prompt", metavar="TEXT", help=told)
    args = parser.parse_intermixed_args(argv)
    try:
        config = compose("search_r1", args.overrides, main_search_r1.HOOKS)
        if not is_dry_run():
            print(printable(show(answer(args.question, config, args.prompt))))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
