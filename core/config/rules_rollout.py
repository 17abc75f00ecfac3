"""Rules on sampling, engines, episodes and on who grades (see :mod:`core.config.rules`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from core.config import registry
from core.config.section import FULL_PRECISION

if TYPE_CHECKING:
    from core.config.rules import View

Broken = Iterator[tuple[str, str, str]]  # key, rule, fix
ROLLOUT, HYBRID = "actor_rollout_ref.rollout", "actor_rollout_ref.hybrid_engine"
LAYERS, VAL = "tensor_model_parallel_size", f"{ROLLOUT}.val_kwargs"
HF_OPTIONS = ("cache_gib", "max_batch_rows", "max_prefill_tokens")  # core.engines.hf.HFEngine


def training_samples_the_policy(c: View) -> Broken:
    another = "samples from another distribution than the one that trains, and no rollout correction weighs for it"
    differ, greedy = "training needs answers that differ", "greedy validation is val_kwargs.do_sample=False"
    for name, off in (("top_p", 1), ("top_k", -1)):
        fix = f"set {off} (val_kwargs.{name} is free)"
        if getattr(c.rollout, name) != off and not c.corrects:
            weighed = "algorithm.rollout_correction.rollout_is=token weighs for it, at the cost of a biased mean weight"
            yield f"{ROLLOUT}.{name}", another, f"{fix}; {weighed}"
        elif getattr(c.rollout, name) != off and c.correction.bypass_mode:
            rule = "and bypass_mode compare log-probs over the tokens that were kept with those over all: no ratio is 1"
            yield f"{ROLLOUT}.{name}", rule, f"{fix}, or algorithm.rollout_correction.bypass_mode=False"
    if c.rollout.temperature == 0 and c.rollout.do_sample:
        yield f"{ROLLOUT}.temperature", differ, f"set 1.0; {greedy}"
    if not c.rollout.do_sample and not c.trainer.val_only:
        yield f"{ROLLOUT}.do_sample", differ, f"leave it out; {greedy}"


def validation_sampling(c: View) -> Broken:
    if c.val.do_sample and c.val.temperature == 0:
        yield f"{VAL}.temperature", f"contradicts {VAL}.do_sample=True", "set a temperature, or do_sample=False"


# --- engines ---


def the_engine_holds_sequences(c: View) -> Broken:
    tokens, length = c.rollout.max_num_batched_tokens, c.rollout.max_model_len
    serves = "max_model_len" in c.engine.reads
    if serves and length is not None and length < c.longest:
        rule = f"must hold max_prompt_length + max_response_length = {c.longest} tokens"
        yield f"{ROLLOUT}.max_model_len", rule, "raise it, or leave it out"
    if serves and not c.rollout.enable_chunked_prefill and tokens < c.longest:
        rule = f"must hold a sequence of {c.longest} tokens where prefill is not chunked"
        yield f"{ROLLOUT}.max_num_batched_tokens", rule, f"raise it, or {ROLLOUT}.enable_chunked_prefill=True"
    if serves and tokens < c.rollout.max_num_seqs:
        rule = f"must be at least {ROLLOUT}.max_num_seqs={c.rollout.max_num_seqs}: each takes one of them a step"
        yield f"{ROLLOUT}.max_num_batched_tokens", rule, "change one of them"


def options_of_engines(c: View) -> Broken:
    hf = c.rollout.engine_kwargs.get("hf") or {}
    if not c.policy.hybrid_engine and c.trainer.backend == "local":
        rule = "needs a cluster: trainer.backend=local runs learner and engine in one process"
        yield HYBRID, rule, "set trainer.backend=ray, or leave it out"
    if c.rollout.name == "hf" and set(hf if isinstance(hf, Mapping) else [str(hf)]) - set(HF_OPTIONS):
        rule = f"hf has {', '.join(HF_OPTIONS)} and no other option"
        yield f"{ROLLOUT}.engine_kwargs", rule, "leave out what it lacks"
    for section, part, samples in ((ROLLOUT, c.rollout, True), (VAL, c.val, c.val.do_sample)):
        if not c.engine.top_p_within_top_k and samples and part.top_k > 0 and part.top_p < 1:
            rule = f"with {section}.top_p={part.top_p} means something else in {c.rollout.name}"
            yield f"{section}.top_k", rule, f"set one of them, or {ROLLOUT}.name=vllm"


def engine_layers_divide_gpus(c: View) -> Broken:
    gpus = c.trainer.n_gpus_per_node if c.policy.hybrid_engine else c.rollout.n_gpus_per_node
    serves = LAYERS in c.engine.reads and c.needs_engine and c.cluster
    if serves and gpus % c.rollout.tensor_model_parallel_size:
        rule = f"must divide the {gpus} GPUs of a node that engines compute on"
        yield f"{ROLLOUT}.{LAYERS}", rule, "change one of them; a model that fits one GPU needs 1"


# --- episodes ---


def who_plays_episodes(c: View) -> Broken:
    if c.plays_episodes and c.rollout.agent_loop is None:
        rule = f"the trainer of recipe {c.recipe} plays episodes"
        yield f"{ROLLOUT}.agent_loop", rule, "leave it out, or name a loop: tool_agent, path/file.py:Class"


def the_tool_agent(c: View) -> Broken:
    options, loop = c.rollout.multi_turn, c.rollout.agent_loop
    if options.enable and loop != registry.TOOL_AGENT:
        rule = "and multi_turn.enable=True, which is the tool agent, both say how an episode goes"
        yield f"{ROLLOUT}.agent_loop", rule, "leave one out"
    if loop == registry.TOOL_AGENT and not (options.tool_config_path or options.interaction_config_path):
        rule = "or interaction_config_path is needed by the tool agent"
        yield f"{ROLLOUT}.multi_turn.tool_config_path", rule, "name a YAML file with tools (core/rollout/tools.py)"


def episodes_repeat(c: View) -> Broken:
    if c.rollout.multi_turn.deterministic_tools and not c.engine.seeded and c.needs_engine:
        rule = f"{c.rollout.name} draws no answer from a seed, so that a run cannot be repeated"
        yield f"{ROLLOUT}.multi_turn.deterministic_tools", rule, f"set False, or {ROLLOUT}.name=hf"


# --- who grades ---


def who_grades(c: View) -> Broken:
    if c.reward.reward_manager == "batch" and not c.custom.path:
        rule = "calls a function of yours with lists, and there is none"
        yield "reward_model.reward_manager", rule, "set custom_reward_function.path, or use prime"
    if c.reward.memory_limit_mb is not None and c.reward.memory_limit_mb < 256:
        rule = "is too little for a grader that has only started; at least 256"
        yield "reward_model.memory_limit_mb", rule, "raise it, or null for no limit"


def the_reward_model(c: View) -> Broken:
    reward, on = c.reward, c.reward.enable
    if reward.weight and not on:
        fix = "set reward_model.enable=True and reward_model.model.path (or reward_model.judge.url), or leave it out"
        yield "reward_model.weight", "there is no model whose number could be added", fix
    if on and reward.model.input_tokenizer not in (None, "policy", c.model.path, c.model.tokenizer_path):
        rule = "is the tokenizer of what the policy wrote; the reward model's own comes with reward_model.model.path"
        yield "reward_model.model.input_tokenizer", rule, "leave it out, or null where both read the same token ids"
    if on and reward.use_dynamic_bsz is False and not reward.micro_batch_size_per_gpu:
        fix = "give a number of answers a pass, or leave use_dynamic_bsz out"
        yield "reward_model.micro_batch_size_per_gpu", "is needed with reward_model.use_dynamic_bsz=False", fix
    if on and reward.use_dynamic_bsz and reward.forward_max_token_len_per_gpu < reward.max_length:
        rule = f"must hold an answer of reward_model.max_length={reward.max_length} tokens"
        yield "reward_model.forward_max_token_len_per_gpu", rule, "raise it, or lower reward_model.max_length"


def the_judge(c: View) -> Broken:
    judge, on, section = c.judge, c.reward.judged, "reward_model.judge"
    if judge.url is not None and not c.reward.enable:
        fix = "set reward_model.enable=True, or leave the URL out"
        yield f"{section}.url", "would judge nothing with reward_model.enable=False", fix
    if judge.url is not None and not judge.url.startswith(("http://", "https://")):
        fix = "give the address that clients of OpenAI's interface use, as http://localhost:8000/v1"
        yield f"{section}.url", "must begin with http:// or https://", fix
    if judge.url is not None and not judge.model:
        yield f"{section}.model", f"is needed with {section}.url", "name the model as the server lists it (GET /models)"
    if on and c.is_url(judge.cache_dir):
        yield f"{section}.cache_dir", "is a database, which cannot be written to a URL", "name a local folder"
    if on and c.reward.on_error == "zero":
        fix = "set reward_model.on_error=mask, which takes it out of its group and the loss, or raise"
        yield "reward_model.on_error", "would score an answer 0 because a server was away", fix
    if judge.lowest >= judge.highest:
        rule = f"must be below {section}.highest={judge.highest}"
        yield f"{section}.lowest", rule, "give the range of the judge's numbers"


# --- what can run, and is probably not meant ---


def greedy_answers_are_alike(c: View) -> Broken:
    if c.val.n > 1 and not c.val.do_sample:
        rule = "greedy answers to a question are all the same"
        yield f"{VAL}.n", rule, f"with {VAL}.do_sample=True they are sampled, as verl's asynchronous rollout does"


def what_engines_change(c: View) -> Broken:
    learner = c.actor.fsdp_config.dtype
    if c.needs_engine and not c.engine.seeded:
        rule = "no answer depends on a seed, so that this run, repeated or resumed, samples others and is another run"
        yield f"{ROLLOUT}.name", rule, "hf and vllm draw from seeds"
    if c.needs_engine and (c.rollout.dtype in FULL_PRECISION) != (learner in FULL_PRECISION):
        rule = f"the engine's precision is not the learner's (fsdp_config.dtype={learner}): log-probs differ"
        yield f"{ROLLOUT}.dtype", rule, "set both"


PROBLEMS = (
    *(training_samples_the_policy, validation_sampling, the_engine_holds_sequences, options_of_engines),
    *(engine_layers_divide_gpus, who_plays_episodes, the_tool_agent, episodes_repeat),
    *(who_grades, the_reward_model, the_judge),
)
WARNINGS = (greedy_answers_are_alike, what_engines_change)
