"""Layers that ranks share: ``tensor_model_parallel_size`` of a learner."""

from core.cluster.tensor_parallel.keys import SECTIONS, LayerKeys, RefLayerKeys, rules
from core.config.extensions import Extension

ACTOR, REF, CRITIC = SECTIONS
HERE = "core.cluster.tensor_parallel.split_layers"
EXTENSION = Extension(
    name="tensor_parallel",
    keys={ACTOR: LayerKeys, REF: RefLayerKeys, CRITIC: LayerKeys},
    rules=rules,
    derived=(
        (f"{REF}.tensor_model_parallel_size", lambda config: config.actor_rollout_ref.actor.tensor_model_parallel_size),
    ),
    functions={"split_layers": f"{HERE}:split_layers", "check_layers": f"{HERE}:check_layers"},
)
