"""The studies of Search-R1's claims on a lab task; their registrations stand beside this file.

python -m recipes.search_r1.study [--jobs 2] [--budget-min 45] [--report]          study.yaml
python -m recipes.search_r1.study topk [the same]                                  study_topk.yaml: a noisy ranking
"""

import sys
from pathlib import Path

from results.reporting.study import load_study
from results.reporting.study_runs import main

FOLDER = Path(__file__).parent

if __name__ == "__main__":
    arguments = sys.argv[1:]
    topk = arguments[:1] == ["topk"]
    registration = FOLDER / ("study_topk.yaml" if topk else "study.yaml")
    if {"-h", "--help"} & {*arguments}:
        print(__doc__)
    elif "--report" not in arguments:
        from recipes.search_r1.knowledge_model import VARIED, prepare

        chosen = {"recipe": VARIED, "models": "varied"} if topk else {}
        for seed in load_study(registration).seeds:
            prepare(seed, **chosen)
    sys.exit(main(registration, arguments[topk:]))
