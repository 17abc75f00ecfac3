"""The section ``reward_model.model``, a classifier that scores answers, with its rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.config.rulebook import Broken, RuleBook, Unused
from core.config.section import Section
from core.config.sections.model import FSDPConfig

if TYPE_CHECKING:
    from core.config.view import View


class RewardModelModelConfig(Section):
    path: str = "~/models/FsfairX-LLaMA3-RM-v0.1"  # a sequence or token classifier with one label
    # The policy's, whose text is put into the reward model's chat template; None: it reads the policy's token ids
    input_tokenizer: str | None = "policy"
    external_lib: str | None = None  # modules to import before the model loads; None: the policy's
    trust_remote_code: bool = False  # run Python code that comes with the model
    fsdp_config: FSDPConfig = FSDPConfig(dtype="bfloat16")


rules = RuleBook()


@rules.problem
def the_reward_model(c: View) -> Broken:
    if c.reward.weight and not c.reward.enable:
        yield (
            "reward_model.weight",
            "there is no model whose number could be added; set reward_model.enable=True and "
            "reward_model.model.path (or reward_model.judge.url), or leave it out",
        )
    if c.reward.enable and c.reward.model.input_tokenizer not in (None, "policy", c.model.path, c.model.tokenizer_path):
        yield (
            "reward_model.model.input_tokenizer",
            "is the tokenizer of what the policy wrote; the reward model's own comes with "
            "reward_model.model.path; leave it out, or null where both read the same token ids",
        )
    if c.reward.enable and c.reward.use_dynamic_bsz is False and not c.reward.micro_batch_size_per_gpu:
        yield (
            "reward_model.micro_batch_size_per_gpu",
            "is needed with reward_model.use_dynamic_bsz=False; give a number of answers a pass, or leave "
            "use_dynamic_bsz out: passes are then packed by tokens",
        )
    if c.reward.enable and c.reward.use_dynamic_bsz and c.reward.forward_max_token_len_per_gpu < c.reward.max_length:
        yield (
            "reward_model.forward_max_token_len_per_gpu",
            f"must hold an answer of reward_model.max_length={c.reward.max_length} tokens; raise it, or lower "
            "reward_model.max_length",
        )
    if c.reward.loads_model and c.reward.enable_resource_pool and c.trainer.backend == "local":
        yield (
            "reward_model.enable_resource_pool",
            "needs a cluster: trainer.backend=local has the reward model in its one process; set "
            "trainer.backend=ray, or leave it out",
        )
    for name in ("nnodes", "n_gpus_per_node"):
        if c.reward.loads_model and c.reward.enable_resource_pool and (not getattr(c.reward, name)):
            yield (
                f"reward_model.{name}",
                "is needed with reward_model.enable_resource_pool=True; give the nodes of the reward model's pool, "
                "and the GPUs of each of them",
            )
    if (
        c.reward.loads_model
        and c.reward.enable_resource_pool
        and c.reward.model.fsdp_config.fsdp_size > 0
        and c.reward.ranks % c.reward.model.fsdp_config.fsdp_size
    ):
        yield (
            "reward_model.model.fsdp_config.fsdp_size",
            f"must divide the {c.reward.ranks} ranks (reward_model.nnodes * reward_model.n_gpus_per_node); change "
            "one of them; -1 shares one copy of the weights between all",
        )


@rules.unused
def no_reward_model(c: View) -> Unused:
    if not c.reward.enable:
        yield (
            (
                "reward_model.model.*",
                "reward_model.max_length",
                "reward_model.micro_batch_size_per_gpu",
                "reward_model.use_dynamic_bsz",
                "reward_model.forward_max_token_len_per_gpu",
                "reward_model.enable_resource_pool",
                "reward_model.nnodes",
                "reward_model.n_gpus_per_node",
            ),
            "reward_model.enable is off",
        )
    if c.reward.judged:
        yield (
            (
                "reward_model.model.*",
                "reward_model.max_length",
                "reward_model.micro_batch_size_per_gpu",
                "reward_model.use_dynamic_bsz",
                "reward_model.forward_max_token_len_per_gpu",
                "reward_model.enable_resource_pool",
                "reward_model.nnodes",
                "reward_model.n_gpus_per_node",
            ),
            "reward_model.judge.url scores, and no reward model is loaded",
        )


@rules.unused
def passes_and_pools(c: View) -> Unused:
    if c.reward.use_dynamic_bsz:
        yield (("reward_model.micro_batch_size_per_gpu",), "use_dynamic_bsz packs passes by tokens")
    if not c.reward.use_dynamic_bsz:
        yield (("reward_model.forward_max_token_len_per_gpu",), "use_dynamic_bsz is off")
    yield (
        ("reward_model.model.fsdp_config.param_offload", "reward_model.model.fsdp_config.optimizer_offload"),
        "the reward model scores while answers are generated, and stays where it is",
    )
    if not c.reward.enable_resource_pool:
        yield (
            (
                "reward_model.nnodes",
                "reward_model.n_gpus_per_node",
                "reward_model.model.fsdp_config.offload_policy",
                "reward_model.model.fsdp_config.reshard_after_forward",
                "reward_model.model.fsdp_config.forward_prefetch",
                "reward_model.model.fsdp_config.fsdp_size",
            ),
            "one process holds the reward model (reward_model.enable_resource_pool is off)",
        )
