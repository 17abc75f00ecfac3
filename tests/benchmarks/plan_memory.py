"""The plan's memory figures beside what updates of small models really allocate, on the CPU.

    python -m tests.benchmarks.plan_memory

Each case makes two optimizer steps of ``core.learner.learner.Actor`` (the first creates Adam's moments) and counts
every
allocation and release of torch's CPU allocator during the second: their highest sum is what the update needs beyond
the weights and moments that are there. The estimate is that of ``core.planning.estimate`` for the same
shape, precision and tokens:
gradients and activations at their highest, copies of the weights in bf16. A GPU's allocator, its fragments and its
libraries are not measured. Writes ``results/benchmarks/plan_memory.md``, and ``plan_memory.json``, from which a plan
takes the error that it prints.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen2Config, Qwen2ForCausalLM

from core.learner.batching import make_batch, mini_batches
from core.learner.learner import Actor
from core.planning.estimate import copies_bytes, update_bytes
from core.planning.model_shapes import Shape
from core.types import Prompt, ScoredGroup, Stop, Trajectory
from reward_scores.score import Score

TARGET = Path("results/benchmarks/plan_memory.md")
MIB = 2**20
PROMPT = 16
SHAPES = {
    "lab": Shape(hidden=128, layers=3, heads=4, kv_heads=4, mlp=256, vocab=64, tied=False, bias=True),
    "small": Shape(hidden=384, layers=6, heads=6, kv_heads=2, mlp=1024, vocab=8192, tied=False, bias=True),
    "middle": Shape(hidden=512, layers=8, heads=8, kv_heads=2, mlp=1536, vocab=32768, tied=False, bias=True),
}


@dataclass(frozen=True)
class Case:
    shape: str
    rows: int
    length: int  # of an answer
    bf16: bool
    checkpointing: bool

    @property
    def tokens(self) -> int:
        return self.rows * (PROMPT + self.length)

    def estimate(self) -> float:
        """Bytes of an update beyond weights and moments, by the plan's formulas."""
        shape, width = SHAPES[self.shape], 2 if self.bf16 else 4
        copies = copies_bytes(shape, self.checkpointing) if self.bf16 else 0.0
        return copies + update_bytes(shape, self.tokens, width, 4, checkpointing=self.checkpointing)[0]


CASES = [
    Case("lab", 64, 112, False, False),
    Case("lab", 64, 112, False, True),
    Case("small", 16, 240, False, False),
    Case("small", 16, 240, False, True),
    Case("small", 16, 240, True, True),
    Case("middle", 8, 496, False, True),
    Case("middle", 8, 496, True, True),
]


def model(shape: Shape) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.mlp,
        vocab_size=shape.vocab,
        tie_word_embeddings=shape.tied,
    )
    return Qwen2ForCausalLM(config).train()


def batch_of(case: Case):
    """One optimizer step: a row a prompt, all of one length."""
    generator = torch.Generator().manual_seed(0)
    groups = []
    for row in range(case.rows):
        ids = torch.randint(4, SHAPES[case.shape].vocab, (PROMPT + case.length,), generator=generator).tolist()
        logprobs, written = [-1.0] * case.length, [True] * case.length
        answer = Trajectory(ids[:PROMPT], ids[PROMPT:], written, logprobs, (), Stop.EOS, 0, 0)
        prompt = Prompt(row, str(row), tuple(ids[:PROMPT]), (), "", "test")
        groups.append(ScoredGroup(prompt, (answer,), (Score(float(row % 2)),)))
    batch = make_batch(groups, 0)
    batch = batch.adding(advantages=batch.response_mask.float(), old_log_probs=batch.rollout_log_probs)
    (step,) = mini_batches(batch, prompts=case.rows, agg_mode="token-mean", scale_factor=1.0)
    return step


def measured(case: Case) -> float:
    """The highest sum of bytes allocated and not yet released during an update."""
    module = model(SHAPES[case.shape])
    if case.checkpointing:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    config = SimpleNamespace(
        optim=SimpleNamespace(lr=1e-4, betas=(0.9, 0.999), weight_decay=0.01),
        policy_loss=SimpleNamespace(loss_mode="vanilla"),
        **{"grad_clip": 1.0, "use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": case.rows},
        **{"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0},
        **{"use_kl_loss": False, "entropy_coeff": 0.0},
    )
    actor = Actor(module, config, temperature=1.0, compute_dtype=torch.bfloat16 if case.bf16 else None)
    step = batch_of(case)
    actor.update([step], 1.0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        actor.update([step], 1.0)
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return float(max(accumulate(event.nbytes() for event in events)))


def render(found: list[tuple[Case, float]]) -> str:
    rows = []
    for case, real in found:
        shape, estimate = SHAPES[case.shape], case.estimate()
        what = f"{'bf16' if case.bf16 else 'fp32'}, {'layer inputs' if case.checkpointing else 'all layers'} kept"
        cells = [f"{case.shape}, {shape.parameters / 1e6:.1f} M parameters", what, str(case.tokens)]
        rows.append([*cells, f"{estimate / MIB:.0f}", f"{real / MIB:.0f}", f"{100 * (estimate / real - 1):+.0f} %"])
    worst = max(abs(case.estimate() / real - 1) for case, real in found)
    header = ["model", "pass", "tokens", "estimated, MiB", "measured, MiB", "error"]
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        [
            "# The plan's memory figures beside measured updates",
            "",
            "Generated by `python -m tests.benchmarks.plan_memory`, whose head says what is counted. An update beyond "
            "the weights and Adam's moments, which are exact (12 bytes a parameter). CPU, "
            f"torch {torch.__version__}; the largest error is {100 * worst:.0f} %. No GPU was measured.",
            "",
            *("| " + " | ".join(line) + " |" for line in lines),
            "",
        ]
    )


def main() -> None:
    torch.set_num_threads(1)
    found = [(case, measured(case)) for case in CASES]
    text = render(found)
    TARGET.write_text(text, encoding="utf-8")
    errors = [round(case.estimate() / real - 1, 4) for case, real in found]
    TARGET.with_suffix(".json").write_text(json.dumps({"errors": errors}) + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
