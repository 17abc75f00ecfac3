"""A stand-in for the package ``verl``, for users' files that import it where it is not installed.

It has what public tools, simulated users, reward functions, reward managers and data set classes import, and nothing
of verl's trainer: :data:`MODULES` lists it. Any other import is an ImportError that names what there is and what to
write instead. Nothing here is verl's code.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from core.config import stand_ins

HERE, BATCHES = "core.extensions.verl_classes", "core.extensions.verl_data"
TOOLS = "core.extensions.verl_tools"
SAID = "RLREPRO_STAND_IN_SAID"  # in the environment of graders and workers, which import the same files again


def _named(module: str, *names: str, place: str = HERE) -> dict[str, str]:
    return {name: f"{place}.{module}:{name}" for name in names}


def _scores(module: str, *names: str) -> dict[str, str]:
    return {name: f"{HERE}.reward_score:{module}__{name}" for name in names}


_SCHEMAS = _named(
    "base_tool",
    *("OpenAIFunctionPropertySchema", "OpenAIFunctionParametersSchema", "OpenAIFunctionSchema"),
    *("OpenAIFunctionToolSchema", "OpenAIFunctionParsedSchema", "OpenAIFunctionCallSchema", "OpenAIFunctionToolCall"),
    "ToolResponse",
)
_MATH = _scores(
    *("math_reward", "compute_score", "is_equiv", "strip_string", "last_boxed_only_string", "remove_boxed"),
)
_DEFAULT = _named("reward_score", "default_compute_score")
_REGISTER = _named("reward_managers", "register", place=BATCHES)
_MANAGER = _named("reward_managers", "AbstractRewardManager", place=BATCHES)
_DATASET = _named("data_class", "RLHFDataset", place=BATCHES)
_MANAGERS = _named("reward_managers", "REWARD_MANAGER_REGISTRY", "get_reward_manager_cls", place=BATCHES)
_NAIVE = _named("reward_managers", "NaiveRewardManager", place=BATCHES)
_TIMER = _named("utils", "simple_timer")
_TIMERS = {**_TIMER, "marked_timer": _TIMER["simple_timer"]}
_COPIES = _named("utils", "copy_to_local")
_BATCH = _named("batch", "DataProto", "DataProtoItem", place=BATCHES)

MODULES: dict[str, dict[str, str]] = {  # module of verl -> name in it -> where it is here
    "verl": _named("batch", "DataProto", place=BATCHES),
    "verl.protocol": _BATCH,
    "verl.tools": {},
    "verl.tools.base_tool": {**_named("base_tool", "BaseTool"), **_SCHEMAS},
    "verl.tools.schemas": _SCHEMAS,
    "verl.tools.gsm8k_tool": _named("builtin_tools", "Gsm8kTool", place=TOOLS),
    "verl.tools.geo3k_tool": _named("builtin_tools", "Geo3kTool", place=TOOLS),
    "verl.tools.search_tool": _named("builtin_tools", "SearchTool", place=TOOLS),
    "verl.tools.sandbox_fusion_tools": _named("builtin_tools", "SandboxFusionTool", place=TOOLS),
    "verl.tools.utils.search_r1_like_utils": _named("builtin_tools", "perform_single_search_batch", place=TOOLS),
    "verl.utils.reward_score.sandbox_fusion.utils": _named("builtin_tools", "_process_single_case", place=TOOLS),
    "verl.interactions": {},
    "verl.interactions.base": _named("base_interaction", "BaseInteraction"),
    "verl.interactions.gsm8k_interaction": _named("builtin_tools", "Gsm8kInteraction", place=TOOLS),
    "verl.workers": {},
    "verl.workers.reward_manager": {**_REGISTER, **_MANAGER, **_MANAGERS, **_NAIVE},
    "verl.workers.reward_manager.registry": {**_REGISTER, **_MANAGERS},
    "verl.workers.reward_manager.naive": _NAIVE,
    "verl.workers.reward_manager.abstract": {**_MANAGER, **_named("reward_managers", "RawRewardFn", place=BATCHES)},
    "verl.utils": _named("utils", "hf_tokenizer"),
    "verl.utils.tokenizer": _named("utils", "hf_tokenizer"),
    "verl.utils.rollout_trace": _named("utils", "rollout_trace_op", "rollout_trace_attr"),
    "verl.utils.fs": {**_COPIES, "copy_local_path_from_hdfs": _COPIES["copy_to_local"]},
    "verl.utils.hdfs_io": _named("utils", "exists", "makedirs", "copy"),
    "verl.utils.device": _named(
        *("device", "is_cuda_available", "is_npu_available", "get_device_name", "get_device_id", "get_torch_device"),
        "get_nccl_backend",
    ),
    "verl.utils.py_functional": _named(
        *("utils", "append_to_dict", "union_two_dict", "convert_to_regular_types", "timeout_limit"),
    ),
    "verl.utils.logger": _named("utils", "print_rank_0", "log_with_rank"),
    "verl.utils.logging_utils": _named("utils", "set_basic_config"),
    "verl.utils.profiler": _TIMERS,
    "verl.utils.profiler.performance": _TIMERS,
    "verl.utils.debug": _TIMERS,  # the timers' module until 0.5
    "verl.utils.debug.performance": _TIMERS,
    "verl.utils.import_utils": _named("utils", "deprecated"),
    "verl.utils.ray_utils": _named("utils", "get_event_loop"),
    "verl.utils.model": _named("utils", "compute_position_id_with_mask"),
    "verl.utils.torch_functional": _named("utils", "postprocess_data", "masked_mean", "masked_sum"),
    "verl.utils.dataset": _DATASET,
    "verl.utils.dataset.rl_dataset": _DATASET,
    "verl.utils.reward_score": {
        **_DEFAULT,
        "_default_compute_score": _DEFAULT["default_compute_score"],
    },
    "verl.utils.reward_score.gsm8k": _scores("gsm8k", "extract_solution", "compute_score"),
    "verl.utils.reward_score.math": _MATH,  # its name until 0.5
    "verl.utils.reward_score.math_reward": _MATH,
    "verl.utils.reward_score.math_batch": _scores("math_batch", "compute_score_batched"),
    "verl.utils.reward_score.math_dapo": _scores(
        *("math_dapo", "last_boxed_only_string", "normalize_final_answer", "is_correct_minerva"),
        *("is_correct_strict_box", "verify", "compute_score"),
    )
    | {"remove_boxed": f"{HERE}.reward_score:math_reward__remove_boxed"},
    "verl.utils.reward_score.math_verify": _scores("math_verify", "compute_score"),
    "verl.utils.reward_score.geo3k": _scores("geo3k", "format_reward", "acc_reward", "compute_score"),
    "verl.utils.reward_score.prime_math": _scores(
        *("prime_math", "compute_score", "match_answer", "grade_answer", "math_equal")
    ),
    "verl.utils.reward_score.prime_math.grader": _scores("prime_math", "math_equal"),
    "verl.utils.reward_score.prime_code": _scores("prime_code", "compute_score"),
    "verl.utils.reward_score.sandbox_fusion": _scores("sandbox_fusion", "compute_score"),
    "verl.utils.reward_score.search_r1_like_qa_em": _scores(
        *("search_r1_like_qa_em", "normalize_answer", "em_check", "subem_check", "extract_solution"),
        *("compute_score", "compute_score_subem"),
    ),
}

# Parts of verl that have no counterpart here: not even a fork's own module of them is imported
ABSENT = ("verl.experimental", "verl.trainer", "verl.tools.mcp", "verl.tools.utils.mcp", "verl.workers.rollout")
ADVICE = {  # beginning of a module of verl -> what to write instead; the first that fits
    "verl.experimental.agent_loop": "write the loop on core.rollout.agent_loop.AgentLoop, whose run() asks the episode "
    "for turns: verl's server manager is not here",
    "verl.tools.mcp": "write a class on BaseTool or core.rollout.tools.tools.Tool that asks the MCP server itself",
    "verl.tools.utils.mcp": "write a class on BaseTool or core.rollout.tools.tools.Tool that asks the server itself",
    "verl.tools": "write the tool on BaseTool, or on core.rollout.tools.tools.Tool",
    "verl.interactions": "write the user on BaseInteraction, or on core.rollout.tools.interactions.Interaction",
    "verl.utils.reward_score": "call reward_scores.scorer_for(data_source), or copy the function into your file",
    "verl.workers.reward_manager": "write the manager on AbstractRewardManager",
    "verl.utils.dataset": "write the class on RLHFDataset, or write parquet rows",
    "verl.experimental.reward_loop": "write the manager on AbstractRewardManager of verl.workers.reward_manager",
    "verl.trainer": "recipes here replace trainers: a trainer's hooks are in core/ray_trainer.py",
}


def import_problem(module: str, name: str | None = None) -> str | None:
    """Return why a module of verl, or a name in one, cannot be imported from the stand-in, or None where it can."""
    if module in MODULES and (name is None or name in MODULES[module] or f"{module}.{name}" in MODULES):
        return None
    if name is None and any(known.startswith(f"{module}.") for known in (*MODULES, *ADVICE)):
        return None
    beside = module.rpartition(".")[0]
    there = ", ".join(MODULES.get(module) or [one for one in MODULES if one.rpartition(".")[0] == beside] or MODULES)
    what = module if name is None or module not in MODULES else f"{module}.{name}"
    advice = next((fix for start, fix in ADVICE.items() if module.startswith(start)), "leave the import out")
    return f"{what} is not part of the stand-in for verl, which is not installed; it has {there}; {advice}"


class StandInModule(ModuleType):
    """A module of the stand-in: a name is imported from where it is when a file asks for it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if (path := MODULES.get(self.__name__, {}).get(name)) is None:
            if import_problem(f"{self.__name__}.{name}") is None:
                return import_module(f"{self.__name__}.{name}")
            if hasattr(fork := stand_ins.fork_module(self.__name__), name):
                return getattr(fork, name)
            raise AttributeError(import_problem(self.__name__, name))
        module, _, attribute = path.partition(":")
        value = getattr(import_module(module), attribute)
        setattr(self, name, value)
        return value


def module(name: str) -> ModuleType:
    """Return a module of the stand-in by its name. Raises ImportError for one that it does not have."""
    if (problem := import_problem(name)) is not None:
        raise ImportError(problem, name=name)
    if SAID not in os.environ:
        os.environ[SAID] = "1"
        print(f"verl is not installed: files that import it get the stand-in of {HERE}", file=sys.stderr, flush=True)
    stand_in = StandInModule(name)
    if MODULES.get(name):
        stand_in.__all__ = list(MODULES[name])
    return stand_in
