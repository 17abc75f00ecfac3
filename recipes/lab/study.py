"""The studies of what the lab's tasks can tell apart; their registrations stand beside this file.

python -m recipes.lab.study trails [--jobs 2] [--budget-min 45] [--report]          study_trails.yaml
python -m recipes.lab.study tallies [the same]                                      study_tallies.yaml
python -m recipes.lab.study variants [the same]                                     study_variants.yaml: of GRPO
python -m recipes.lab.study variants_tallies [the same]                             the same on another task

Then recipes.lab.discrimination writes the scores of all tasks.
"""

import argparse
import sys
from pathlib import Path

from recipes.lab import discrimination
from results.reporting.study_runs import main

TASKS = sorted(path.stem.partition("_")[2] for path in Path(__file__).parent.glob("study_*.yaml"))

if __name__ == "__main__":
    text = "Runs what is missing of a task's study and writes the scores of all tasks. Takes a study's options, too."
    parser = argparse.ArgumentParser("python -m recipes.lab.study", description=text)
    parser.add_argument("task", choices=TASKS, help="The task whose study it is.")
    parser.add_argument("--report", action="store_true", help="Run nothing, and write what is there.")
    asked, options = parser.parse_known_args()
    status = main(Path(__file__).with_name(f"study_{asked.task}.yaml"), [*options, *["--report"] * asked.report])
    discrimination.write(Path("results"))
    sys.exit(status)
