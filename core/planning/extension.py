"""Memory, time and disk of a run before it starts: ``python -m core.plan`` and ``DRY_RUN=1``. It adds no key."""

from core.config.extensions import Extension

HERE = "core.planning"

EXTENSION = Extension(
    name="planning",
    functions={
        "plan": f"{HERE}.estimate:plan_on",
        "architecture_problems": f"{HERE}.model_rules:model_problems",
        "plan_lines": f"{HERE}.dry_run:plan_lines",
    },
)
