"""Pictures in prompts, learner and engines: a column ``images``. Its rules still stand in the kernel."""

from core.config.extensions import Extension

EXTENSION = Extension(name="vision")
