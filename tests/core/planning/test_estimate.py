"""The plan: sizes as models have them, formulas at hand-made values, knobs that help, and a command that says no."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from core.config import compose
from core.config.recipes import trainer_of
from core.errors import InputError
from core.learner.log_probs import logits_at_a_time
from core.learner.logit_memory import CPU_LOGITS, GPU_LOGITS, head_logits
from core.planning import estimate as plan
from core.planning.dry_run import plan_lines
from core.planning.estimate import Assumptions, Plan, block_bytes, head_bytes, update_bytes
from core.planning.model_shapes import MODELS, Shape, gpu, shape_of

MODEL = "actor_rollout_ref.model.path"
# billions of parameters that the model cards give
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 0.494,
    "Qwen/Qwen2.5-1.5B": 1.544,
    "Qwen/Qwen2.5-3B": 3.086,
    "Qwen/Qwen2.5-7B": 7.616,
    "Qwen/Qwen2.5-14B": 14.770,
    "Qwen/Qwen2.5-32B": 32.764,
    "deepseek-ai/deepseek-llm-7b": 6.910,
}
SMALL = Shape(hidden=8, layers=3, heads=4, kv_heads=2, mlp=16, vocab=32, tied=False, bias=True)
RAY = ("trainer.backend=ray", "actor_rollout_ref.rollout.name=vllm")


def planned(*overrides: str, model: str = "Qwen/Qwen2.5-7B", on: str = "H100", recipe: str = "grpo", **assumed):
    config = compose(recipe, [f"{MODEL}={model}", *overrides], trainer_of(recipe)[1])
    return Plan(config, gpu(on), Assumptions(**assumed))


def size(found: plan.Plan, role: str, words: str) -> float:
    (part,) = [p for p in found.parts if p.role == role and words in p.what]
    return part.bytes


# --- shapes ---


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_are_published(name):
    assert shape_of(name).parameters / 1e9 == pytest.approx(PUBLISHED[name], abs=0.002)


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B", "deepseek-ai/deepseek-llm-7b"])
def test_parameters_are_those_that_transformers_makes(name):
    import torch
    import transformers

    shape = shape_of(name)
    kind = "Qwen2" if shape.bias else "Llama"
    config = getattr(transformers, f"{kind}Config")(
        **{"hidden_size": shape.hidden, "num_hidden_layers": shape.layers, "intermediate_size": shape.mlp},
        **{"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "vocab_size": shape.vocab},
        tie_word_embeddings=shape.tied,
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        config.num_labels = 1
        critic = getattr(transformers, f"{kind}ForTokenClassification")(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.critic_parameters == sum(p.numel() for p in critic.parameters())


def test_a_local_folder_is_read_and_an_unknown_name_has_a_nearest(tmp_path):
    fields = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {**fields, "intermediate_size": 16, "vocab_size": 32, "tie_word_embeddings": False, "model_type": "qwen2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shape_of(str(tmp_path)) == SMALL
    assert shape_of(str(tmp_path), {"num_hidden_layers": 5}).layers == 5
    assert shape_of("Qwen/Qwen2.5-7B-Instruct") == shape_of("Qwen/Qwen2.5-7B") and "Qwen/Qwen2.5-32B" in MODELS
    with pytest.raises(InputError, match=r"nearest in model_shapes.yaml: Qwen/Qwen2.5-7B"):
        shape_of("Qwen/Qwen25-7B")
    with pytest.raises(InputError, match="H100, H800"):
        gpu("H999")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="num_attention_heads"):
        shape_of(str(tmp_path))


# --- formulas ---


def test_the_formulas_at_hand_made_values():
    """h 8, q 8, kv 4, m 16, L 3, V 32: every term differs, so a term that is lost shows."""
    assert SMALL.block == 2 * 8 * 8 + 2 * 8 * 4 + (8 + 8) + 3 * 8 * 16 + 16 and SMALL.ends == 2 * 32 * 8 + 8
    assert SMALL.kv_bytes(2) == 2 * 3 * 4 * 2
    block = block_bytes(SMALL, 2, 4)
    assert block == 16 * (4 + 4 + 2) + (24 + 8) * 2 + 4 * 16 * 2
    head = head_bytes(SMALL, 10, 2)
    assert head == 3 * 4 * 10 * 32 + 4 * 32 * 8 + 2 * 10 * 8 * 2 == head_bytes(SMALL, 10, 2, trains=False) + 1024
    backward = 2 * 24 * 2
    assert update_bytes(SMALL, 10, 2, 4, checkpointing=False) == (10 * 3 * block + head, "in the head")
    first = 4 * (SMALL.parameters - 32 * 8) + 10 * (backward + block)
    assert update_bytes(SMALL, 10, 2, 4, checkpointing=True) == (first, "in the first layer")
    wide = dataclasses.replace(SMALL, mlp=512, vocab=4)
    last = 4 * 4 * 8 / 9**9 + 10**6 * (3 * 8 * 2 + 2 * 520 * 2 + block_bytes(wide, 2, 2))
    found = update_bytes(wide, 10**6, 2, 2, checkpointing=True, ranks=9**9)
    assert found == (pytest.approx(last), "in the last layer")
    assert update_bytes(SMALL, 1, 2, 2, checkpointing=True, adapters=10**6)[0] > 4e6


def test_the_moments_of_a_sharded_update_at_hand_made_values():
    """``tests/scale`` holds them beside what the learner allocates."""
    block, gathered = block_bytes(SMALL, 2, 2), 2 * (2 * SMALL.block + SMALL.ends)
    assert plan.gathered_bytes(SMALL, 2) == gathered
    options = {"checkpointing": True, "ranks": 4}
    layers = 4.0 * (SMALL.parameters - SMALL.ends) / 4
    last = 2 * 32 * 8 + 4 * SMALL.block + 1000 * (3 * 8 * 2 + 2 * 24 * 2 + block)
    assert plan.sharded_update_bytes(SMALL, 1000, 2, **options) == (last, "in the last layer")
    ends = dataclasses.replace(SMALL, vocab=4096)
    head = 1000 * 3 * 8 * 2 + head_bytes(ends, 1000, 2) + 2 * 4096 * 8
    assert plan.sharded_update_bytes(ends, 1000, 2, **options) == (head, "in the head")
    expected = layers + (2 + 4) * ends.ends - plan.gathered_bytes(ends, 2)
    assert plan.sharded_update_bytes(ends, 1, 2, **options) == (expected, "at the end")
    assert plan.log_prob_bytes(dataclasses.replace(SMALL, mlp=512), 10, 2) == 10 * (3 * 512 + 4 * 8) * 2
    assert plan.log_prob_bytes(SMALL, 10, 2, adapters=9) == head_bytes(SMALL, 10, 2, trains=False)


def test_state_is_shared_by_the_ranks_or_leaves_the_gpu():
    alone, eight = planned(), planned(*RAY)
    weights, moments = 4.0 * alone.shape.parameters, 8.0 * alone.shape.parameters
    assert size(alone, "policy", "optimizer") == moments and size(eight, "policy", "optimizer") == moments / 8
    half = planned(*RAY, "actor_rollout_ref.actor.fsdp_config.fsdp_size=2")
    assert size(half, "policy", "optimizer") == moments / 2

    def phases(found, what):
        return [part.phase for part in found.parts if part.role == "policy" and part.what.startswith(f"{what} (")]

    fsdp = "actor_rollout_ref.actor.fsdp_config"
    between, both, always = (
        planned(*RAY, *(f"{fsdp}.{name}=True" for name in names))
        for names in (("optimizer_offload",), ("optimizer_offload", "param_offload"), ("offload_policy",))
    )
    assert (phases(between, "weights"), phases(between, "optimizer")) == (["always"], ["update"])
    assert phases(both, "weights") == ["log-probs", "update"]
    assert phases(always, "weights") == phases(always, "optimizer") == []
    found = [one.host_bytes for one in (eight, between, both, always)]
    assert found == [0, moments / 8, (weights + moments) / 8, (weights + moments) / 8]
    least = [one.phase_bytes["generate"] for one in (eight, between, both)]
    assert [least[0] - other for other in least[1:]] == pytest.approx([moments / 8, (weights + moments) / 8])
    assert both.phase_bytes["update"] == pytest.approx(eight.phase_bytes["update"])


def test_adapters_and_split_sequences_take_less():
    whole, lora = planned(*RAY), planned(*RAY, "actor_rollout_ref.model.lora_rank=32")
    shape = whole.shape
    adapters = 28 * 32 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
    assert shape.adapters(32) == adapters
    assert size(lora, "policy", "optimizer") == 8.0 * adapters / 8
    assert lora.checkpoint_bytes == 12.0 * adapters
    longer = ("data.max_response_length=32256", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384")
    split = (
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "actor_rollout_ref.model.use_remove_padding=True",
    )
    shared = planned(*RAY, *longer, *split)
    assert "activations of 16384 tokens" in "".join(part.what for part in shared.parts)


def test_ranks_that_share_layers_have_a_narrower_model():
    whole, shared = planned(*RAY), planned(*RAY, "actor_rollout_ref.actor.tensor_model_parallel_size=4")
    attention = 2 * 3584 * (896 + 128) + 896 + 2 * 128  # 28 heads and 4 key-value heads of 128, divided by 4
    narrow = 28 * (attention + 3 * 3584 * 4736 + 2 * 3584) + 2 * 152064 * 896 + 3584  # the ends between passes
    assert size(shared, "policy", "weights (") == 4.0 * narrow / 2  # two such groups
    assert size(shared, "policy", "optimizer") == 8.0 * narrow / 2
    head, q_size = whole.shape.vocab * 3584, whole.shape.q_size
    layers = 2.0 * (whole.shape.matmul_parameters - head) + 2.0 * 28 * q_size * whole.sequence
    repeated = shared.seconds["update"] / whole.seconds["update"]  # each rank of four computes the head
    assert repeated == pytest.approx((layers + 4 * 2 * head) / (layers + 2 * head), rel=1e-3)
    assert shared.phase_bytes["update"] < whole.phase_bytes["update"]
    assert "that share its state: 8, 4 of them each layer" in "\n".join(plan.lines(shared))


def test_the_cache_holds_what_is_left_beside_the_weights():
    found = planned(*RAY, "actor_rollout_ref.rollout.tensor_model_parallel_size=2")
    shape, longest = found.shape, 1024
    room = 0.5 * found.gpu.memory - shape.parameters  # two bytes a parameter, over two GPUs
    assert size(found, "engine", "KV cache") == pytest.approx(room)
    assert found.kv_sequences == int(room // (shape.kv_bytes(2) / 2 * longest))
    more = planned(*RAY, "actor_rollout_ref.rollout.gpu_memory_utilization=0.8")
    assert more.kv_sequences > found.kv_sequences


def test_times_follow_their_formulas():
    lengths = ("data.max_prompt_length=100", "data.max_response_length=400", "trainer.total_training_steps=10")
    batches = ("data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=64")
    found = planned(*RAY, *lengths, *batches, mean_length=300)
    n = found.shape.layers * found.shape.block + found.shape.vocab * found.shape.hidden
    forward = 2 * n + 2 * found.shape.layers * found.shape.q_size * 400
    tokens = 64 * found.config.actor_rollout_ref.rollout.n * 400
    assert found.trained_tokens == tokens
    phases = found.seconds
    assert phases["update"] == pytest.approx(tokens * forward * 4 / (8 * 989e12 * 0.35))
    assert "old log-probs" not in phases
    two = planned(*RAY, *lengths, "data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=32")
    assert "old log-probs" in two.seconds
    # a few sequences: decoding reads the weights once an iteration, as often as the longest answer is long
    one = ("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8")
    few = planned(*RAY, *lengths, *one, mean_length=300)
    engine_bytes = 2 * n / 2  # the default: two GPUs an engine
    assert few.seconds["generate"] == pytest.approx(400 * engine_bytes / 3.35e12 / 0.5, rel=0.1)


def test_dynamic_sampling_generates_more_than_it_trains():
    arguments = ("data.max_response_length=8192", "trainer.total_training_steps=5")
    kept, filtered = (
        planned(*RAY, *arguments, f"algorithm.filter_groups.enable={on}", recipe="dapo", keep_rate=0.25)
        for on in (False, True)
    )
    assert filtered.generated_tokens == 4 * kept.generated_tokens and filtered.trained_tokens == kept.trained_tokens


SEARCH = (
    *("data.max_start_length=2048", "data.max_prompt_length=4096", "data.max_response_length=500"),
    *("data.max_obs_length=400", "max_turns=4"),
    *("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16"),
)


def test_an_episode_generates_its_turns_and_trains_on_what_it_reads():
    found = planned(*RAY, *SEARCH, recipe="search_r1")
    n = found.config.actor_rollout_ref.rollout.n
    assert found.generated_tokens == 16 * n * 3 * 250  # half of four searches, and the answer
    assert found.trained_tokens == 16 * n * (256 + 3 * 250 + 2 * 400)
    asked = planned(*RAY, *SEARCH, recipe="search_r1", turns=9, mean_length=100, observed_length=50)
    assert asked.trained_tokens == 16 * n * (256 + 5 * 100 + 4 * 50)  # there are five turns at most
    alone = planned(*RAY, *SEARCH, "do_search=False", recipe="search_r1")
    assert alone.generated_tokens == 16 * n * 250 and alone.trained_tokens == 16 * n * (256 + 250)
    # reading costs the prefill of what is read, once; the longest episode decodes every turn at its limit
    blind = planned(*RAY, *SEARCH, recipe="search_r1", observed_length=0)
    work = 2 * found.shape.matmul_parameters
    few = found.seconds["generate"] - blind.seconds["generate"]
    engines = 8 // found.config.actor_rollout_ref.rollout.tensor_model_parallel_size
    ranks = found.config.actor_rollout_ref.rollout.tensor_model_parallel_size
    prefill = work * 16 * n * 2 * 400 / engines / (ranks * 989e12) / 0.35
    assert prefill < few < 1.5 * prefill  # and a longer cache to read, which is less
    assert found.seconds["generate"] > 5 * 500 * 2 * found.shape.matmul_parameters / ranks / 3.35e12 / 0.5
    assert "episodes of 3 turns of 250 tokens, 400 read after each, prompts of 256" in " ".join(plan.lines(found))


def test_a_critic_updates_after_the_policy_and_each_role_is_offloaded_by_its_own_key():
    found = planned(*RAY, recipe="ppo")
    critic = [part for part in found.parts if part.role == "critic"]
    assert [part.phase for part in critic] == ["always", "always", "critic update", "critic update"]
    assert "32768 tokens" in critic[3].what and not [
        p for p in found.parts if p.role == "policy" and "critic" in p.phase
    ]
    assert any(line.startswith("Memory in the phase critic update: ") for line in plan.lines(found))
    state = 12.0 * found.shape.critic_parameters / 8
    offloaded = [f"critic.model.fsdp_config.{name}_offload=True" for name in ("param", "optimizer")]
    away = planned(*RAY, *offloaded, recipe="ppo")
    assert away.host_bytes == state and found.host_bytes == 0
    assert found.phase_bytes["critic update"] == pytest.approx(away.phase_bytes["critic update"])
    large = planned(*RAY, "critic.ppo_max_token_len_per_gpu=262144", recipe="ppo")
    assert not large.fits and "lower critic.ppo_max_token_len_per_gpu (262144), at the least to 1024" in plan.advice(
        large
    )
    assert found.phase_bytes["update"] - away.phase_bytes["update"] == pytest.approx(state)


# --- advice ---


def test_what_does_not_fit_says_which_knob_to_turn():
    alone = planned(on="RTX4090")
    assert not alone.fits
    told = " ".join(plan.advice(alone))
    assert "trainer.backend=ray" in told and "ppo_max_token_len_per_gpu" in told and "rollout.name=vllm" in told
    every = "actor_rollout_ref.model.enable_gradient_checkpointing=False"
    held = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16896"
    long = planned("data.max_response_length=16384", every, held, *RAY)
    assert "enable_gradient_checkpointing=True" in " ".join(plan.advice(long))
    crowded = planned(*RAY, "actor_rollout_ref.rollout.gpu_memory_utilization=0.9", "trainer.n_gpus_per_node=2")
    assert not crowded.fits and "gpu_memory_utilization" in " ".join(plan.advice(crowded))


def test_following_the_advice_makes_it_fit():
    one = (*RAY, "trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.tensor_model_parallel_size=1")
    tight = planned(*one)
    assert not tight.fits and "offload_policy=True" in plan.advice(tight)[0]
    assert planned(*one, "actor_rollout_ref.actor.fsdp_config.offload_policy=True").fits


def test_the_text_has_the_plans_numbers_in_whole_sentences():
    rollout = ("actor_rollout_ref.rollout.n=16", "actor_rollout_ref.rollout.gpu_memory_utilization=0.8")
    steps = ("data.train_batch_size=512", "trainer.total_training_steps=330", "trainer.save_freq=5")
    files = "data.train_files=mine.parquet"  # of no set whose lengths are published
    arguments = (*RAY, "trainer.nnodes=16", files, *steps, *rollout, "data.max_response_length=20480")
    budget = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=21504"
    found = planned(
        *arguments, budget, "actor_rollout_ref.rollout.tensor_model_parallel_size=4", model="Qwen/Qwen2.5-32B"
    )
    text = "\n".join(plan.lines(found))
    cache = (
        f"{found.kv_sequences} answers of maximum length; planned concurrency {found.in_batch} at the assumed mean of"
    )
    assert f"KV cache per engine: {cache} 10,240 tokens." in text
    size = max(found.phase_bytes.values()) / 2**30
    assert text.startswith(f"The run fits on 128 x H100: it needs {size:.1f} GiB of a GPU's 79.0 GiB.\n")
    assert f"the run keeps 66, {66 * found.checkpoint_bytes / 2**30:.1f} GiB in all." in text
    hours = 330 * sum(found.seconds.values()) / 3600
    assert f"All 330 steps take {plan._three(hours)} hours" in text and "e+" not in text
    assert [plan._three(one) for one in (1804.2, 5.449, 0.01234, 167_772_160)] == [
        "1,800",
        "5.45",
        "0.0123",
        "168,000,000",
    ]


def test_disk_is_counted():
    found = planned("trainer.total_training_steps=100", "trainer.save_freq=10")
    assert (found.checkpoints, found.checkpoint_bytes) == (10, 12.0 * found.shape.parameters)
    kept = planned("trainer.total_training_steps=100", "trainer.save_freq=10", "trainer.max_actor_ckpt_to_keep=2")
    assert kept.checkpoints == 2 and planned("trainer.total_training_steps=100").checkpoints == 0
    critic = planned("algorithm.adv_estimator=gae", recipe="ppo").checkpoint_bytes
    assert critic == 12.0 * (found.shape.parameters + found.shape.critic_parameters)
    large = planned("trainer.total_training_steps=100", "trainer.save_freq=10", model="Qwen/Qwen2.5-32B")
    assert "max_actor_ckpt_to_keep" in " ".join(plan.advice(large))


# --- the command ---


def test_the_error_of_the_measured_updates_stands_beside_the_estimate(tmp_path, monkeypatch):
    errors = json.loads(plan.MEASURED.read_text())["errors"]
    table = plan.MEASURED.with_suffix(".md").read_text()
    assert all(f" {100 * error:+.0f} % |" in table for error in errors) and table.count(" % |") == len(errors)
    (tmp_path / "some.json").write_text('{"errors": [-0.09, 0.111, 0.02]}')
    monkeypatch.setattr(plan, "MEASURED", tmp_path / "some.json")
    told = [line for line in plan.lines(planned(*RAY)) if "error of an update's estimate" in line]
    assert told == [plan.checked()] and "-9% to +11% in 3 measured updates" in told[0]
    monkeypatch.setattr(plan, "MEASURED", tmp_path / "none.json")
    assert "not compared" in plan.checked()


def test_the_command_says_whether_it_fits(capsys):
    arguments = ["grpo", f"{MODEL}=Qwen/Qwen2.5-0.5B", "trainer.n_gpus_per_node=1"]
    assert plan.main([*arguments, "--gpu", "H200"]) == 0
    assert "The run fits on 1 x H200: it needs " in capsys.readouterr().out
    assert plan.main([*arguments, "--gpu", "RTX4090", "data.max_response_length=4096"]) in (0, 1)
    assert plan.main(["grpo", f"{MODEL}=Qwen/Qwen2.5-32B"]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out
    assert plan.main(["grpo", f"{MODEL}=nobody/nothing"]) == 2
    assert plan.main(["search_r1", f"{MODEL}=Qwen/Qwen2.5-3B", "trainer.backend=ray", "max_turns=2"]) in (0, 1)
    assert "episodes of 2 turns" in capsys.readouterr().out
    assert plan.main(["grpo", "data.nope=1"]) == 2
    assert "data.nope" in capsys.readouterr().err


def test_a_dry_run_prints_the_plan(capsys, monkeypatch):
    from core.command_line import prepare

    monkeypatch.setenv("DRY_RUN", "1")
    with pytest.raises(SystemExit):
        prepare("grpo", [f"{MODEL}=Qwen/Qwen2.5-7B"])
    out = capsys.readouterr().out
    assert (
        "plan (python -m core.plan grpo --gpu NAME" in out
        and "The run DOES NOT FIT on 1 x H100" in out
        and "7.62e9 parameters" in out
    )
    with pytest.raises(SystemExit):
        prepare("grpo", [f"{MODEL}=./outputs/nothing", "--"])
    assert "plan (" not in capsys.readouterr().out  # a folder that is not there yet
    assert plan_lines(compose("grpo", [f"{MODEL}=nobody/nothing"]))[0].startswith("none: the shape of nobody/nothing")
    assert plan_lines(compose("grpo", ["trainer.val_only=True"]))[0].startswith("none: a plan is of training")


def test_the_heads_chunk_is_that_of_the_device():
    assert head_logits(None) == CPU_LOGITS == logits_at_a_time(torch.device("cpu"))
    assert (
        head_logits(80 * 2**30) == GPU_LOGITS and head_logits(16 * 2**30) == 2**26 and head_logits(2**20) == CPU_LOGITS
    )
    large, small = (head_bytes(SMALL, 2**30, 2, logits=logits) for logits in (GPU_LOGITS, CPU_LOGITS))
    assert large - small == 3 * 4 * (GPU_LOGITS - CPU_LOGITS)
    short = ("data.max_prompt_length=64", "data.max_response_length=64")  # the head is then the highest moment
    short += tuple(f"actor_rollout_ref.{part}_max_token_len_per_gpu=4096" for part in ("actor.ppo", "rollout.log_prob"))
    for backend in ("local", "ray"):
        keys = (*short, f"trainer.backend={backend}", "trainer.n_gpus_per_node=1")
        found = [
            size(planned(*keys, model="Qwen/Qwen2.5-0.5B", on=on), "policy", "gradients") for on in ("RTX4090", "H100")
        ]
        assert found[1] > found[0]


# --- a reward model ---

REWARD = (*RAY, "reward_model.enable=True", "reward_model.model.path=Qwen/Qwen2.5-32B")
POOL = ("reward_model.enable_resource_pool=True", "reward_model.nnodes=1")


def test_a_reward_model_has_gpus_of_its_own_which_share_its_weights():
    alone = planned(*REWARD, "trainer.n_gpus_per_node=8")
    shared = planned(*REWARD, "trainer.n_gpus_per_node=8", *POOL, "reward_model.n_gpus_per_node=4")
    shape = shape_of("Qwen/Qwen2.5-32B")
    gathered = plan.gathered_bytes(shape, 2)
    assert alone.reward_bytes - shared.reward_bytes == pytest.approx(2 * shape.critic_parameters * 3 / 4 - gathered)
    assert alone.phase_bytes == shared.phase_bytes and max(shared.phase_bytes.values()) < 0.95 * alone.gpu.memory
    assert shared.fits and "takes 4 x H100 more; memory of each: " in "\n".join(plan.lines(shared))


def test_a_reward_model_that_does_not_fit_is_told_with_the_pool_that_helps():
    found = planned(*REWARD, "trainer.n_gpus_per_node=8", "reward_model.forward_max_token_len_per_gpu=131072")
    assert not found.fits and any("reward_model.enable_resource_pool=True" in line for line in plan.advice(found))


def test_a_reward_model_of_unknown_shape_is_not_estimated():
    found = planned(
        *RAY, "trainer.n_gpus_per_node=8", "reward_model.enable=True", "reward_model.model.path=org/unknown"
    )
    assert found.fits and "memory of each: not estimated" in "\n".join(plan.lines(found))


def test_in_one_process_the_reward_model_is_always_there():
    keys = ("actor_rollout_ref.rollout.name=hf", "reward_model.enable=True")
    small = "Qwen/Qwen2.5-0.5B"
    found = planned(*keys, f"reward_model.model.path={small}", model=small)
    assert size(found, "reward", "weights") == found.reward_bytes > 2 * shape_of(small).critic_parameters
