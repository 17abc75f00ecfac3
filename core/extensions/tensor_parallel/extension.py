"""Layers that ranks share: ``tensor_model_parallel_size`` of a learner. Its rules still stand in the kernel."""

from core.config.extensions import Extension

HERE = "core.extensions.tensor_parallel.split_layers"
EXTENSION = Extension(
    name="tensor_parallel",
    functions={"split_layers": f"{HERE}:split_layers", "check_layers": f"{HERE}:check_layers"},
)
