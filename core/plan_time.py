"""Time of a step and hours of a run by phase: counted FLOPs and bytes over assumed rates.

What is counted follows from the configuration. What is not known beforehand is assumed, in the open
and with a range: lengths of prompts and answers, shares of a device's peak. Two published runs
stand beside each plan with what this would have said of them. Validation is not counted.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from core.config.schema import Config
from core.config.section import FULL_PRECISION
from core.learner.step_settings import needs_old_log_probs
from core.model_shapes import TABLE, Shape, shape_of

GENERATE = "generate"
LOG_PROBS = "log-probs"
UPDATE = "update"
REST = "the rest"
CORE_FLOPS = {"float32": 130e9, "bfloat16": 195e9}  # of a core with AVX-512 (and its BF16)
WIDE = 512  # columns of a layer from which on products reach their share of a core's peak
HOST_BYTES = 10e9  # a second, from the memory of a machine with few cores
CPU_LAYER_S = 1e-3  # least time of a layer in a step of decoding: calls, not arithmetic
GPU_LAYER_S = 50e-6


@dataclass(frozen=True)
class Assumed:
    """One set of assumptions. Lengths are factors of the root of their limit: long limits are
    rarely reached. They were read off GSM8K (limit 1,024, mean 250) and DAPO (limit 20,480, mean
    1,000 at first and 5,000 late)."""

    prompt: float
    answer: float
    arithmetic: float  # share of the peak FLOPs in passes of the learner
    bandwidth: float  # share of the memory's bandwidth while decoding
    rest: float  # sync, scoring, driver: share of the other phases
    drawn: float  # exponent of gen_batch_size / train_batch_size: prompts drawn for one kept


LIKELY = Assumed(prompt=4, answer=12, arithmetic=0.40, bandwidth=0.6, rest=0.10, drawn=0.5)
FAST = Assumed(prompt=2, answer=4, arithmetic=0.55, bandwidth=0.8, rest=0.05, drawn=0.0)
SLOW = Assumed(prompt=8, answer=36, arithmetic=0.20, bandwidth=0.4, rest=0.30, drawn=1.0)


@dataclass(frozen=True)
class Work:
    """What a step has to do, and on what."""

    shape: Shape
    prompts: int
    answers: int  # a prompt
    prompt_limit: int
    answer_limit: int
    devices: int
    flops: float  # peak of a device, a second
    bytes: float  # memory bandwidth of a device, a second
    layer_s: float
    log_prob_passes: int = 0
    update_passes: int = 3  # forward, and twice that backward; 4 if activations are recomputed
    models_trained: int = 1  # 2 with a critic
    engine_devices: int = 1  # that share a copy of the engine's weights
    drawn_ratio: float = 1.0
    generates: bool = True
    on_cpu: bool = False
    shares_prompts: bool = False  # a pass reads a prompt once for all of its answers
    mean_answer: int | None = None  # tokens, if somebody knows

    def lengths(self, assumed: Assumed) -> tuple[float, float]:
        """Return the mean tokens of a prompt and of an answer."""
        prompt = min(self.prompt_limit, assumed.prompt * self.prompt_limit**0.5)
        answer = min(self.answer_limit, assumed.answer * self.answer_limit**0.5)
        return prompt, self.mean_answer or answer

    def seconds(self, assumed: Assumed) -> dict[str, float]:
        """Return phase -> seconds of a step."""
        prompt, answer = self.lengths(assumed)
        of_prompt = prompt if self.shares_prompts else prompt * self.answers
        tokens = self.prompts * (of_prompt + self.answers * answer)
        forward = tokens * self._token_flops(prompt + answer)
        power = self.devices * self.flops * assumed.arithmetic
        times = {}
        if self.generates:
            times[GENERATE] = self._decoding(assumed, prompt, answer)
        if self.log_prob_passes:
            times[LOG_PROBS] = forward * self.log_prob_passes / power
        times[UPDATE] = forward * self.update_passes * self.models_trained / power
        times[REST] = assumed.rest * sum(times.values())
        return times

    def _token_flops(self, length: float) -> float:
        """Return the FLOPs of a token in a forward pass: two a weight, and causal attention."""
        shape = self.shape
        weights = shape.layers * shape.block + shape.vocab * shape.hidden
        return 2.0 * weights + 2.0 * shape.layers * shape.q_size * length

    def _decoding(self, assumed: Assumed, prompt: float, answer: float) -> float:
        """Return the seconds of decoding: all answers at once, then the longest ones alone.

        A step of decoding reads weights and cache, or is bound by arithmetic.
        """
        engines = max(1, self.devices // self.engine_devices)
        drawn = self.drawn_ratio**assumed.drawn
        sequences = max(1.0, drawn * self.prompts * self.answers / engines)
        bandwidth = self.engine_devices * self.bytes * assumed.bandwidth
        power = self.engine_devices * self.flops * assumed.arithmetic
        weights = 2.0 * self.shape.parameters / bandwidth
        cache = sequences * (prompt + answer / 2) * self.shape.kv_bytes(2) / bandwidth
        flops = self._token_flops(prompt + answer)
        calls = self.shape.layers * self.layer_s
        step = max(weights + cache, sequences * flops / power) + calls
        alone = max(weights, flops / power) + calls
        prefill = sequences / self.answers * prompt * flops / power
        return prefill + answer * step + max(0.0, self.answer_limit - answer) * alone


def work_of(
    config: Config, shape: Shape, devices: int, gpu: str | None, mean_answer: int | None = None
) -> Work:
    """Return what a step has to do on so many GPUs, or on this machine's CPU (``gpu`` is None)."""
    roles = config.actor_rollout_ref
    data = config.data
    if gpu is None:
        cores = (os.cpu_count() or 1) / devices
        dtype = "float32" if roles.actor.fsdp_config.dtype in FULL_PRECISION else "bfloat16"
        reached = min(1.0, shape.hidden / WIDE)
        speed = {"flops": CORE_FLOPS[dtype] * cores * reached, "bytes": HOST_BYTES / devices}
        speed["layer_s"] = CPU_LAYER_S
    else:
        tera_flops, tera_bytes = TABLE["speeds"][gpu]
        speed = {"flops": tera_flops * 1e12, "bytes": tera_bytes * 1e12, "layer_s": GPU_LAYER_S}
    generates = config.generates
    passes = len(config.frozen_models) + config.needs_ref + config.has_critic
    if generates:
        passes += needs_old_log_probs(config, data.train_batch_size)
    shares_engine = config.trainer.backend == "ray" and generates
    return Work(
        shape=shape,
        prompts=data.train_batch_size,
        answers=roles.rollout.n if generates else 1,
        prompt_limit=data.max_prompt_length,
        answer_limit=data.max_response_length,
        devices=devices,
        on_cpu=gpu is None,
        shares_prompts=generates and not shape.tower,
        log_prob_passes=passes,
        update_passes=4 if roles.model.enable_gradient_checkpointing else 3,
        models_trained=1 + config.has_critic,
        engine_devices=roles.rollout.tensor_model_parallel_size if shares_engine else 1,
        drawn_ratio=max(1.0, (data.gen_batch_size or 0) / data.train_batch_size),
        generates=generates,
        mean_answer=mean_answer,
        **speed,
    )


