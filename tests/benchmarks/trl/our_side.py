"""Our trainer on the shared workload, through its ordinary entry points; prints one JSON line."""

import argparse
import json
import resource
import statistics
import tempfile
from pathlib import Path

from core.config.composition import compose
from core.ray_trainer import RayPPOTrainer


def reward(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(set(solution_str)) % 7) / 7


class Clocked(RayPPOTrainer):
    """Notes what a step measured."""

    def complete_step(self, groups_P, batch, metrics):
        super().complete_step(groups_P, batch, metrics)
        self.lengths.append(metrics.values["response_length/mean"])
        self.phases.append({k: v for k, v in metrics.values.items() if k.startswith("timing_s/")})


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (
        ("prompts", 32),
        ("n", 8),
        ("max-new", 64),
        ("steps", 5),
        ("micro", 64),
        ("threads", 2),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--exact", type=int, default=0)  # 1: no answer ends before max-new
    parser.add_argument("--micro-tokens", type=int)
    parser.add_argument("--keys", default="")  # key=value, separated by spaces
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", required=True)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    args = parser.parse_args()
    folder = tempfile.mkdtemp()
    micro = f"ppo_micro_batch_size_per_gpu={args.micro}"
    if args.micro_tokens is not None:
        # Micro-batches by tokens instead of by answers
        micro = f"ppo_max_token_len_per_gpu={args.micro_tokens}"
    config = compose(
        "grpo",
        [
            f"data.train_files={args.rows}",
            f"data.val_files={args.rows}",
            f"data.train_batch_size={args.prompts}",
            f"data.max_response_length={args.max_new}",
            "data.max_prompt_length=1536",
            "data.val_max_samples=1",
            f"actor_rollout_ref.model.path={args.model}",
            "actor_rollout_ref.model.enable_gradient_checkpointing=False",
            "actor_rollout_ref.model.use_remove_padding=True",
            f"actor_rollout_ref.rollout.n={args.n}",
            f"actor_rollout_ref.rollout.dtype={args.dtype}",
            "actor_rollout_ref.rollout.name=hf",
            f"actor_rollout_ref.rollout.ignore_eos={bool(args.exact)}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={args.prompts}",
            f"actor_rollout_ref.actor.{micro}",
            f"actor_rollout_ref.actor.fsdp_config.dtype={args.dtype}",
            "actor_rollout_ref.actor.optim.lr=1e-5",
            f"custom_reward_function.path={Path(__file__).resolve()}",
            "custom_reward_function.name=reward",
            f"trainer.total_training_steps={args.steps}",
            f"trainer.cpu_threads={args.threads}",
            f"trainer.default_local_dir={folder}/run",
            "trainer.val_before_train=False",
            "trainer.n_gpus_per_node=1",
            "trainer.logger=[jsonl]",
            *args.keys.split(),
        ],
    )
    trainer = Clocked(config)
    trainer.lengths, trainer.phases = [], []
    trainer.init_workers()
    trainer.fit()
    timed = trainer.phases[1:]  # the first step warms up
    phases = {name: statistics.median(step[name] for step in timed) for name in timed[-1]}
    # With its bookkeeping, without the last step's checkpoint
    steps = [step["timing_s/whole"] for step in timed]
    result = {
        "seconds": statistics.median(steps),
        "all": steps,
        "mean_length": statistics.mean(trainer.lengths),
    }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({**result, "phases": phases, "peak_rss_mib": peak}))


if __name__ == "__main__":
    main()
