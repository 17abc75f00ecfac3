"""The plan: formulas at hand-made values, what shares or offloads the state, and a command that says no."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from core import plan
from core.config import compose
from core.config.recipes import trainer_of
from core.learner.log_probs import logits_at_a_time
from core.learner.logit_memory import CPU_LOGITS, GPU_LOGITS, head_logits
from core.model_shapes import Shape, shape_of
from core.plan import Plan, block_bytes, head_bytes, plan_lines, update_bytes

MODEL = "actor_rollout_ref.model.path"
SMALL = Shape(hidden=8, layers=3, heads=4, kv_heads=2, mlp=16, vocab=32, tied=False, bias=True)
RAY = ("trainer.backend=ray", "actor_rollout_ref.rollout.name=vllm")


def planned(*overrides: str, model: str = "Qwen/Qwen2.5-7B", on: str = "H100", recipe: str = "grpo"):
    config = compose(recipe, [f"{MODEL}={model}", *overrides], trainer_of(recipe)[1])
    return Plan(config, on)


def size(found: plan.Plan, role: str, words: str) -> float:
    (part,) = [p for p in found.parts if p.role == role and words in p.what]
    return part.bytes


# --- formulas ---


def test_the_formulas_at_hand_made_values():
    """h 8, q 8, kv 4, m 16, L 3, V 32: every term differs, so a term that is lost shows."""
    assert SMALL.block == 2 * 8 * 8 + 2 * 8 * 4 + (8 + 8) + 3 * 8 * 16 + 16 and SMALL.ends == 2 * 32 * 8 + 8
    assert SMALL.kv_bytes(2) == 2 * 3 * 4 * 2
    assert block_bytes(SMALL, 2) == 16 * (4 + 2 + 2) + (24 + 8) * 2 + 4 * 16 * 2
    head = head_bytes(SMALL, 10, 2)
    assert head == 3 * 4 * 10 * 32 + 4 * 32 * 8 + 2 * 10 * 8 * 2 == head_bytes(SMALL, 10, 2, trains=False) + 1024


def test_the_moments_of_an_update_at_hand_made_values():
    """``tests/scale`` holds them beside what the learner allocates."""
    block, gathered = block_bytes(SMALL, 2), 2 * (2 * SMALL.block + SMALL.ends)
    assert plan.gathered_bytes(SMALL, 2) == gathered
    options = {"checkpointing": True, "ranks": 4}
    layers = 4.0 * (SMALL.parameters - SMALL.ends) / 4
    last = 2 * 32 * 8 + 4 * SMALL.block + 1000 * (3 * 8 * 2 + 2 * 24 * 2 + block)
    assert update_bytes(SMALL, 1000, 2, **options) == (last, "in the last layer")
    ends = dataclasses.replace(SMALL, vocab=4096)
    head = 1000 * 3 * 8 * 2 + head_bytes(ends, 1000, 2) + 2 * 4096 * 8
    assert update_bytes(ends, 1000, 2, **options) == (head, "in the head")
    expected = layers + (2 + 4) * ends.ends - plan.gathered_bytes(ends, 2)
    assert update_bytes(ends, 1, 2, **options) == (expected, "at the end")
    assert plan.log_prob_bytes(dataclasses.replace(SMALL, mlp=512), 10, 2) == 10 * (3 * 512 + 4 * 8) * 2
    assert plan.log_prob_bytes(SMALL, 10, 2, adapters=9) == head_bytes(SMALL, 10, 2, trains=False)


def test_state_is_shared_by_the_ranks_or_leaves_the_gpu():
    alone, eight = planned(), planned(*RAY)
    weights, moments = 4.0 * alone.shape.parameters, 8.0 * alone.shape.parameters
    assert size(alone, "policy", "optimizer") == moments and size(eight, "policy", "optimizer") == moments / 8
    half = planned(*RAY, "actor_rollout_ref.actor.fsdp_config.fsdp_size=2")
    assert size(half, "policy", "optimizer") == moments / 2

    def phases(found, what):
        (part,) = [part for part in found.parts if part.role == "policy" and part.what.startswith(f"{what} (")]
        return part.phases

    fsdp = "actor_rollout_ref.actor.fsdp_config"
    between, both, always = (
        planned(*RAY, *(f"{fsdp}.{name}=True" for name in names))
        for names in (("optimizer_offload",), ("optimizer_offload", "param_offload"), ("offload_policy",))
    )
    assert (phases(between, "weights"), phases(between, "optimizer")) == (plan.PHASES, ("update",))
    assert phases(both, "weights") == ("log-probs", "update")
    assert phases(always, "weights") == phases(always, "optimizer") == ()
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
    assert shared.phase_bytes["update"] < whole.phase_bytes["update"]
    assert "that share its state: 8, 4 of them each layer" in "\n".join(plan.lines(shared))


def test_the_cache_holds_what_is_left_beside_the_weights():
    found = planned(*RAY, "actor_rollout_ref.rollout.tensor_model_parallel_size=2")
    shape, longest = found.shape, 1024
    room = 0.5 * found.memory - shape.parameters  # two bytes a parameter, over two GPUs
    assert size(found, "engine", "KV cache") == pytest.approx(room)
    assert found.kv_sequences == int(room // (shape.kv_bytes(2) / 2 * longest))
    more = planned(*RAY, "actor_rollout_ref.rollout.gpu_memory_utilization=0.8")
    assert more.kv_sequences > found.kv_sequences


def test_a_critic_updates_after_the_policy_and_each_role_is_offloaded_by_its_own_key():
    found = planned(*RAY, recipe="ppo")
    critic = [part for part in found.parts if part.role == "critic"]
    assert [part.phases for part in critic] == [plan.PHASES] * 2 + [("critic update",)] * 2
    assert "32768 tokens" in critic[3].what
    assert not [p for p in found.parts if p.role == "policy" and not p.state and "critic update" in p.phases]
    assert any(line.startswith("Memory in the phase critic update: ") for line in plan.lines(found))
    state = 12.0 * found.shape.critic_parameters / 8
    offloaded = [f"critic.model.fsdp_config.{name}_offload=True" for name in ("param", "optimizer")]
    away = planned(*RAY, *offloaded, recipe="ppo")
    assert away.host_bytes == state and found.host_bytes == 0
    assert found.phase_bytes["critic update"] == pytest.approx(away.phase_bytes["critic update"])
    large = planned(*RAY, "critic.ppo_max_token_len_per_gpu=262144", recipe="ppo")
    assert large.over == ["critic update"] and "lower critic.ppo_max_token_len_per_gpu" in " ".join(plan.advice(large))
    assert found.phase_bytes["update"] - away.phase_bytes["update"] == pytest.approx(state)


# --- advice ---


def test_what_does_not_fit_names_the_keys_that_help():
    (told,) = plan.advice(planned(on="RTX4090"))
    assert "ranks with trainer.backend=ray" in told
    assert "offload" not in told, "one process does not offload"
    told = [*plan.advice(planned(*RAY, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=262144"))]
    assert told[-1] == "update: lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    assert not [line for line in told if line.startswith(("state", "generate"))]
    crowded = planned(*RAY, "actor_rollout_ref.rollout.gpu_memory_utilization=0.9", "trainer.n_gpus_per_node=2")
    assert not crowded.fits and "gpu_memory_utilization" in " ".join(plan.advice(crowded))


def test_following_the_advice_makes_it_fit():
    one = (*RAY, "trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.tensor_model_parallel_size=1")
    tight = planned(*one)
    assert not tight.fits and "offload_policy=True" in next(plan.advice(tight))
    assert planned(*one, "actor_rollout_ref.actor.fsdp_config.offload_policy=True").fits


def test_the_text_has_the_plans_numbers_in_whole_sentences():
    rollout = ("actor_rollout_ref.rollout.n=16", "actor_rollout_ref.rollout.gpu_memory_utilization=0.8")
    steps = ("data.train_batch_size=512", "trainer.total_training_steps=330", "trainer.save_freq=5")
    arguments = (*RAY, "trainer.nnodes=16", *steps, *rollout, "data.max_response_length=20480")
    budget = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=21504"
    found = planned(
        *arguments, budget, "actor_rollout_ref.rollout.tensor_model_parallel_size=4", model="Qwen/Qwen2.5-32B"
    )
    text = "\n".join(plan.lines(found))
    assert f"KV cache per engine: {found.kv_sequences} sequences of full length, 20,992 tokens each." in text
    size = max(found.phase_bytes.values()) / 2**30
    assert text.startswith(f"The run fits on 128 x H100: it needs {size:.1f} GiB of a GPU's 79.0 GiB.\n")
    assert f"the run keeps 66, {66 * found.checkpoint_bytes / 2**30:.1f} GiB in all." in text


def test_disk_is_counted():
    found = planned("trainer.total_training_steps=100", "trainer.save_freq=10")
    assert (found.checkpoints, found.checkpoint_bytes) == (10, 12.0 * found.shape.parameters)
    kept = planned("trainer.total_training_steps=100", "trainer.save_freq=10", "trainer.max_actor_ckpt_to_keep=2")
    assert kept.checkpoints == 2 and planned("trainer.total_training_steps=100").checkpoints == 0
    critic = planned("algorithm.adv_estimator=gae", recipe="ppo").checkpoint_bytes
    assert critic == 12.0 * (found.shape.parameters + found.shape.critic_parameters)


# --- the command ---


def test_the_command_says_whether_it_fits(capsys):
    arguments = ["grpo", f"{MODEL}=Qwen/Qwen2.5-0.5B", "trainer.n_gpus_per_node=1"]
    assert plan.main([*arguments, "--gpu", "H200"]) == 0
    assert "The run fits on 1 x H200: it needs " in capsys.readouterr().out
    assert plan.main([*arguments, "--gpu", "RTX4090", "data.max_response_length=4096"]) in (0, 1)
    assert plan.main(["grpo", f"{MODEL}=Qwen/Qwen2.5-32B"]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out
    assert plan.main(["grpo", f"{MODEL}=nobody/nothing"]) == 2
    assert plan.main([*arguments, "--gpu", "H999"]) == 2
    assert "H100, H800" in capsys.readouterr().err
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
    assert alone.phase_bytes == shared.phase_bytes and max(shared.phase_bytes.values()) < 0.95 * alone.memory
    assert shared.fits and "takes 4 x H100 more; memory of each: " in "\n".join(plan.lines(shared))


def test_a_reward_model_that_does_not_fit_is_told_with_the_pool_that_helps():
    found = planned(*REWARD, "trainer.n_gpus_per_node=8", "reward_model.forward_max_token_len_per_gpu=131072")
    assert not found.fits and any("reward_model.enable_resource_pool" in line for line in plan.advice(found))


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
