"""The studies of DAPO's recipe on a lab task; their registrations stand beside this file.

python -m recipes.dapo.study [--jobs 2] [--budget-min 45] [--report]     study.yaml: the paper's techniques
python -m recipes.dapo.study mismatch [the same]                         study_mismatch.yaml: noise in the engine
python -m recipes.dapo.study dose [the same]                             study_dose.yaml: again, on another task
python -m recipes.dapo.study edge [the same]                             study_edge.yaml: where it begins to cost
python -m recipes.dapo.study course [the same]                           study_course.yaml: what it costs on the way
"""

import sys
from pathlib import Path

from results.reporting.study_runs import chosen, main

if __name__ == "__main__":
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(__doc__)
    sys.exit(main(*chosen(Path(__file__).parent, sys.argv[1:])))
