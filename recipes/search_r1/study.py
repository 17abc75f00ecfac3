"""The study of Search-R1's claims on a lab task; ``study.yaml`` beside this file is its registration.

python -m recipes.search_r1.study [--jobs 2] [--budget-min 45] [--report]
"""

import sys
from pathlib import Path

from core.study import load_study, main

REGISTRATION = Path(__file__).with_name("study.yaml")

if __name__ == "__main__":
    if "--report" not in sys.argv[1:]:
        from recipes.lab.knowledge_model import prepare

        for seed in load_study(REGISTRATION).seeds:
            prepare(seed)
    sys.exit(main(REGISTRATION, sys.argv[1:]))
