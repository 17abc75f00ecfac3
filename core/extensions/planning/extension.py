"""Memory, time and disk of a run before it starts: ``python -m core.plan`` and ``DRY_RUN=1``. It adds no key."""

from core.config.extensions import Extension

EXTENSION = Extension(name="planning")
