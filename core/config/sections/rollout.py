"""The section ``actor_rollout_ref.rollout`` with its rules: sampling, engines, episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from core.config import when
from core.config.limits import FULL_PRECISION, Count, DType, NonNegative, OffOrCount, Positive, PositiveShare
from core.config.registry import TOOL_AGENT, AgentLoop, EngineName
from core.config.rulebook import Broken, RuleBook, View
from core.config.section import ARGUMENTS, CODE, FrozenDict, Open, Section, execution, files, key


class MultiTurnConfig(Section):
    """Limits are those of an episode, which core/rollout/tool_agent.py plays."""

    enable: bool = key(False, "trajectories are episodes in which the policy calls tools")
    max_assistant_turns: Count | None = key(None, "turns of the policy; null: until the response is full")
    max_user_turns: Count | None = key(None, "turns in which tools or a user answer; null: no limit of its own")
    max_tool_calls: Count | None = key(None, "tool calls of an episode; null: no limit of its own")
    max_parallel_calls: Count = key(1, "calls of one turn; those beyond are not made")
    tool_config_path: str | None = files(None, "YAML file with the tools, see core/rollout/tools.py", code=CODE)
    interaction_config_path: str | None = files(
        None, "YAML file with simulated users (core/rollout/tools.py)", code=CODE
    )
    tool_timeout_s: Positive = execution(30.0, "seconds a tool call or a user's turn may take; a tool may have its own")
    max_tool_response_length: Count = key(256, "characters of a tool's answer that are kept")
    tool_response_truncate_side: Literal["left", "middle", "right"] = key(
        "middle", "the part of a tool's answer that is kept"
    )
    format: Literal["hermes"] = key("hermes", "how a tool call is written")
    deterministic_tools: bool = execution(False, "decoding waits for tools, to repeat to the bit", when.IN_PROCESS)


class ValKwargs(Section):
    """Sampling of validation answers; greedy unless ``do_sample``."""

    n: Count = key(1, "answers a question")
    do_sample: bool = key(False, "sample validation answers; False: greedy")
    temperature: NonNegative = key(0.0, "sampling temperature for validation", when.SAMPLED)
    top_p: PositiveShare = key(1.0, "top-p (nucleus) for validation; 1 disables", when.SAMPLED)
    top_k: OffOrCount = key(-1, "top-k for validation; -1 disables", when.SAMPLED)


class RolloutConfig(Section):
    name: EngineName | None = execution(None, "engine that generates; null: vllm where it and a GPU are there, else hf")
    nnodes: Count | None = execution(
        None, "nodes of the engines' own pool (hybrid_engine=False); null: 1", when.OWN_POOL
    )
    n_gpus_per_node: Count | None = execution(
        None, "GPUs a node of that pool", when.OWN_POOL, follows="trainer.n_gpus_per_node"
    )
    n: Count = key(1, "trajectories a prompt")
    do_sample: bool = key(True, "sample answers; training needs it")
    temperature: NonNegative = key(1.0, "sampling temperature for training")
    top_p: PositiveShare = key(1.0, "top-p (nucleus) for training; 1 disables")
    top_k: OffOrCount = key(-1, "top-k for training; -1 disables")
    ignore_eos: bool = key(False, "go on to max_response_length beyond the end of an answer, for measuring speed")
    val_kwargs: ValKwargs = key(ValKwargs())
    dtype: DType | None = key(
        None,
        "number format of the engine; null: the learner's or float32 in one process with the hf engine, else bfloat16",
    )
    tensor_model_parallel_size: Count = execution(
        2, "GPUs that share each layer of one engine", when.SERVES + when.OVER_RAY
    )
    gpu_memory_utilization: PositiveShare = execution(
        0.5, "share of a GPU's memory for weights and KV cache", when.SERVES
    )
    enforce_eager: bool = execution(False, "run without CUDA graphs", when.SERVES)
    free_cache_engine: bool = execution(
        True, "give memory back while the learner works", when.SERVES + when.SHARED_GPUS
    )
    max_num_batched_tokens: Count = execution(8192, "tokens in one iteration of the engine")
    max_num_seqs: Count = execution(1024, "sequences that an engine decodes at once")
    update_weights_bucket_megabytes: Count = execution(
        2048, "size in which weights travel from learner to engine", when.OVER_RAY
    )
    max_model_len: Count | None = execution(
        None, "tokens of a sequence; null: prompt and response lengths", when.SERVES
    )
    enable_chunked_prefill: bool = execution(True, "split a long prompt over several iterations", when.SERVES)
    enable_prefix_caching: bool = execution(True, "compute a prefix that sequences share once", when.SERVES)
    engine_kwargs: Open = execution(
        FrozenDict(),
        "further arguments of the engine: engine_kwargs.vllm.*, engine_kwargs.hf.*",
        when.OF_THE_ENGINE,
        code=ARGUMENTS,
    )
    agent_loop: AgentLoop | None = key(None, "plays episodes; null: tool agent with multi_turn.enable, else one turn")
    multi_turn: MultiTurnConfig = key(MultiTurnConfig(), used_if=when.EPISODES)
    log_prob_micro_batch_size_per_gpu: Count | None = execution(
        None, "trajectories of a pass for old log-probs; null: the actor's", when.NOT_PACKED
    )
    log_prob_use_dynamic_bsz: bool | None = execution(None, "fill passes of old log-probs by tokens; null: the actor's")
    log_prob_max_token_len_per_gpu: Count | None = execution(
        None,
        "tokens of a pass for old log-probs",
        when.PACKED,
        follows="actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    )


HF_OPTIONS = ("cache_gib", "max_batch_rows", "max_prefill_tokens")  # core.engines.hf.HFEngine

rules = RuleBook()


@rules.problem
def who_plays_episodes(c: View) -> Broken:
    if "generate" in c.hooks and c.rollout.agent_loop is None:
        yield (
            "actor_rollout_ref.rollout.agent_loop",
            f"the trainer of recipe {c.recipe} plays episodes; leave it out, or name a loop: tool_agent, "
            "path/file.py:Class",
        )


@rules.problem
def training_samples_the_policy(c: View) -> Broken:
    if c.rollout.top_p < 1 and not c.corrects:
        yield (
            "actor_rollout_ref.rollout.top_p",
            "samples from another distribution than the one that trains, and no rollout correction weighs for "
            "it; set 1.0 (val_kwargs.top_p is free), or algorithm.rollout_correction.rollout_is=token",
        )
    if c.rollout.top_k != -1 and not c.corrects:
        yield (
            "actor_rollout_ref.rollout.top_k",
            "samples from another distribution than the one that trains, and no rollout correction weighs for "
            "it; set -1 (val_kwargs.top_k is free), or algorithm.rollout_correction.rollout_is=token",
        )
    if c.rollout.temperature == 0 and c.rollout.do_sample:
        yield (
            "actor_rollout_ref.rollout.temperature",
            "training needs answers that differ; set 1.0; greedy validation is val_kwargs.do_sample=False",
        )
    if not c.rollout.do_sample and not c.trainer.val_only:
        yield (
            "actor_rollout_ref.rollout.do_sample",
            "training needs answers that differ; leave it out; greedy validation is val_kwargs.do_sample=False",
        )


@rules.problem
def validation_sampling(c: View) -> Broken:
    if c.val.do_sample and c.val.temperature == 0:
        yield (
            "actor_rollout_ref.rollout.val_kwargs.temperature",
            "contradicts actor_rollout_ref.rollout.val_kwargs.do_sample=True; set a temperature, or "
            "do_sample=False for greedy answers",
        )


@rules.problem
def the_engine_holds_sequences(c: View) -> Broken:
    if (
        "max_model_len" in c.engine.reads
        and c.rollout.max_model_len is not None
        and c.rollout.max_model_len < c.longest
    ):
        yield (
            "actor_rollout_ref.rollout.max_model_len",
            f"must hold max_prompt_length + max_response_length = {c.longest} tokens; raise it, or leave it out",
        )
    if (
        "enable_chunked_prefill" in c.engine.reads
        and not c.rollout.enable_chunked_prefill
        and c.rollout.max_num_batched_tokens < c.longest
    ):
        yield (
            "actor_rollout_ref.rollout.max_num_batched_tokens",
            f"must hold a sequence of {c.longest} tokens where prefill is not chunked; raise it, or "
            "actor_rollout_ref.rollout.enable_chunked_prefill=True",
        )
    if "enable_chunked_prefill" in c.engine.reads and c.rollout.max_num_batched_tokens < c.rollout.max_num_seqs:
        yield (
            "actor_rollout_ref.rollout.max_num_batched_tokens",
            f"must be at least actor_rollout_ref.rollout.max_num_seqs={c.rollout.max_num_seqs}: each sequence "
            "takes one of them a step; change one of them",
        )


@rules.problem
def options_of_engines(c: View) -> Broken:
    if not c.policy.hybrid_engine and c.trainer.backend == "local":
        yield (
            "actor_rollout_ref.hybrid_engine",
            "needs a cluster: trainer.backend=local runs learner and engine in one process; set "
            "trainer.backend=ray, or leave it out",
        )
    hf = c.rollout.engine_kwargs.get("hf") or {}
    if c.rollout.name == "hf" and set(hf if isinstance(hf, Mapping) else [str(hf)]) - set(HF_OPTIONS):
        yield (
            "actor_rollout_ref.rollout.engine_kwargs",
            f"hf has {', '.join(HF_OPTIONS)} and no other option; leave out what it lacks",
        )
    if (
        c.engine.one_receiver
        and c.cluster
        and not c.policy.hybrid_engine
        and c.config.needs_engine
        and c.rollout.tensor_model_parallel_size > 1
    ):
        yield (
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
            f"an engine of {c.rollout.name} receives weights in one process, and a pool of its own "
            "(actor_rollout_ref.hybrid_engine=False) has one for each GPU; set it to 1, or "
            "actor_rollout_ref.hybrid_engine=True",
        )
    for section, part, samples in (
        ("actor_rollout_ref.rollout", c.rollout, True),
        ("actor_rollout_ref.rollout.val_kwargs", c.val, c.val.do_sample),
    ):
        if not c.engine.top_p_within_top_k and samples and part.top_k > 0 and part.top_p < 1:
            yield (
                f"{section}.top_k",
                f"together with {section}.top_p={part.top_p} it has another meaning in {c.rollout.name}, whose top_p "
                "counts the whole vocabulary; set one of them, or actor_rollout_ref.rollout.name=vllm",
            )


@rules.warning
def greedy_answers_are_alike(c: View) -> Broken:
    if c.val.n > 1 and not c.val.do_sample:
        yield (
            "actor_rollout_ref.rollout.val_kwargs.n",
            "greedy answers to a question are all the same; with "
            "actor_rollout_ref.rollout.val_kwargs.do_sample=True they are sampled, as verl's asynchronous rollout does",
        )


@rules.warning
def what_engines_change(c: View) -> Broken:
    if not c.config.needs_engine:
        return
    if not c.engine.seeded:
        yield (
            "actor_rollout_ref.rollout.name",
            "no answer depends on a seed, so that this run, repeated, resumed or restarted, samples other "
            "answers and is another run; hf and vllm draw from seeds",
        )
    if (c.rollout.dtype in FULL_PRECISION) != (c.actor.fsdp_config.dtype in FULL_PRECISION):
        yield (
            "actor_rollout_ref.rollout.dtype",
            f"the engine's precision is not the learner's (fsdp_config.dtype={c.actor.fsdp_config.dtype}): "
            "log-probs differ; set both",
        )


@rules.problem
def the_tool_agent(c: View) -> Broken:
    options = c.rollout.multi_turn
    if options.enable and c.rollout.agent_loop != TOOL_AGENT:
        yield (
            "actor_rollout_ref.rollout.agent_loop",
            "and multi_turn.enable=True, which is the tool agent, both say how an episode goes; leave one out",
        )
    if c.rollout.agent_loop == TOOL_AGENT and not (options.tool_config_path or options.interaction_config_path):
        yield (
            "actor_rollout_ref.rollout.multi_turn.tool_config_path",
            "or interaction_config_path is needed by the tool agent (multi_turn.enable=True or "
            "agent_loop=tool_agent); name a YAML file with tools (core/rollout/tools.py says what it holds)",
        )


@rules.problem
def episodes_repeat(c: View) -> Broken:
    if c.rollout.multi_turn.deterministic_tools and not c.engine.seeded and c.config.needs_engine:
        yield (
            "actor_rollout_ref.rollout.multi_turn.deterministic_tools",
            f"{c.rollout.name} draws no answer from a seed, so that a run cannot be repeated; set False, or "
            "actor_rollout_ref.rollout.name=hf",
        )
