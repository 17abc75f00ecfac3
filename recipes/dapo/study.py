"""The study of DAPO's techniques on a lab task; ``study.yaml`` beside this file is its registration.

python -m recipes.dapo.study [--jobs 2] [--budget-min 45] [--report]
"""

import sys
from pathlib import Path

from results.reporting.study_runs import main

if __name__ == "__main__":
    sys.exit(main(Path(__file__).with_name("study.yaml"), sys.argv[1:]))
