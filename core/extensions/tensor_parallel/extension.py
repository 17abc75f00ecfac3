"""Layers that ranks share: ``tensor_model_parallel_size`` of a learner. Its rules still stand in the kernel."""

from core.config.extensions import Extension

EXTENSION = Extension(name="tensor_parallel")
