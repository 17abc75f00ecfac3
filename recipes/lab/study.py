"""The studies of what the lab's tasks can tell apart; their registrations stand beside this file.

python -m recipes.lab.study tallies [--jobs 2] [--budget-min 45] [--report]         study_tallies.yaml

Then recipes.lab.discrimination writes the scores of all tasks.
"""

import sys
from pathlib import Path

from recipes.lab import discrimination
from results.reporting.study_runs import main

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    status = main(Path(__file__).with_name(f"study_{sys.argv[1]}.yaml"), sys.argv[2:])
    discrimination.write(Path("results"))
    sys.exit(status)
