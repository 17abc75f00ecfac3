"""The section ``actor_rollout_ref.rollout`` with its rules."""

from __future__ import annotations

from collections.abc import Mapping

from core.config import limits
from core.config.frozen import FrozenDict
from core.config.limits import FULL_PRECISION, DType
from core.config.names import AgentLoop, EngineName
from core.config.rulebook import Broken, RuleBook, Unused, View
from core.config.section import Open, Section
from core.config.sections.multi_turn import MultiTurnConfig


class ValKwargs(Section):
    """Sampling of validation answers; greedy unless ``do_sample``."""

    n: limits.Count = 1  # answers a question
    do_sample: bool = False  # sample validation answers; False: greedy
    temperature: limits.NonNegative = 0.0  # sampling temperature for validation
    top_p: limits.PositiveShare = 1.0  # top-p (nucleus) for validation; 1 disables
    top_k: limits.OffOrCount = -1  # top-k for validation; -1 disables


class RolloutConfig(Section):
    name: EngineName | None = None  # engine that generates; None: vllm where it is installed, else hf
    nnodes: limits.Count | None = None  # nodes of the engines' own pool (hybrid_engine=False); None: 1
    n_gpus_per_node: limits.Count | None = None  # GPUs a node of that pool; None: the trainer's
    n: limits.Count = 1  # trajectories a prompt
    do_sample: bool = True  # sample answers; training needs it
    temperature: limits.NonNegative = 1.0  # sampling temperature for training
    top_p: limits.PositiveShare = 1.0  # top-p (nucleus) for training; 1 disables
    top_k: limits.OffOrCount = -1  # top-k for training; -1 disables
    ignore_eos: bool = False  # go on to max_response_length beyond the end of an answer, for measuring speed
    val_kwargs: ValKwargs = ValKwargs()
    # number format of the engine; None: the learner's or float32 in one process with the hf engine, else bfloat16
    dtype: DType | None = None
    tensor_model_parallel_size: limits.Count = 2  # GPUs that share each layer of one engine
    gpu_memory_utilization: limits.PositiveShare = 0.5  # share of a GPU's memory for the engine: weights and KV cache
    enforce_eager: bool = False  # run without CUDA graphs
    free_cache_engine: bool = True  # give the engine's memory back while the learner works
    max_num_batched_tokens: limits.Count = 8192  # tokens in one iteration of the engine
    max_num_seqs: limits.Count = 1024  # sequences that an engine decodes at once
    update_weights_bucket_megabytes: limits.Count = 2048  # weights that travel together from learner to engine
    max_model_len: limits.Count | None = None  # tokens of a sequence; None: max_prompt_length + max_response_length
    enable_chunked_prefill: bool = True  # split a long prompt over several iterations
    enable_prefix_caching: bool = True  # compute a prefix that sequences share once
    engine_kwargs: Open = FrozenDict()  # further arguments of the engine: engine_kwargs.vllm.*, engine_kwargs.hf.*
    agent_loop: AgentLoop | None = (
        None  # what plays episodes; None: the tool agent with multi_turn.enable, else one turn
    )
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    # of old log-probs: trajectories in one pass; None: the actor's
    log_prob_micro_batch_size_per_gpu: limits.Count | None = None
    # of old log-probs: fill passes up to a number of tokens; None: the actor's
    log_prob_use_dynamic_bsz: bool | None = None
    # of old log-probs: tokens in one pass; None: the actor's
    log_prob_max_token_len_per_gpu: limits.Count | None = None


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
    sglang = c.rollout.engine_kwargs.get("sglang")
    has_url = isinstance(sglang, Mapping) and sglang.get("url")
    if c.rollout.name == "sglang" and has_url and c.trainer.backend != "local":
        yield (
            "actor_rollout_ref.rollout.engine_kwargs",
            "sglang.url is one server, and over Ray each engine starts its own; leave url out, or set "
            "trainer.backend=local",
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


@rules.unused
def sampling_of_validation(c: View) -> Unused:
    if not c.val.do_sample:
        yield (
            (
                "actor_rollout_ref.rollout.val_kwargs.temperature",
                "actor_rollout_ref.rollout.val_kwargs.top_p",
                "actor_rollout_ref.rollout.val_kwargs.top_k",
            ),
            "validation is greedy; actor_rollout_ref.rollout.val_kwargs.do_sample=True samples",
        )


@rules.unused
def settings_of_other_engines(c: View) -> Unused:
    if c.rollout.name != "vllm":
        yield (
            ("actor_rollout_ref.rollout.engine_kwargs.vllm*",),
            f"actor_rollout_ref.rollout.name={c.rollout.name} has no such setting",
        )
    if c.rollout.name != "sglang":
        yield (
            ("actor_rollout_ref.rollout.engine_kwargs.sglang*",),
            f"actor_rollout_ref.rollout.name={c.rollout.name} has no such setting",
        )
    if c.rollout.name != "hf":
        yield (
            ("actor_rollout_ref.rollout.engine_kwargs.hf*",),
            f"actor_rollout_ref.rollout.name={c.rollout.name} has engine_kwargs.{c.rollout.name}",
        )
    if c.policy.hybrid_engine:
        yield (
            ("actor_rollout_ref.rollout.nnodes", "actor_rollout_ref.rollout.n_gpus_per_node"),
            "the engine is on the trainer's GPUs; actor_rollout_ref.hybrid_engine=False gives it its own",
        )
    if not c.policy.hybrid_engine:
        yield (
            ("actor_rollout_ref.rollout.free_cache_engine",),
            "the engine has GPUs of its own (actor_rollout_ref.hybrid_engine=False)",
        )
