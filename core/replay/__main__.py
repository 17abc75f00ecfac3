"""Compute a recorded step again, or ask what another objective would have made of the same batch.

    python -m core.replay RUN --step 12                        compares every tensor with what was recorded
    python -m core.replay RUN --step 12 --phase advantages     compares one phase
    python -m core.replay RUN --step 12 --with actor_rollout_ref.actor.clip_ratio=0.1

A RUN is a run folder that was trained with ``trainer.capsule_steps=[12]``. Code that is not this repository's is named
on the command line, whatever the capsule names: ``--trainer my.py:Trainer algorithm.adv_estimator=my.py:f``. The exit
status is 0 where the step repeats,
1 where something differs and 2 for bad input.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from core.errors import InputError
from core.replay import PHASES
from core.safe_text.printable import printable


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line names and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m core.replay", description="Compute a recorded step again and name what differs."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="A run folder, or a folder of capsules.")
    parser.add_argument("--step", type=int, help="The step, one of trainer.capsule_steps (default: the only one kept).")
    parser.add_argument("--phase", choices=PHASES, action="append", help="Compare this phase alone (may be repeated).")
    told = "Print the metrics with another objective on the same batch (may be repeated)."
    parser.add_argument("--with", dest="changes", metavar="key=value", action="append", help=told)
    told = "A key whose value is code, as the run had it: the capsule's own word is not taken for it."
    parser.add_argument("code", nargs="*", metavar="key=value", help=told)
    told = "The trainer of a recipe of your own, as package.module:class or path/file.py:class."
    parser.add_argument("--trainer", metavar="module:class", help=told)
    args = parser.parse_intermixed_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    try:
        if args.changes and args.phase:
            raise InputError(f"--phase={args.phase[0]}: compares with the record, and --with does not; leave one out")
        from core.extensions.capsules.replay_report import replay, what_if  # imports torch

        code = {"code": args.code, "trainer": args.trainer}
        if args.changes:
            print(printable(what_if(args.run, args.step, args.changes, **code)))
            return 0
        done = replay(args.run, args.step, args.phase or PHASES, **code)
    except (InputError, OSError) as error:
        print(printable(f"core.replay: {error}"), file=sys.stderr)
        return 2
    print(printable(str(done)))
    return 1 if done.found else 0


if __name__ == "__main__":
    sys.exit(main())