# Qwen2.5-Math-7B by DAPO in verl, learner and engines on the same H20s: seconds a step by GPUs, of
# the table "colocate sync" in verl's docs/advance/fully_async.md. Batch and limits are those of the
# page; engines of 4 GPUs and the limit of prompts are in the scripts beside it. The mean length of
# answers is not published.
PUBLISHED = {32: 790.10, 128: 356.30}
PUBLISHED_WORK = Work(
    shape=shape_of("Qwen/Qwen2.5-Math-7B"),
    prompts=512,
    answers=16,
    prompt_limit=2048,
    answer_limit=28 * 1024,
    devices=32,
    flops=TABLE["speeds"]["H20"][0] * 1e12,
    bytes=TABLE["speeds"]["H20"][1] * 1e12,
    layer_s=GPU_LAYER_S,
    log_prob_passes=1,
    update_passes=4,
    engine_devices=4,
)


def published() -> Iterator[tuple[int, float, tuple[float, float, float]]]:
    """Yield GPUs, seconds a step as published, and what would have been said (likely, range)."""
    for devices, seconds in PUBLISHED.items():
        yield devices, seconds, total_seconds(replace(PUBLISHED_WORK, devices=devices))


def total_seconds(work: Work) -> tuple[float, float, float]:
    """Return the likely seconds of a step, and the ends of their range."""
    likely, fast, slow = (sum(work.seconds(assumed).values()) for assumed in (LIKELY, FAST, SLOW))
    return likely, fast, slow


def lines(work: Work, steps: int | None) -> Iterator[str]:
    """Yield the times as text: of a step, of the run, what was assumed, and how good that is."""
    likely, fast, slow = total_seconds(work)
    phases = work.seconds(LIKELY)
    device = "CPU" if work.on_cpu else "GPU"
    parts = ", ".join(f"{name} {_shown(seconds)}" for name, seconds in phases.items())
    yield f"A step takes {_range(likely, fast, slow)} seconds: {parts}."
    count = steps or 100
    # A laptop's run of seconds would be ten-thousandths of an hour
    unit, length = ("hour", 3600) if slow * count >= 1800 else ("second", 1)
    used = count * work.devices / length
    run = _range(*(seconds * count / length for seconds in (likely, fast, slow)))
    in_devices = _range(likely * used, fast * used, slow * used)
    parts = ", ".join(f"{name} {_shown(seconds * used)}" for name, seconds in phases.items())
    which = f"The run of {steps} steps takes" if steps else "100 steps take"
    yield f"{which} {run} {unit}s; {in_devices} {device}-{unit}s: {parts}."
    prompt, answer = work.lengths(LIKELY)
    ends = f"{work.lengths(FAST)[1]:,.0f} to {work.lengths(SLOW)[1]:,.0f}"
    yield (
        f"Assumed: prompts of {prompt:,.0f} tokens, answers of {answer:,.0f} ({ends}; "
        f"--mean_answer sets it), passes at {LIKELY.arithmetic:.0%} of {work.flops / 1e12:.3g} "
        f"TFLOP/s a {device}, decoding at {LIKELY.bandwidth:.0%} of {work.bytes / 1e12:.3g} TB/s, "
        f"{LIKELY.rest:.0%} for the rest; validation is not counted."
    )
    if not work.on_cpu:
        runs = "; ".join(
            f"{devices} x H20 took {seconds:.0f} s a step, this says {_range(*said)}"
            for devices, seconds, said in published()
        )
        yield f"Of verl's DAPO run of Qwen2.5-Math-7B: {runs}."


def _range(likely: float, low: float, high: float) -> str:
    return f"{_shown(likely)} ({_shown(low)} to {_shown(high)})"


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"
