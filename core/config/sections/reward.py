"""The sections ``reward_model`` and ``custom_reward_function`` with the rules on who grades."""

from __future__ import annotations

from typing import Literal

from core.config import limits, registry
from core.config.frozen import FrozenDict
from core.config.names import RewardManager
from core.config.rulebook import Broken, RuleBook, Unused, View
from core.config.section import Open, Section
from core.config.sections.judge import JudgeConfig, RewardModelModelConfig


class RewardModuleConfig(Section):
    path: str | None = None  # file or module of a reward manager of your own (source=importlib)
    name: str | None = None  # class of that manager


class SandboxConfig(Section):
    """Where programs that are answers run, if not on a Sandbox Fusion server."""

    allow_unisolated: bool = False  # run programs also where nothing isolates them
    timeout_s: limits.Positive = 10.0  # seconds for a test; in graders, an answer's share of reward_model.timeout_s
    memory_limit_mb: limits.Count = 1024  # MiB that a program may map


class SandboxFusionConfig(Section):
    url: str | None = None  # address of a server, with /run_code; None: programs run in a sandbox on this machine
    max_concurrent: limits.Count = 64  # requests at a time
    memory_limit_mb: limits.Count = 1024  # MiB that a program may use there
    give_up_s: limits.Positive = 120.0  # seconds for which a server that is away is tried again, also in graders
    api_key_env: str | None = None  # environment variable that holds the server's key, if it needs one


class CustomRewardFunctionConfig(Section):
    path: str | None = None  # file or module of your own scorer; None: the table of reward_scores
    name: str = "compute_score"  # the function in that file
    reward_kwargs: Open = FrozenDict()  # arguments of that function


class RewardModelConfig(Section):
    # the managers here and those that module.path registers, or your own as module.name of module.path (importlib)
    source: Literal["register", "importlib"] = "register"
    module: RewardModuleConfig = RewardModuleConfig()
    # who grades: this process (naive), graders (prime, dapo), a function of lists (batch), or a class of module.path
    reward_manager: RewardManager = "naive"
    num_workers: limits.Count | None = None  # grading processes; None: one a core, at most 4
    timeout_s: limits.Positive = 10.0  # seconds for an answer (batch: a step's call) and for a program's tests together
    memory_limit_mb: limits.Count | None = 1024  # MiB that a grader may map; None: no limit
    num_examine: limits.Size = 0  # answers of each data source that a training step prints
    val_num_examine: limits.Size = 1  # answers of each data source that a validation prints
    reward_kwargs: Open = FrozenDict()  # scorer's name -> its options, as in {gsm8k: {method: flexible}}
    # what a function of yours gets as solution_str: what the policy wrote, or the whole response with what tools wrote
    solution_str: Literal["policy", "response"] = "policy"
    on_error: Literal["zero", "mask", "raise"] = "zero"  # what becomes of an answer whose scorer failed
    sandbox: SandboxConfig = SandboxConfig()
    sandbox_fusion: SandboxFusionConfig = SandboxFusionConfig()
    enable: bool = False  # a model scores the examples whose reward_model.style is "model"
    weight: float = 0.0  # what the model's number counts beside a rule's score, in the other examples
    model: RewardModelModelConfig = RewardModelModelConfig()
    enable_resource_pool: bool = False  # over Ray, nodes whose ranks share the model; False: one process has it
    nnodes: limits.Size = 0  # nodes of that pool
    n_gpus_per_node: limits.Size = 0  # ranks on each of them, a GPU each
    judge: JudgeConfig = JudgeConfig()
    max_length: limits.Count | None = None  # tokens that the model sees; None: the longest prompt and answer
    micro_batch_size_per_gpu: limits.Count | None = None  # answers a pass; None: use_dynamic_bsz decides
    # fill passes up to a number of tokens; None: where no micro-batch size is given
    use_dynamic_bsz: bool | None = None
    forward_max_token_len_per_gpu: limits.Count | None = None  # tokens a pass; None: the critic's

    @property
    def uses_model(self) -> bool:
        """Whether a model scores examples of its own, and counts beside rules in the others."""
        return self.enable

    @property
    def pass_size(self) -> str:
        """The key that bounds the model's passes, whose value may be lowered."""
        return "forward_max_token_len_per_gpu" if self.use_dynamic_bsz else "micro_batch_size_per_gpu"

    @property
    def model_weight(self) -> float:
        """What the model's number counts beside a rule's."""
        return self.weight

    @property
    def judged(self) -> bool:
        """Whether the model is a judge behind a URL."""
        return self.enable and self.judge.url is not None

    @property
    def loads_model(self) -> bool:
        """Whether the model is a classifier, which this run loads."""
        return self.enable and self.judge.url is None

    @property
    def ranks(self) -> int:
        """Processes that share the model."""
        return self.nnodes * self.n_gpus_per_node if self.enable_resource_pool else 1


