"""What a process that holds a rank of the learner loads of this repository."""

import subprocess
import sys

from tests.checkpoints import ROOT


def test_importing_the_learner_loads_at_most_thirty_modules_of_core_and_nothing_that_grades():
    code = "import sys, core.learner.learner; print(*(m for m in sys.modules if m.partition('.')[0] == 'core'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "core.learner.learner" in loaded and len(loaded) <= 30, loaded
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
