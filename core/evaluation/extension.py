"""Answers, their scores and a report, without training: ``python -m core.evaluate``. It adds no key."""

from core.config.extensions import Extension

EXTENSION = Extension(name="evaluation")
