"""Every rule between keys fires where it should, and only there; every unused key has its reason."""

from __future__ import annotations

import ast
import functools
import inspect

import pytest

from core.config import convert, examine, rules
from core.config.recipes import schema_of
from core.config.rules import View
from core.config.section import mark
from core.tracking.health import CHECKS

RECIPES = ("ppo", "dapo", "search_r1")  # that have rules or unused keys of their own, and one that has none
BOOKS = [book for recipe in RECIPES for book in rules.books(recipe)]


def statements(kind):
    """Every yield of the rules of a kind: its rule's name and its line."""
    found = set()
    for rule in (rule for book in BOOKS for rule in getattr(book, kind)):
        if rule.__module__.startswith("recipes.dapo."):  # tests/recipes/test_dapo.py
            continue
        lines, first = inspect.getsourcelines(rule)
        tree = ast.parse("".join(lines))
        found |= {(rule.__name__, first + node.lineno - 1) for node in ast.walk(tree) if isinstance(node, ast.Yield)}
    return found


def reached(kind, composed, recipe, hooks=()):
    """The yields that a configuration reaches, with what each yields."""
    view = View(composed.config, composed.given, hooks, recipe)
    for rule in (rule for book in rules.books(recipe) for rule in getattr(book, kind)):
        generator = rule(view)
        for yielded in generator:
            yield (rule.__name__, generator.gi_frame.f_lineno), yielded


@functools.cache
def _examined(recipe, overrides, hooks):
    return examine(recipe, overrides, hooks)


def examined(recipe, overrides, hooks=()):
    return _examined(recipe, tuple(overrides), hooks)


ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))
LAYERS = "tensor_model_parallel_size"
COMPILED = "use_torch_compile=true"
SHORT = "data.max_response_length=512"
JUDGE = "reward_model.enable=True"
POOL, RANKS = "reward_model.enable_resource_pool=True", "reward_model.n_gpus_per_node=2"
RAY = ("trainer.backend=ray",)
SHARDS = "reward_model.model.fsdp_config.fsdp_size"
URL, MODEL_THERE = "reward_model.judge.url=http://localhost:8000/v1", "reward_model.judge.model=m"
MASK = "reward_model.on_error=mask"
CANARIES = "reward_model.judge.canaries=c.jsonl"
JUDGED = (JUDGE, URL, MODEL_THERE, MASK)
EIGHT = "trainer.n_gpus_per_node=8"
SGLANG = (f"{ROLLOUT}.name=sglang",)
TWO_GPUS = f"{ROLLOUT}.tensor_model_parallel_size=2"
PACKED = "actor_rollout_ref.model.use_remove_padding=True"
SEARCHES = ("generate",)  # what the trainer of Search-R1 overrides
PLENTY = "data.train_batch_size=256"
MULTI = f"{ROLLOUT}.multi_turn"
LOOP = f"{ROLLOUT}.agent_loop=my.module:Loop"
CORRECTION = "algorithm.rollout_correction"
BYPASS = f"{CORRECTION}.bypass_mode=True"

