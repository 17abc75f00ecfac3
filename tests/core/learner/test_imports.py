"""What a process that holds a rank of the learner loads of this repository."""

import subprocess
import sys

from tests.checkpoints import ROOT


def test_importing_the_learner_loads_neither_the_schema_nor_what_grades_decodes_or_records():
    code = "import sys, core.learner.learner; print(*(m for m in sys.modules if m.partition('.')[0] == 'core'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "core.learner.learner" in loaded
    above = (
        "core.config.checked",
        "core.config.schema",
        "core.rewards",
        "core.engines",
        "core.rollout",
        "core.cluster",
        "core.tracking",
    )
    assert not [name for name in loaded if name.startswith(above)]