rules = RuleBook()


@rules.problem
def who_grades(c: View) -> Broken:
    if c.reward.source == "register" and c.reward.reward_manager == "batch" and not c.custom.path:
        yield (
            "reward_model.reward_manager",
            "calls a function of yours with lists of answers, and there is none; set "
            "custom_reward_function.path, or use prime",
        )
    if c.own_manager and c.reward.source == "register" and not c.reward.module.path:
        yield (
            "reward_model.reward_manager",
            f"must be one of {', '.join(registry.REWARD_MANAGERS)}, or a name that a module of yours "
            "registers; choose one, or name the "
            f'module with the class under @register("{c.reward.reward_manager}"), reward_model.module.path=my.py',
        )
    for name in ("path", "name"):
        if c.reward.source == "importlib" and (not getattr(c.reward.module, name)):
            yield (
                f"reward_model.module.{name}",
                "is needed with reward_model.source=importlib; name the manager's class and its file or module, or "
                "use reward_model.source=register",
            )
    if c.reward.memory_limit_mb is not None and c.reward.memory_limit_mb < 256:
        yield (
            "reward_model.memory_limit_mb",
            "is too little for a worker that has only started; at least 256; raise it, or null for no limit",
        )


@rules.warning
def what_a_function_reads(c: View) -> Broken:
    if (
        c.users_function
        and (not c.gives("reward_model.solution_str"))
        and (
            c.rollout.agent_loop not in (None, "single_turn_agent")
            or c.rollout.multi_turn.tool_config_path  # rows may name the tool agent
        )
    ):
        yield (
            "reward_model.solution_str",
            "a reward function of yours gets what the policy wrote and not what tools or retrieval wrote between "
            'it, unlike verl\'s (extra_info["rollout"]["segments"] has both); set '
            "reward_model.solution_str=response for the whole response, or =policy to say that this is meant",
        )


@rules.unused
def parts_that_are_off(c: View) -> Unused:
    if c.manager.in_process:
        yield (
            ("reward_model.num_workers", "reward_model.timeout_s", "reward_model.memory_limit_mb"),
            f"reward_model.reward_manager={c.reward.reward_manager} grades in this process, but for what sympy "
            "and math-verify compare (prime_math, geo3k, method=math_verify); prime has workers for all",
        )
    if c.reward.source == "importlib":
        yield (
            ("reward_model.reward_manager",),
            "reward_model.source=importlib takes the manager of reward_model.module",
        )
    if not c.reward.sandbox_fusion.url:
        yield (
            (
                "reward_model.sandbox_fusion.max_concurrent",
                "reward_model.sandbox_fusion.memory_limit_mb",
                "reward_model.sandbox_fusion.give_up_s",
                "reward_model.sandbox_fusion.api_key_env",
            ),
            "reward_model.sandbox_fusion.url is not set",
        )
    if not c.own_manager:
        yield (
            ("reward_model.module.path",),
            f"reward_model.reward_manager={c.reward.reward_manager} is a manager of this repository; a class of yours "
            "under that name needs reward_model.source=importlib and reward_model.module.name",
        )
    if c.reward.source == "register":
        yield (("reward_model.module.name",), "reward_model.source is not importlib")
    if not c.custom.path:
        yield (
            ("custom_reward_function.name", "custom_reward_function.reward_kwargs*"),
            "custom_reward_function.path is not set",
        )
    if not c.custom.path and not c.own_manager:
        yield (
            ("reward_model.solution_str",),
            "a scorer of this repository always reads what the policy wrote (custom_reward_function.path is not set)",
        )
