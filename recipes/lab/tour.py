"""The way of one prompt through the code, from its parquet row to the changed weight, as files in
order.

    python -m recipes.lab.tour

Trains two steps of GRPO's lab in this process (4 prompts, 2 answers each), watches which files of
this repository the second step enters, and prints those that the prompt passes through with what
each of them does with it. Files that look up a setting, draw a seed, record, or serve one of these
alone stand behind it. It is a reading list that cannot be out of date: a file of the list that was
not entered is an error.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = (
    *("preset=lab", "trainer.backend=local", "trainer.cpu_threads=1", "trainer.logger=[jsonl]"),
    *("trainer.total_training_steps=2", "trainer.val_before_train=False", "trainer.test_freq=-1"),
    *(
        "trainer.save_freq=-1",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    ),
    *("actor_rollout_ref.rollout.n=2", "trainer.resume_mode=disable"),
)
STATIONS = {
    "core/ray_trainer.py": "begins the step, in which the prompt's answers are collected, weighed "
    "and trained on",
    "core/rollout/collect.py": "draws the ordinal, has the prompt answered n times and scored, "
    "keeps or drops a group",
    "core/data/prompts.py": "finds the example of the ordinal, and makes token ids of it by the "
    "chat template",
    "core/data/parquet.py": "reads the example's row: question, ground truth, data source",
    "core/rollout/agent_loop.py": "asks for each answer to it, with a seed of its own",
    "core/engines/in_process_engine.py": "lets all requests decode together, one token of each a "
    "step",
    "core/engines/hf.py": "runs the policy over the prompt once and over the answers token by "
    "token",
    "core/engines/sampling.py": "draws each next token from the policy's logits",
    "core/engines/engine.py": "decides after each token whether an answer has ended",
    "core/types.py": "holds an answer: its tokens, which of them the policy wrote, and their "
    "log-probs; then the batch",
    "core/rewards/layer.py": "gives the answer's text to the scorer of its data source",
    "reward_scores/hops.py": "compares it with the ground truth: the score",
    "core/learner/batching.py": "lays the tokens of all answers end to end, and cuts the batch as "
    "memory allows",
    "core/cluster/workers.py": "takes the batch to the models, here in this process",
    "core/learner/passes.py": "runs the model over the packed sequences",
    "core/learner/packed_attention.py": "packs prompts and answers without padding; a prompt that "
    "answers share is there once",
    "core/learner/log_probs.py": "turns hidden states into log-probs, some of the vocabulary's "
    "logits at a time",
    "core/algorithm/advantages.py": "compares the scores within the group: an advantage for every "
    "token",
    "core/algorithm/losses.py": "weighs the tokens' log-probs by it: the clipped loss",
    "core/learner/learner.py": "sums the gradients of the batch and takes the optimizer's step",
}


def visited(*overrides: str) -> list[str]:
    """Train two steps of the lab and return the files that the second one entered, in order.

    The lab's base model must be there.
    """
    from core.config.composition import compose
    from core.ray_trainer import RayPPOTrainer

    files: dict[str, None] = {}

    def enter(frame: FrameType, event: str, _: Any) -> None:  # what sys.setprofile calls back
        path = frame.f_code.co_filename
        if (
            event == "call"
            and path.startswith(f"{ROOT}/")
            and "/.venv/" not in path
            and path != __file__
        ):
            files[path[len(str(ROOT)) + 1 :]] = None

    class Toured(RayPPOTrainer):
        """The trainer, watched from the first prompt of its last step to the end of its update."""

        def collect(self, metrics: Any) -> Any:
            if metrics.step == self.config.trainer.total_training_steps:
                sys.setprofile(enter)
            return super().collect(metrics)

        def update(self, batch: Any, metrics: Any) -> None:
            super().update(batch, metrics)
            sys.setprofile(None)

    with tempfile.TemporaryDirectory() as folder:
        settings = [*SETTINGS, f"trainer.default_local_dir={folder}/grpo/tour", *overrides]
        Toured(compose("grpo", settings)).init_workers().fit()
    return list(files)


def main() -> None:
    options = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    argparse.ArgumentParser(prog="python -m recipes.lab.tour", **options).parse_args()
    from recipes.lab.prepare import prepare

    prepare()
    files = visited()
    if absent := [file for file in STATIONS if file not in files]:
        raise SystemExit(
            f"the prompt did not enter {', '.join(absent)}: mend STATIONS of recipes/lab/tour.py"
        )
    for number, (file, words) in enumerate(STATIONS.items(), 1):
        print(f"{number:3}  {file}\n     {words}")
    print(f"{len(STATIONS)} files, from the row to the changed weight. They also call:")
    print("\n".join(f"     {file}" for file in files if file not in STATIONS))


if __name__ == "__main__":
    main()