# recipe, overrides, hooks, the beginning of the line, what else it says
BROKEN = [
    *(
        ("ppo", [override], (), begins or override, "belongs to Search-R1")
        for override, begins in (
            *(("max_turns=3", ""), ("do_search=False", "do_search=false"), ("data.max_start_length=100", "")),
            *(("data.max_obs_length=100", ""), ("retriever.url=null", ""), ("retriever.topk=5", "")),
            ("retriever.prefetch=True", "retriever.prefetch=true"),
            ("+retriever.client.timeout_s=3", "retriever.client.timeout_s=3"),
            ("+retriever.local.index=x", "retriever.local.index=x"),
        )
    ),
    *(
        ("ppo", [*given], (), begins, says)
        for given, begins, says in (
            ([LOOP, f"{MULTI}.enable=True", f"{MULTI}.tool_config_path=x"], LOOP, "leave one out"),
            ([f"{MULTI}.enable=True"], f"{MULTI}.tool_config_path=null", "name a YAML file"),
        )
    ),
    ("search_r1", [PLENTY, f"{ROLLOUT}.agent_loop=null"], SEARCHES, f"{ROLLOUT}.agent_loop=null", "plays episodes"),
    ("search_r1", [PLENTY, "data.max_start_length=5000"], SEARCHES, "data.max_start_length=5000", "at most"),
    (
        "ppo",
        ["data.train_batch_size=100"],
        (),
        "data.train_batch_size=100",
        f"multiple of {ACTOR}.ppo_mini_batch_size=256",
    ),
    (
        "ppo",
        ["data.train_batch_size=128"],
        (),
        "data.train_batch_size=128",
        f"{ACTOR}.ppo_mini_batch_size=128, say, for one update",
    ),
    (
        "ppo",
        ["critic.ppo_mini_batch_size=3"],
        (),
        "data.train_batch_size=1024",
        "multiple of critic.ppo_mini_batch_size=3",
    ),
    (
        *("ppo", ["data.train_batch_size=100", f"{ACTOR}.ppo_mini_batch_size=100", EIGHT], ()),
        *("data.train_batch_size=100", f"times {ROLLOUT}.n=1 must be a multiple of the 8 ranks"),
    ),
    (
        *("ppo", ["data.train_batch_size=100", f"{ACTOR}.ppo_mini_batch_size=100", "trainer.backend=ray"], ()),
        *("data.train_batch_size=100", "8 ranks"),
    ),
    ("ppo", [f"{ACTOR}.ppo_mini_batch_size=4", EIGHT], (), f"{ACTOR}.ppo_mini_batch_size=4", "8 ranks"),
    (
        *("ppo", [EIGHT, PACKED, f"{ACTOR}.ulysses_sequence_parallel_size=3"], ()),
        *(f"{ACTOR}.ulysses_sequence_parallel_size=3", "divide the 8 ranks"),
    ),
    (
        *("grpo", [EIGHT, PACKED, f"{ACTOR}.use_kl_loss=True", f"{REF}.ulysses_sequence_parallel_size=3"], ()),
        *(f"{REF}.ulysses_sequence_parallel_size=3", "divide the 8 ranks"),
    ),
    (
        *("ppo", [EIGHT, "critic.model.use_remove_padding=True", "critic.ulysses_sequence_parallel_size=3"], ()),
        *("critic.ulysses_sequence_parallel_size=3", "divide the 8 ranks"),
    ),
    (
        *("ppo", [EIGHT, f"{ACTOR}.ulysses_sequence_parallel_size=2"], ()),
        *(f"{ACTOR}.ulysses_sequence_parallel_size=2", "set actor_rollout_ref.model.use_remove_padding=True"),
    ),
    (
        *("ppo", [EIGHT, "critic.ulysses_sequence_parallel_size=2"], ()),
        *("critic.ulysses_sequence_parallel_size=2", "set critic.model.use_remove_padding=True"),
    ),
    *(
        ("ppo", [EIGHT, f"{part}.{LAYERS}=2", f"{part}.{COMPILED}"], (), f"{part}.{COMPILED}", f"or {part}.{LAYERS}=1")
        for part in (ACTOR, "critic")
    ),
    *(
        (recipe, [EIGHT, *given, f"{part}.{LAYERS}={ranks}"], (), begins or f"{part}.{LAYERS}={ranks}", says)
        for recipe, part, given, ranks, begins, says in (
            ("ppo", ACTOR, (), 3, "", "ulysses_sequence_parallel_size=1 must divide the 8 ranks"),
            ("grpo", REF, (f"{ACTOR}.use_kl_loss=True",), 3, "", "must divide the 8 ranks"),
            ("ppo", "critic", (), 3, "", "must divide the 8 ranks"),
            ("ppo", ACTOR, ("actor_rollout_ref.model.lora_rank=4",), 2, "", "does not split adapters"),
            ("grpo", REF, (f"{ACTOR}.use_kl_loss=True", "actor_rollout_ref.model.lora_rank=4"), 2, "", "adapters"),
            ("ppo", "critic", ("critic.model.lora_rank=4",), 2, "", "critic.model.lora_rank=0"),
            ("ppo", ACTOR, (f"{ACTOR}.fsdp_config.fsdp_size=1",), 2, f"{ACTOR}.fsdp_config.fsdp_size=1", "a multiple"),
            (
                *("grpo", REF, (f"{ACTOR}.use_kl_loss=True", f"{REF}.fsdp_config.fsdp_size=1"), 2),
                *(f"{REF}.fsdp_config.fsdp_size=1", "a multiple"),
            ),
            (
                *("ppo", "critic", ("critic.model.fsdp_config.fsdp_size=1",), 2),
                *("critic.model.fsdp_config.fsdp_size=1", "a multiple"),
            ),
        )
    ),
    (
        *("ppo", [*SGLANG, f"{ROLLOUT}.multi_turn.repeatable=True", LOOP], ()),
        *(f"{ROLLOUT}.multi_turn.repeatable=true", "sglang draws no answer from a seed"),
    ),
    (
        *("ppo", [*SGLANG, f"{ROLLOUT}.val_kwargs={{do_sample: True, temperature: 1, top_p: 0.9, top_k: 20}}"], ()),
        *(f"{ROLLOUT}.val_kwargs.top_k=20", "has another meaning in sglang"),
    ),
    (
        *("ppo", [*SGLANG, f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_k=20", f"{CORRECTION}.rollout_is=token"], ()),
        *(f"{ROLLOUT}.top_k=20", "has another meaning in sglang"),
    ),
    (
        *("ppo", [*SGLANG, "trainer.backend=ray", f"+{ROLLOUT}.engine_kwargs.sglang.url=x"], ()),
        *(f'{ROLLOUT}.engine_kwargs={{"sglang": {{"url": "x"}}}}', "over Ray each engine starts its own"),
    ),
    (
        "ppo",
        [*SGLANG, "trainer.backend=ray", "actor_rollout_ref.hybrid_engine=False", TWO_GPUS],
        (),
        *(f"{ROLLOUT}.tensor_model_parallel_size=2", "receives weights in one process"),
    ),
    (
        *("ppo", [EIGHT, f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=3"], ()),
        *(f"{ROLLOUT}.tensor_model_parallel_size=3", "divide the 8 GPUs"),
    ),
    (
        *("ppo", [f"{ACTOR}.use_dynamic_bsz=False"], ()),
        *(f"{ACTOR}.ppo_micro_batch_size_per_gpu=null", "is needed with"),
    ),
    (
        *("ppo", [f"{ROLLOUT}.log_prob_use_dynamic_bsz=False"], ()),
        *(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=null", "is needed with"),
    ),
    (
        *("ppo", [f"{REF}.log_prob_use_dynamic_bsz=False", f"{ACTOR}.use_kl_loss=True"], ()),
        *(f"{REF}.log_prob_micro_batch_size_per_gpu=null", "is needed with"),
    ),
    ("ppo", ["critic.use_dynamic_bsz=False"], (), "critic.ppo_micro_batch_size_per_gpu=null", "is needed with"),
    (
        *("grpo", [f"{ACTOR}.ppo_max_token_len_per_gpu=1000", f"{ROLLOUT}.log_prob_max_token_len_per_gpu=1024"], ()),
        *(f"{ACTOR}.ppo_max_token_len_per_gpu=1000", "max_prompt_length + max_response_length = 1024"),
    ),
    (
        *("grpo", [f"{ROLLOUT}.log_prob_max_token_len_per_gpu=1000"], ()),
        *(f"{ROLLOUT}.log_prob_max_token_len_per_gpu=1000", "raise it to 1024"),
    ),
    (
        *("grpo", [f"{REF}.log_prob_max_token_len_per_gpu=1000", f"{ACTOR}.use_kl_loss=True"], ()),
        *(f"{REF}.log_prob_max_token_len_per_gpu=1000", "raise it to 1024"),
    ),
    ("ppo", ["critic.ppo_max_token_len_per_gpu=1000"], (), "critic.ppo_max_token_len_per_gpu=1000", "raise it to 1024"),
    *(
        ("ppo", [f"algorithm.adv_estimator={name}"], (), f"{ROLLOUT}.n=1", f"algorithm.adv_estimator={name}")
        for name in ("grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline", "grpo_passk")
    ),
    (
        *("ppo", ["reward_model.reward_manager=batch"], ()),
        *("reward_model.reward_manager=batch", "set custom_reward_function.path"),
    ),
    (
        *("ppo", ["reward_model.reward_manager=mine"], ()),
        *("reward_model.reward_manager=mine", 'with the class under @register("mine"), reward_model.module.path=my.py'),
    ),
    (
        *("ppo", ["reward_model.source=importlib", "reward_model.module.name=Mine"], ()),
        *("reward_model.module.path=null", "is needed with reward_model.source=importlib"),
    ),
    (
        *("ppo", ["reward_model.source=importlib", "reward_model.module.path=my.rewards"], ()),
        *("reward_model.module.name=null", "is needed with reward_model.source=importlib"),
    ),
    (
        *("ppo", ["reward_model.reward_manager=prime", "reward_model.memory_limit_mb=100"], ()),
        *("reward_model.memory_limit_mb=100", "at least 256"),
    ),
    ("ppo", ["reward_model.weight=0.5"], (), "reward_model.weight=0.5", "there is no model whose number"),
    (
        *("ppo", [JUDGE, "reward_model.model.input_tokenizer=org/other"], ()),
        *("reward_model.model.input_tokenizer=org/other", "tokenizer of what the policy wrote"),
    ),
    (
        *("ppo", [JUDGE, "reward_model.use_dynamic_bsz=False"], ()),
        *("reward_model.micro_batch_size_per_gpu=null", "is needed with"),
    ),
    (
        *("ppo", [JUDGE, "reward_model.forward_max_token_len_per_gpu=9"], ()),
        *("reward_model.forward_max_token_len_per_gpu=9", "must hold an answer of reward_model.max_length=1024"),
    ),
    ("ppo", [JUDGE, POOL, "reward_model.nnodes=1", *RAY], (), "reward_model.n_gpus_per_node=0", "is needed with"),
    ("ppo", [JUDGE, POOL, "reward_model.nnodes=1", RANKS], (), POOL.replace("T", "t"), "needs a cluster"),
    (
        "ppo",
        [JUDGE, POOL, RANKS, *RAY],
        (),
        "reward_model.nnodes=0",
        "is needed with reward_model.enable_resource_pool",
    ),
    (
        *("ppo", [JUDGE, POOL, RANKS, *RAY, "reward_model.nnodes=1", f"{SHARDS}=4"], ()),
        *(f"{SHARDS}=4", "must divide the 2 ranks (reward_model.nnodes * reward_model.n_gpus_per_node)"),
    ),
    ("ppo", [URL, MODEL_THERE, MASK], (), URL, "set reward_model.enable=True"),
    (
        *("ppo", [JUDGE, "reward_model.judge.url=localhost:8000/v1", MODEL_THERE, MASK], ()),
        *("reward_model.judge.url=localhost:8000/v1", "must begin with http"),
    ),
    (
        *("ppo", [JUDGE, "reward_model.judge.url=https://me:pw@x.org/v1", MODEL_THERE, MASK], ()),
        *("reward_model.judge.url=https://***@x.org/v1", "reward_model.judge.api_key_env"),
    ),
    ("ppo", [JUDGE, URL, MASK], (), "reward_model.judge.model=null", "as the server lists it"),
    (
        *("ppo", [*JUDGED, "reward_model.judge.cache_dir=s3://b/kept"], ()),
        *("reward_model.judge.cache_dir=s3://b/kept", "is a database, which cannot be written to a URL"),
    ),
    ("ppo", [JUDGE, URL, MODEL_THERE], (), "reward_model.on_error=zero", "set reward_model.on_error=mask"),
    (
        *("ppo", [*JUDGED, "reward_model.judge.pattern='(1)'", "reward_model.judge.json_schema=s.json"], ()),
        *("reward_model.judge.pattern=(1)", "leave one of them out"),
    ),
    (
        *("ppo", [*JUDGED, "reward_model.judge.lowest=1"], ()),
        *("reward_model.judge.lowest=1.0", "must be below reward_model.judge.highest=1.0"),
    ),
    (
        *("ppo", [*JUDGED, "reward_model.judge.template=mine.txt"], ()),
        *("reward_model.judge.canaries=null", "{question, response, reference, right}"),
    ),
    ("ppo", [f"{CORRECTION}.rollout_rs=token"], (), f"{CORRECTION}.rollout_rs=token", "do not fit"),
    (
        *("ppo", [BYPASS, f"{CORRECTION}.rollout_rs=token", f"{CORRECTION}.rollout_rs_threshold=2.0"], ()),
        *(f"{CORRECTION}.bypass_mode=true", "rollout_rs compares"),
    ),
    (
        *("ppo", [BYPASS, f"{CORRECTION}.rollout_token_veto_threshold=1e-4"], ()),
        *(f"{CORRECTION}.bypass_mode=true", "rollout_token_veto_threshold is a bound"),
    ),
    (
        *("ppo", [BYPASS, "algorithm.use_kl_in_reward=True"], ()),
        *(f"{CORRECTION}.bypass_mode=true", "KL penalty in the reward"),
    ),
    ("ppo", ["trainer.max_staleness=1"], (), "trainer.max_staleness=1", "an older policy"),
    ("ppo", [BYPASS, "trainer.max_staleness=2"], (), "trainer.max_staleness=2", "is at most 1"),
    (
        *("ppo", ["global_profiler.tool=torch", "global_profiler.steps=[1]", "global_profiler.save_path=s3://b/p"], ()),
        *("global_profiler.save_path=s3://b/p", "is written by torch, which writes to no URL"),
    ),
    (
        *("ppo", ["global_profiler.tool=torch", "global_profiler.steps=[9]", "trainer.total_training_steps=8"], ()),
        *("global_profiler.steps=[9]", "goes beyond"),
    ),
    ("ppo", [f"{ROLLOUT}.top_p=0.95"], (), f"{ROLLOUT}.top_p=0.95", "no rollout correction weighs for it"),
    ("ppo", [f"{ROLLOUT}.top_k=50"], (), f"{ROLLOUT}.top_k=50", "no rollout correction weighs for it"),
    ("ppo", [f"{ROLLOUT}.temperature=0"], (), f"{ROLLOUT}.temperature=0.0", "answers that differ"),
    ("ppo", [f"{ROLLOUT}.do_sample=False"], (), f"{ROLLOUT}.do_sample=false", "answers that differ"),
    (
        *("ppo", [f"{ROLLOUT}.val_kwargs.do_sample=True"], ()),
        *(f"{ROLLOUT}.val_kwargs.temperature=0.0", "contradicts"),
    ),
    (
        "ppo",
        [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.max_model_len=1000"],
        (),
        f"{ROLLOUT}.max_model_len=1000",
        "1024 tokens",
    ),
    (
        "ppo",
        [
            *(f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.max_num_batched_tokens=1000", f"{ROLLOUT}.max_num_seqs=1000"),
            f"{ROLLOUT}.enable_chunked_prefill=False",
        ],
        *((), f"{ROLLOUT}.max_num_batched_tokens=1000", "1024 tokens"),
    ),
    (
        *("ppo", [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.max_num_batched_tokens=1000"], ()),
        *(f"{ROLLOUT}.max_num_batched_tokens=1000", "at least actor_rollout_ref.rollout.max_num_seqs=1024"),
    ),
    (
        *("ppo", ["actor_rollout_ref.hybrid_engine=False"], ()),
        *("actor_rollout_ref.hybrid_engine=false", "set trainer.backend=ray"),
    ),
    (
        "ppo",
        [
            *("trainer.backend=ray", "actor_rollout_ref.hybrid_engine=False", f"{ROLLOUT}.name=vllm"),
            f"{ROLLOUT}.n_gpus_per_node=3",
        ],
        *((), f"{ROLLOUT}.tensor_model_parallel_size=2", "divide the 3 GPUs of a node"),
    ),
    (
        *("dapo", [f"{ACTOR}.optim.lr_scheduler_type=cosine"], ()),
        *(f"{ACTOR}.optim.lr_scheduler_type=cosine", "set trainer.total_training_steps"),
    ),
    (
        *("dapo", [f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1"], ()),
        *(f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1", "or give lr_warmup_steps"),
    ),
    (
        *("dapo", ["algorithm.adv_estimator=gae", "critic.optim.lr_scheduler_type=cosine"], ()),
        *("critic.optim.lr_scheduler_type=cosine", "set trainer.total_training_steps"),
    ),
    (
        *("dapo", ["algorithm.adv_estimator=gae", "critic.optim.lr_warmup_steps_ratio=0.1"], ()),
        *("critic.optim.lr_warmup_steps_ratio=0.1", "or give lr_warmup_steps"),
    ),
    (
        *("grpo", ["trainer.total_training_steps=9", f"{ACTOR}.optim.lr_warmup_steps=10"], ()),
        *(f"{ACTOR}.optim.lr_warmup_steps=10", "trainer.total_training_steps=9"),
    ),
    (
        *("ppo", ["trainer.total_training_steps=9", "critic.optim.lr_warmup_steps=10"], ()),
        *("critic.optim.lr_warmup_steps=10", "trainer.total_training_steps=9"),
    ),
    ("ppo", ["critic.enable=False"], (), "critic.enable=false", "there is a critic with gae"),
    ("grpo", ["critic.enable=True"], (), "critic.enable=true", "algorithm.adv_estimator=grpo decides"),
    (
        *("ppo", ["trainer.critic_warmup=5", "trainer.total_training_steps=5"], ()),
        *("trainer.critic_warmup=5", "leaves no step"),
    ),
    (
        *("grpo", [f"{ACTOR}.policy_loss.loss_mode=clip_cov", f"{ACTOR}.policy_loss.clip_cov_lb=5"], ()),
        *(f"{ACTOR}.policy_loss.clip_cov_lb=5.0", "leaves no covariance below clip_cov_ub=5.0"),
    ),
    (
        "grpo",
        ["algorithm.adv_estimator=optimal_token_baseline", "algorithm.rollout_correction.bypass_mode=True"],
        *((), "algorithm.adv_estimator=optimal_token_baseline", "bypass_mode makes no pass for them"),
    ),
    (
        *("grpo", ["algorithm.adv_estimator=maxrl", "algorithm.use_kl_in_reward=True"], ()),
        *("algorithm.adv_estimator=maxrl", "divides by the group's mean reward"),
    ),
    (
        *("ppo", ["algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=0"], ()),
        *("algorithm.kl_ctrl.horizon=0.0", "above 0"),
    ),
    (
        *("ppo", ["algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0"], ()),
        *("algorithm.kl_ctrl.target_kl=0.0", "above 0"),
    ),
    (
        "ppo",
        ["algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.kl_coef=0", "algorithm.use_kl_in_reward=True"],
        *((), "algorithm.kl_ctrl.kl_coef=0.0", "it stays 0"),
    ),
    ("ppo", ["actor_rollout_ref.model.path=a/b/c"], (), "actor_rollout_ref.model.path=a/b/c", "hub id (org/name)"),
    (
        *("ppo", ["actor_rollout_ref.model.tokenizer_path=a/b/c"], ()),
        *("actor_rollout_ref.model.tokenizer_path=a/b/c", "hub id (org/name)"),
    ),
    ("ppo", ["critic.model.path=a/b/c"], (), "critic.model.path=a/b/c", "hub id (org/name)"),
    ("ppo", ["data.dataset_weights=[1,2]"], (), "data.dataset_weights=[1.0, 2.0]", "one weight a file"),
    (
        *("ppo", ["data.dataset_weights=[1]", "data.curriculum=[{files: a}]"], ()),
        *("data.dataset_weights=[1.0]", "has no meaning with data.curriculum; give each stage its weights: {files"),
    ),
    ("ppo", ["data.curriculum=[]"], (), "data.curriculum=[]", "must have a stage; give [{files"),
    (
        *("ppo", ["data.train_max_samples=5", "data.curriculum=[{files: a}]"], ()),
        *("data.train_max_samples=5", "has no meaning with data.curriculum"),
    ),
    ("ppo", ["trainer.resume_mode=resume_path"], (), "trainer.resume_from_path=null", "resume_mode=resume_path"),
    (
        "ppo",
        [f"{ROLLOUT}.engine_kwargs.hf.x=1"],
        (),
        f'{ROLLOUT}.engine_kwargs={{"hf": {{"x": 1}}}}',
        "hf has cache_gib",
    ),
    (
        "grpo",
        ["ray_kwargs.ray_init={timeline_json_file: x.json, num_cpus: 4}"],
        (),
        'ray_kwargs.ray_init={"num_cpus": 4, "timeline_json_file": "x.json"}',
        "timeline_json_file: ray.init takes no such argument",
    ),
]


@pytest.mark.parametrize("recipe, overrides, hooks, begins, says", BROKEN, ids=lambda x: None)
def test_the_rule_fires_alone(recipe, overrides, hooks, begins, says):
    (line,) = examined(recipe, overrides, hooks).problems
    assert line.startswith(f"{begins}: ") and says in line
    assert "; " in line and "\n" not in line


def test_every_rule_is_tried():
    tried = set()
    for recipe, overrides, hooks, *_ in BROKEN:
        composed = examined(recipe, overrides, hooks)
        tried |= {where for where, _ in reached("problems", composed, recipe, hooks)}
    assert statements("problems") - tried == set()


FINE = [
    (  # two GPUs share a sequence: four ranks get different rows
        "ppo",
        [
            "data.train_batch_size=4",
            f"{ACTOR}.ppo_mini_batch_size=4",
            EIGHT,
            PACKED,
            f"{ACTOR}.ulysses_sequence_parallel_size=2",
        ],
        (),
    ),
    ("ppo", [], ()),
    ("grpo", [], ()),
    ("ppo", ["data.train_batch_size=100", f"{ACTOR}.ppo_mini_batch_size=50"], ()),  # one rank: nothing to divide
    ("ppo", [f"{ACTOR}.ppo_micro_batch_size_per_gpu=12"], ()),  # a memory knob: the last pass holds the remainder
    ("ppo", ["data.max_response_length=32256", f"{ACTOR}.ppo_max_token_len_per_gpu=32768"], ()),
    ("ppo", [f"{REF}.log_prob_max_token_len_per_gpu=5"], ()),  # no reference runs
    ("grpo", ["critic.ppo_max_token_len_per_gpu=5"], ()),  # no critic runs
    ("dapo", ["data.gen_batch_size=3072"], ()),
    ("dapo", [f"{ACTOR}.optim.lr_scheduler_type=cosine", "trainer.total_training_steps=9"], ()),
    ("grpo", [f"{ACTOR}.optim.lr_scheduler_type=cosine", f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1"], ()),
    ("ppo", ["algorithm.adv_estimator=remax"], ()),
    ("ppo", ["algorithm.adv_estimator=reinforce_plus_plus"], ()),
    ("ppo", ["algorithm.adv_estimator=my.pkg:mine"], ()),
    ("ppo", [f"{ROLLOUT}.do_sample=False", "trainer.val_only=True"], ()),
    ("ppo", [f"{ROLLOUT}.val_kwargs={{n: 4, do_sample: True, temperature: 0.6, top_p: 0.95, top_k: 20}}"], ()),
    ("grpo", [f"{ACTOR}.policy_loss.loss_mode=gspo"], ()),
    ("grpo", ["algorithm.adv_estimator=maxrl", f"{ACTOR}.policy_loss.loss_mode=dppo_tv"], ()),
    ("ppo", ["actor_rollout_ref.model.path=gpt2"], ()),
    ("ppo", [f"{ROLLOUT}.engine_kwargs.hf.cache_gib=1", f"{ROLLOUT}.engine_kwargs.vllm.x=1"], ()),
    ("ppo", ["actor_rollout_ref.model.path=./a/b/c"], ()),
    ("ppo", ["trainer.backend=ray", f"{ROLLOUT}.name=vllm"], ()),
    (
        "ppo",
        [
            *("trainer.backend=ray", "actor_rollout_ref.hybrid_engine=False", f"{ROLLOUT}.name=vllm"),
            *(f"{ROLLOUT}.n_gpus_per_node=6", f"{ROLLOUT}.tensor_model_parallel_size=3"),
        ],
        (),
    ),
    ("ppo", ["trainer.resume_mode=resume_path", "trainer.resume_from_path=x/global_step_3"], ()),
]


@pytest.mark.parametrize("recipe, overrides, hooks", FINE, ids=lambda x: None)
def test_no_rule_fires(recipe, overrides, hooks):
    assert examined(recipe, overrides, hooks).problems == ()


WARNED = [
    ("grpo", [*SGLANG], (), "no answer depends on a seed"),
    ("grpo", [f"{ROLLOUT}.dtype=fp32", f"{ACTOR}.fsdp_config.dtype=bfloat16"], (), "fsdp_config.dtype=bfloat16"),
    (
        "grpo",
        ["custom_reward_function.path=mine.py", f"{ROLLOUT}.agent_loop=mine.py:Loop"],
        (),
        "gets what the policy wrote",
    ),
    ("grpo", [*JUDGED, "reward_model.judge.votes=3"], (), "greedy votes differ by the marks"),
    ("grpo", [f"{ACTOR}.use_kl_loss=True", "algorithm.use_kl_in_reward=True"], (), "penalised twice"),
    ("grpo", [f"{ACTOR}.policy_loss.loss_mode=gspo"], (), "clip_ratio_low=3e-4"),
    (
        "grpo",
        [f"{ACTOR}.policy_loss.loss_mode=kl_cov", f"{ACTOR}.ppo_mini_batch_size=1024"],
        *((), "the distance of kl_cov has no gradient"),
    ),
    (
        *("grpo", [f"{ACTOR}.policy_loss.loss_mode=dppo_kl", f"{ACTOR}.clip_ratio_c=10000"], ()),
        "the published bound is clip_ratio=0.05",
    ),
    ("grpo", [f"{ACTOR}.policy_loss.loss_mode=dppo_tv"], (), "the published runs have clip_ratio_c=10000"),
    ("ppo", [f"{ROLLOUT}.val_kwargs.n=4"], (), "are all the same"),
    ("ppo", ["global_profiler.tool=torch"], (), "names no step"),
    ("ppo", ["algorithm.kl_ctrl.kl_coef=0.01", f"{ACTOR}.entropy_coeff=0"], (), "was on in verl up to 0.3"),
    ("ppo", ["algorithm.kl_ctrl.kl_coef=0.01", f"{ACTOR}.use_kl_loss=True"], (), "was 0.001 by default in verl"),
    ("dapo", ["trainer.total_epochs=1"], (), "each prompt about 100 times"),
    ("dapo", [f"{ROLLOUT}.val_kwargs={{do_sample: True, temperature: 1.0}}"], (), "n=32"),
]


@pytest.mark.parametrize("recipe, overrides, hooks, says", WARNED, ids=lambda x: None)
def test_a_warning_is_no_problem(recipe, overrides, hooks, says):
    composed = examined(recipe, overrides, hooks)
    assert composed.problems == ()
    (line,) = composed.warnings
    assert says in line
    assert examined(recipe, [], hooks).warnings == ()


def test_a_run_without_an_engine_is_not_warned_of_its_precision():
    overrides = [f"{ROLLOUT}.dtype=bfloat16", f"{ACTOR}.fsdp_config.dtype=float32"]
    (line,) = examined("sft", [*overrides, "data.val_files=questions.parquet"]).warnings
    assert "precision" in line
    assert examined("sft", [*overrides, "data.val_files=null"]).warnings == ()


def test_every_warning_is_tried():
    tried = set()
    for recipe, overrides, hooks, _ in WARNED:
        tried |= {where for where, _ in reached("warnings", examined(recipe, overrides, hooks), recipe, hooks)}
    assert statements("warnings") - tried == set()


# --- keys without effect ---

TRACED = ("global_profiler.tool=torch", "global_profiler.steps=[1]")
UNWATCHED = (  # those with bounds of their own
    *("trainer.health.nonfinite.bound=null", "trainer.health.judge_agreement.bound=null"),
    "trainer.health.scorer_errors.bound=null",
    *("trainer.health.entropy_gap.bound=null", "trainer.health.repetition.bound=null"),
    *("trainer.health.unfinished.bound=null", "trainer.health.shortening.bound=null"),
    f"{CORRECTION}.rollout_is=token",
)
SAPO = f"{ACTOR}.policy_loss.loss_mode=sapo"
# recipe, overrides, hooks, the key that does nothing
IDLE = [
    ("grpo", [f"{REF}.fsdp_config.param_offload=True"], f"{REF}.fsdp_config.param_offload"),
    ("grpo", ["critic.optim.lr=1e-5"], "critic.optim.lr"),
    ("grpo", ["trainer.critic_warmup=0"], "trainer.critic_warmup"),
    ("ppo", ["algorithm.kl_ctrl.kl_coef=0.001"], "algorithm.kl_ctrl.kl_coef"),
    ("ppo", ["algorithm.kl_penalty=k3"], "algorithm.kl_penalty"),
    ("ppo", ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.horizon=5"], "algorithm.kl_ctrl.horizon"),
    ("grpo", [f"{ACTOR}.kl_loss_coef=0.1"], f"{ACTOR}.kl_loss_coef"),
    ("grpo", ["algorithm.gamma=0.9"], "algorithm.gamma"),
    ("ppo", ["algorithm.adv_estimator=reinforce_plus_plus", "algorithm.lam=0.9"], "algorithm.lam"),
    ("ppo", ["algorithm.norm_adv_by_std_in_grpo=False"], "algorithm.norm_adv_by_std_in_grpo"),
    (
        "ppo",
        [f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio_low=0.2", f"{ACTOR}.clip_ratio_high=0.2"],
        f"{ACTOR}.clip_ratio",
    ),
    ("grpo", [SAPO, f"{ACTOR}.clip_ratio_c=4"], f"{ACTOR}.clip_ratio_c"),
    ("grpo", [SAPO, f"{ACTOR}.clip_ratio_high=0.3"], f"{ACTOR}.clip_ratio_high"),
    ("grpo", [f"{ACTOR}.tau_pos=1.5"], f"{ACTOR}.tau_pos"),
    ("grpo", [SAPO, f"{ACTOR}.policy_loss.clip_cov_ub=6"], f"{ACTOR}.policy_loss.clip_cov_ub"),
    (
        "grpo",
        [f"{ACTOR}.policy_loss.loss_mode=clip_cov", f"{ACTOR}.policy_loss.ppo_kl_coef=1"],
        f"{ACTOR}.policy_loss.ppo_kl_coef",
    ),
    ("grpo", [SAPO, f"{ACTOR}.loss_agg_mode=token-mean"], f"{ACTOR}.loss_agg_mode"),  # as in verl
    ("grpo", [f"{ACTOR}.loss_scale_factor=100"], f"{ACTOR}.loss_scale_factor"),
    ("grpo", [f"{ACTOR}.data_loader_seed=1"], f"{ACTOR}.data_loader_seed"),
    ("ppo", ["critic.data_loader_seed=1"], "critic.data_loader_seed"),
    ("ppo", [f"{ACTOR}.optim.min_lr_ratio=0.1"], f"{ACTOR}.optim.min_lr_ratio"),
    (
        "ppo",
        [f"{ACTOR}.optim.lr_warmup_steps=5", f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1"],
        f"{ACTOR}.optim.lr_warmup_steps_ratio",
    ),
    ("ppo", ["critic.optim.num_cycles=1"], "critic.optim.num_cycles"),
    (
        "ppo",
        ["critic.optim.lr_warmup_steps=5", "critic.optim.lr_warmup_steps_ratio=0.1"],
        "critic.optim.lr_warmup_steps_ratio",
    ),
    (
        "ppo",
        [f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_micro_batch_size_per_gpu=8"],
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    ),
    (
        "ppo",
        [f"{ACTOR}.ppo_micro_batch_size_per_gpu=8", f"{ACTOR}.ppo_max_token_len_per_gpu=9999"],
        f"{ACTOR}.ppo_max_token_len_per_gpu",
    ),
    *(
        (
            "ppo",
            [
                f"{ACTOR}.use_kl_loss=True",
                f"{ACTOR}.use_dynamic_bsz={dynamic}",
                f"{ACTOR}.ppo_micro_batch_size_per_gpu=8",
                f"{key}=2048",
            ],
            key,
        )
        for dynamic, name in ((True, "log_prob_micro_batch_size_per_gpu"), (False, "log_prob_max_token_len_per_gpu"))
        for key in (f"{ROLLOUT}.{name}", f"{REF}.{name}")
    ),
    *(
        ("ppo", [f"{ACTOR}.use_dynamic_bsz={dynamic}", f"{ACTOR}.ppo_micro_batch_size_per_gpu=8", f"{key}=2048"], key)
        for dynamic, key in ((True, "critic.ppo_micro_batch_size_per_gpu"), (False, "critic.ppo_max_token_len_per_gpu"))
    ),
    ("ppo", [BYPASS, f"{CORRECTION}.rollout_is=token"], f"{CORRECTION}.rollout_is"),
    ("ppo", [f"{CORRECTION}.rollout_is_threshold=3.0"], f"{CORRECTION}.rollout_is_threshold"),
    ("ppo", [f"{CORRECTION}.rollout_rs_threshold=3.0"], f"{CORRECTION}.rollout_rs_threshold"),
    ("ppo", [BYPASS, f"{ACTOR}.policy_loss.loss_mode=gpg"], f"{CORRECTION}.bypass_mode"),
    ("ppo", ["global_profiler.steps=[1]"], "global_profiler.steps"),
    ("ppo", [f"{ACTOR}.{LAYERS}=1"], f"{ACTOR}.{LAYERS}"),
    *(("ppo", [*UNWATCHED, f"trainer.health.{name}.action=stop"], f"trainer.health.{name}.action") for name in CHECKS),
    ("ppo", [*UNWATCHED, "trainer.health.reward_window=3"], "trainer.health.reward_window"),
    ("ppo", ["reward_model.solution_str=response"], "reward_model.solution_str"),
    ("ppo", ["trainer.trace.groups=3"], "trainer.trace.groups"),
    ("ppo", [f"{ROLLOUT}.val_kwargs.temperature=0.6"], f"{ROLLOUT}.val_kwargs.temperature"),
    *(
        ("ppo", [f"{ROLLOUT}.{setting}"], f"{ROLLOUT}.{setting.partition('=')[0]}")
        for setting in (
            *("gpu_memory_utilization=0.6", "tensor_model_parallel_size=1", "enforce_eager=True", "max_model_len=4096"),
            *("free_cache_engine=False", "enable_chunked_prefill=False", "enable_prefix_caching=False"),
        )
    ),
    ("ppo", [f"+{ROLLOUT}.engine_kwargs.vllm.x=1"], f"{ROLLOUT}.engine_kwargs.vllm.x"),
    ("ppo", [*SGLANG, f"+{ROLLOUT}.engine_kwargs.vllm.x=1"], f"{ROLLOUT}.engine_kwargs.vllm.x"),
    ("ppo", [f"+{ROLLOUT}.engine_kwargs.sglang.x=1"], f"{ROLLOUT}.engine_kwargs.sglang.x"),
    (
        "ppo",
        [f"{ROLLOUT}.name=vllm", f"+{ROLLOUT}.engine_kwargs.hf.cache_gib=1"],
        f"{ROLLOUT}.engine_kwargs.hf.cache_gib",
    ),
    ("ppo", [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.n_gpus_per_node=4"], f"{ROLLOUT}.n_gpus_per_node"),
    (
        "ppo",
        [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=1"],
        f"{ROLLOUT}.tensor_model_parallel_size",
    ),
    (
        "ppo",
        [
            *("trainer.backend=ray", "actor_rollout_ref.hybrid_engine=False", f"{ROLLOUT}.name=vllm"),
            f"{ROLLOUT}.free_cache_engine=False",
        ],
        f"{ROLLOUT}.free_cache_engine",
    ),
    ("ppo", ["trainer.nnodes=1"], "trainer.nnodes"),
    ("ppo", ["ray_kwargs.ray_init.num_cpus=4"], "ray_kwargs.ray_init.num_cpus"),
    ("ppo", ["critic.model.fsdp_config.param_offload=True"], "critic.model.fsdp_config.param_offload"),
    ("ppo", ["actor_rollout_ref.model.lora_alpha=32"], "actor_rollout_ref.model.lora_alpha"),
    ("ppo", ["critic.model.target_modules=[q_proj]"], "critic.model.target_modules"),
    (
        "grpo",
        [
            *("actor_rollout_ref.model.lora_rank=8", "trainer.backend=ray", f"{ACTOR}.use_kl_loss=True"),
            f"{REF}.fsdp_config.param_offload=True",
        ],
        f"{REF}.fsdp_config.param_offload",
    ),
    ("ppo", ["trainer.total_epochs=5", "trainer.total_training_steps=5"], "trainer.total_epochs"),
    ("ppo", ["reward_model.timeout_s=5"], "reward_model.timeout_s"),
    ("ppo", ["reward_model.sandbox_fusion.max_concurrent=5"], "reward_model.sandbox_fusion.max_concurrent"),
    ("ppo", ["reward_model.max_length=9"], "reward_model.max_length"),
    (
        *("ppo", [JUDGE, "reward_model.use_dynamic_bsz=True", "reward_model.micro_batch_size_per_gpu=4"]),
        "reward_model.micro_batch_size_per_gpu",
    ),
    (
        "ppo",
        [JUDGE, "reward_model.micro_batch_size_per_gpu=4", "reward_model.forward_max_token_len_per_gpu=4000"],
        "reward_model.forward_max_token_len_per_gpu",
    ),
    ("ppo", [*JUDGED, "reward_model.max_length=9"], "reward_model.max_length"),
    ("ppo", [*JUDGED, *RAY, POOL], "reward_model.enable_resource_pool"),
    ("ppo", [JUDGE, *RAY, RANKS], "reward_model.n_gpus_per_node"),
    ("ppo", [JUDGE, *RAY, f"{SHARDS}=1"], SHARDS),
    ("ppo", ["reward_model.judge.votes=3"], "reward_model.judge.votes"),
    ("ppo", [*JUDGED, "reward_model.judge.combine=median"], "reward_model.judge.combine"),
    ("ppo", [*JUDGED, "reward_model.judge.canary_every=0", CANARIES], "reward_model.judge.canaries"),
    (
        *("ppo", [JUDGE, "trainer.backend=ray", "reward_model.model.fsdp_config.param_offload=True"]),
        "reward_model.model.fsdp_config.param_offload",
    ),
    (
        "ppo",
        [
            *("reward_model.source=importlib", "reward_model.module.path=my.rewards", "reward_model.module.name=Mine"),
            "reward_model.reward_manager=prime",
        ],
        "reward_model.reward_manager",
    ),
    ("ppo", ["reward_model.module.name=Mine"], "reward_model.module.name"),
    ("ppo", ["reward_model.module.path=my.rewards"], "reward_model.module.path"),
    ("ppo", ["+custom_reward_function.reward_kwargs.x=1"], "custom_reward_function.reward_kwargs.x"),
    ("ppo", ["trainer.resume_from_path=x"], "trainer.resume_from_path"),
    ("ppo", ["trainer.max_actor_ckpt_to_keep=3"], "trainer.max_actor_ckpt_to_keep"),
    ("ppo", ["trainer.val_only=True", "trainer.val_before_train=False"], "trainer.val_before_train"),
    ("ppo", [f"{MULTI}.max_tool_calls=3"], f"{MULTI}.max_tool_calls"),
    ("ppo", [f"{ACTOR}.state_masking=False"], f"{ACTOR}.state_masking"),
    ("ppo", [LOOP, f"{MULTI}.repeatable=True", "trainer.backend=ray"], f"{MULTI}.repeatable"),
    *(
        ("search_r1", [PLENTY, *given], key)
        for given, key in (
            (["do_search=False", "max_turns=3"], "max_turns"),
            (["do_search=False", "retriever.topk=5"], "retriever.topk"),
            (["retriever.url=null", "+retriever.client.timeout_s=3"], "retriever.client.timeout_s"),
            (["+retriever.local.index=x"], "retriever.local.index"),
        )
    ),
]


@pytest.mark.parametrize("recipe, overrides, key", IDLE, ids=lambda x: None)
def test_a_key_without_effect_is_listed_with_the_reason(recipe, overrides, key):
    composed = examined(recipe, overrides, SEARCHES if recipe == "search_r1" else ())
    assert composed.problems == ()
    value, reason = composed.unused[key]
    assert value == composed.given[key] and reason and "{" not in reason


def test_every_condition_of_a_key_is_tried():
    reasons = set()
    for recipe, overrides, _ in IDLE:
        composed = examined(recipe, overrides, SEARCHES if recipe == "search_r1" else ())
        reasons |= {reason for _, reason in composed.unused.values()}
    marks = [
        (key, reason)
        for recipe in ("ppo", "search_r1")  # DAPO's stand in tests/recipes
        for key, section in {"": schema_of(recipe), **convert.sections(schema_of(recipe))}.items()
        for name in section.model_fields
        for _, reason in mark(section, name, "used_if") or ()
    ]
    assert [(key, reason) for key, reason in marks if isinstance(reason, str) and reason not in reasons] == []


def test_a_key_with_effect_is_not_listed():
    given = [
        *("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.01", f"{ACTOR}.clip_ratio=0.1"),
        *(
            "algorithm.gamma=0.99",
            "algorithm.lam=0.95",
            "critic.optim.lr=1e-4",
            f"{REF}.log_prob_micro_batch_size_per_gpu=4",
        ),
        *(f"{ROLLOUT}.val_kwargs.do_sample=True", f"{ROLLOUT}.val_kwargs.temperature=0.6", "trainer.seed=3"),
    ]
    assert dict(examined("ppo", given).unused) == {}


def test_what_the_recipe_file_says_is_not_listed():
    assert dict(examined("grpo", ["preset=paper"]).unused) == {}
