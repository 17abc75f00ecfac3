"""The studies of Search-R1's claims on a lab task; their registrations stand beside this file.

python -m recipes.search_r1.study [--jobs 2] [--budget-min 45] [--report]          study.yaml
python -m recipes.search_r1.study topk [the same]                                  study_topk.yaml: a noisy ranking
python -m recipes.search_r1.study conflicts [the same]                             what that task can tell apart
"""

import sys
from pathlib import Path

from results.reporting.study import load_study
from results.reporting.study_runs import chosen, main

FOLDER = Path(__file__).parent

if __name__ == "__main__":
    registration, arguments = chosen(FOLDER, sys.argv[1:])
    if {"-h", "--help"} & {*arguments}:
        print(__doc__)
    elif "--report" not in arguments:
        from recipes.search_r1.knowledge_model import VARIED, prepare

        others = {"recipe": VARIED, "models": "varied"} if registration.stem == "study_topk" else {}
        study = load_study(registration)
        for seed in () if study.prepare else study.seeds:  # a study that names what prepares it needs no knowledge
            prepare(seed, **others)
    sys.exit(main(registration, arguments))
