"""GRPO on a GPU with a random model in the shape of Qwen2.5-0.5B: tokens a second, utilisation, memory.

Backend local, engine hf, packed rows, through the ordinary trainer; nothing is learnt, only speed is looked at. The
first step warms up and is left out. Utilisation is the FLOPs of ``tests/benchmarks/step`` over the seconds of the
phase, over the measured peak of products of two square matrices.
"""

from __future__ import annotations

import statistics
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

from core.config import compose
from core.ray_trainer import RayPPOTrainer

PROMPT = 64


@dataclass(frozen=True)
class Workload:
    """What a step makes: prompts, answers to each, tokens of an answer; and how."""

    device: str = "cuda"
    dtype: str = "bf16"
    size: str = "full"
    steps: int = 5
    prompts: int = 32
    answers: int = 8
    new_tokens: int = 512
    cache_gib: int = 16


REHEARSAL = Workload("cpu", "fp32", "tiny", steps=3, prompts=2, answers=2, new_tokens=8, cache_gib=1)
TOKEN_BUDGET = 32768  # of a micro-batch


@dataclass(frozen=True)
class Size:
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int


SIZES = {"full": Size(151936, 896, 4864, 24, 14, 2), "tiny": Size(512, 32, 64, 2, 4, 2)}


def make_model(size: Size) -> torch.nn.Module:
    """Random weights, float32."""
    config = Qwen2Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Arbitrary, and different from answer to answer: every group then trains."""
    return zlib.crc32(solution_str.encode()) % 8 / 7


def prepare(folder: Path, size: Size) -> None:
    """Model, a tokenizer with a word for every id, and prompts."""
    make_model(size).save_pretrained(folder / "model")
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, size.vocabulary)}}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = WhitespaceSplit(), decoders.WordPiece(prefix="##")
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder / "tokenizer")
    LlamaConfig().save_pretrained(folder / "tokenizer")  # beside Qwen2's, transformers would split text its own way
    rows = [
        {
            "data_source": "gpu",
            "prompt": " ".join(f"w{3 + (i * 7919 + j * 104729) % (size.vocabulary - 3)}" for j in range(PROMPT)),
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": "none"},
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(1024)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")


class Clocked(RayPPOTrainer):
    """Notes the seconds of each phase and whole step, what is still at work on the GPU included."""

    def complete_step(self, groups_P: Any, batch: Any, metrics: Any) -> None:
        super().complete_step(groups_P, batch, metrics)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        self.phases.append({k.removeprefix("timing_s/"): v for k, v in metrics.values.items() if "timing_s/" in k})
        self.mismatch.append(metrics.values["rollout_corr/logp_diff_mean"])


def overrides(folder: Path, args: Workload) -> list[str]:
    settings = {
        "data.train_files": folder / "rows.parquet",
        "data.val_files": folder / "rows.parquet",
        "data.val_max_samples": 1,
        "data.train_batch_size": args.prompts,
        "data.max_prompt_length": PROMPT,
        "data.max_response_length": args.new_tokens,
        "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.model.tokenizer_path": folder / "tokenizer",
        "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.n": args.answers,
        "actor_rollout_ref.rollout.ignore_eos": True,
        "actor_rollout_ref.rollout.dtype": args.dtype,
        "+actor_rollout_ref.rollout.engine_kwargs.hf.cache_gib": args.cache_gib,
        "actor_rollout_ref.actor.ppo_mini_batch_size": args.prompts,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": max(TOKEN_BUDGET, PROMPT + args.new_tokens),
        "actor_rollout_ref.actor.fsdp_config.dtype": args.dtype,
        "custom_reward_function.path": Path(__file__).resolve(),
        "custom_reward_function.name": "reward",
        "trainer.total_training_steps": args.steps,
        "trainer.device": args.device,
        "trainer.default_local_dir": folder / "run",
        "trainer.val_before_train": False,
        "trainer.logger": "[jsonl]",
    }
    return [f"{key}={value}" for key, value in settings.items()]


def matmul_peak(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of a product of two square matrices, the best of ten."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    times = []
    for _ in range(11):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times[1:])


def flops(size: Size, module: torch.nn.Module, args: Workload) -> dict[str, float]:
    """FLOPs of a step's generation and update: prompts are read once a group, an update is three forward passes."""
    matrices = sum(p.numel() for p in module.parameters() if p.dim() == 2)  # the tied head once, as a product
    attention, length, answers = 4 * size.layers * size.hidden, PROMPT + args.new_tokens, args.prompts * args.answers

    def forward(tokens: float, attended: float) -> float:
        return tokens * (2 * matrices + attention * attended)

    decoding = forward(answers * args.new_tokens, PROMPT + args.new_tokens / 2)
    reading = forward(args.prompts * PROMPT, PROMPT / 2)
    return {"gen": reading + decoding, "update_actor": 3 * forward(answers * length, length / 2)}


def measure(folder: Path, args: Workload) -> dict[str, Any]:
    size, device = SIZES[args.size], torch.device(args.device)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype]
    peak = matmul_peak(device, dtype, 8192 if device.type == "cuda" else 512)
    prepare(folder, size)
    trainer = Clocked(compose("grpo", overrides(folder, args)))
    trainer.ends, trainer.phases, trainer.mismatch = [], [], []
    trainer.init_workers()
    work = flops(size, trainer.workers.actor.module, args)
    trainer.fit()
    steps = [b - a for a, b in zip(trainer.ends, trainer.ends[1:], strict=False)]
    phases = {name: statistics.median(one[name] for one in trainer.phases[1:]) for name in trainer.phases[-1]}
    seconds, answers = statistics.median(steps), args.prompts * args.answers
    return {
        "seconds_per_step": seconds,
        "new_tokens_per_second": answers * args.new_tokens / seconds,
        "phases_s": phases,
        "mfu": {name: flop / phases[name] / peak for name, flop in work.items()},
        "logp_diff_mean": max(trainer.mismatch),
    }
