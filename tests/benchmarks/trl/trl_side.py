"""TRL's GRPOTrainer on the shared workload; runs in TRL's own environment, prints one JSON line.

Settings that were tried and kept for TRL: micro-batches as in compare.py, fused AdamW, no gradient
checkpointing, no KL term (no reference pass), one update a step (no old-log-prob pass), logging
off.
"""

import argparse
import json
import resource
import statistics
import tempfile
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """When each optimizer step ended, and the mean length of its completions as the trainer itself
    counts them."""

    def __init__(self):
        self.ends, self.lengths, self.trainer = [], [], None

    def on_step_end(self, *args, **kwargs):
        self.ends.append(time.perf_counter())
        self.lengths.append(self.trainer._metrics["train"]["completions/mean_length"][-1])


def reward(completions, **kwargs):
    return [float(len(set(text)) % 7) / 7 for text in completions]


def main():
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
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", required=True)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with open(args.rows, encoding="utf-8") as file:
        rows = [{"prompt": json.loads(line)} for line in file]
    batch = args.prompts * args.n
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=args.micro,
        gradient_accumulation_steps=batch // args.micro,
        num_generations=args.n,
        max_completion_length=args.max_new,
        generation_kwargs={"min_new_tokens": args.max_new} if args.exact else None,
        temperature=1.0,
        beta=0.0,
        num_iterations=1,
        max_steps=args.steps,
        logging_steps=10**6,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=args.dtype == "bf16",
        learning_rate=1e-5,
        gradient_checkpointing=False,
        optim="adamw_torch_fused",
        disable_tqdm=True,
    )
    clock = Clock()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        callbacks=[clock],
    )
    clock.trainer = trainer
    start = time.perf_counter()
    trainer.train()
    ends = [start, *clock.ends]
    steps = [b - a for a, b in zip(ends[1:], ends[2:], strict=False)]  # the first step warms up
    lengths = statistics.mean(clock.lengths)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        json.dumps(
            {
                "seconds": statistics.median(steps),
                "all": steps,
                "mean_length": lengths,
                "peak_rss_mib": peak,
            }
        )
    )


if __name__ == "__main__":
    main()
