"""A judge behind a URL and a reward model: ``reward_model.enable``. Its keys still stand in the kernel."""

from core.config.extensions import Extension

EXTENSION = Extension(name="judge")
