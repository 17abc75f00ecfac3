"""The museum's bugs in TRL's GRPOTrainer, on the GRPO lab's base and task; what TRL reports of them by itself.

    bash tests/crosscheck/make_env.sh && python -m recipes.lab.prepare       PYTHON: that of its environment
    PYTHON tests/museum/trl_side.py --out outputs/trl.json
    python -m tests.museum.report --trl outputs/trl.json

It runs in TRL's own environment and imports nothing of this repository. Each bug that has a counterpart is planted by a
mutation of a few lines, three generations of 16 x 16 answers with two updates each are run, and everything is kept that
TRL logs and warns. What was measured is not measured again, so a run that was stopped goes on.

The rule, written before any bug was run. TRL reports a bug where the run
  1. ends with an exception; or
  2. warns or logs a warning that no clean run has, numbers left out; or
  3. logs a metric that no clean run has at that step: none, not finite, or outside of the range of 12 clean runs
     (other seeds), widened by its own width on both sides. Times are no metrics. TRL raises no alarm for it: a reader
     would see it who has the 12 clean runs beside it, which is more than the runs of this repository are given.
The same rule is applied to 6 more clean runs, which is how often it errs.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import json
import logging
import math
import re
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
import trl
import trl.trainer.grpo_trainer as grpo
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

UPDATES, PROMPTS, ANSWERS = 6, 16, 16
CLEAN, OTHERS = range(1, 13), range(13, 19)  # seeds: of the ranges, and of the false alarms; bugs have seed 0
TIMES = re.compile("time|runtime|per_second|total_flos")
MUTATIONS = {}  # bug -> (owner, name, mutation)
NOT_APPLICABLE = {
    "stale_prefix_cache": "`transformers.generate` keeps no keys and values between calls",
    "engine_raw_log_probs": "without vLLM no log-probs are taken from the engine",
    "tool_tokens_in_gae": "no GAE, advantages are of whole answers",
    "packed_sequences_mixed": "sequences are padded, never packed",
    "reward_after_the_end": "a reward belongs to an answer, not to a token",
    "tool_text_scored": "by design reward functions are given what tools wrote",
}


def replaces(owner, name):
    """Register a mutation: a function of what it replaces (first) and of that one's arguments."""

    def register(function):
        MUTATIONS[function.__name__] = (owner, name, function)
        return function

    return register


@contextmanager
def planted(bug):
    owner, name, function = MUTATIONS[bug]
    original = getattr(owner, name)
    setattr(owner, name, lambda *given, **named: function(original, *given, **named))
    try:
        yield
    finally:
        setattr(owner, name, original)


# -- sampling: without vLLM TRL samples with the learner's own module, so a copy of it stands for an engine -----------


def copied(change):
    @contextmanager
    def mutated(original, model, accelerator, **named):
        with original(model, accelerator, **named) as module:
            first = vars(accelerator).setdefault("first_model", copy.deepcopy(module))
            engine = copy.deepcopy(module)
            del engine.forward  # TRL's, which is bound to the module that was copied
            for (name, weight), old in zip(engine.named_parameters(), first.parameters(), strict=True):
                weight.data.copy_(change(name, weight.data, old.data))
            yield engine

    return mutated


@replaces(grpo, "unwrap_model_for_generation")
def weights_never_arrive(*given, **named):
    return copied(lambda name, new, old: old)(*given, **named)


@replaces(grpo, "unwrap_model_for_generation")
def engine_rounds_weights(*given, **named):
    return copied(lambda name, new, old: new.bfloat16().float())(*given, **named)


@replaces(grpo, "unwrap_model_for_generation")
def one_weight_missing(*given, **named):
    return copied(lambda name, new, old: old if "layers.0.mlp.down_proj" in name else new)(*given, **named)


@replaces(GRPOTrainer, "_generate_single_turn")
def tokens_encoded_again(original, self, *given, **named):
    ids, logprobs = original(self, *given, **named)
    texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
    return [self._tokenizer.encode(text, add_special_tokens=False) for text in texts], logprobs


@replaces(GRPOTrainer, "_tokenize_prompts")
def prompt_begins_twice(original, self, prompts):
    ids, *others = original(self, prompts)
    first = self._tokenizer.all_special_ids[0]
    return [[first, first, *one] for one in ids], *others


# -- masks, rewards, advantages -----------------------------------------------------------------------------------


def answers(function):
    """Return a mutation of the dictionary that a generation ends in."""

    @functools.wraps(function)
    def mutated(original, self, inputs):
        output = original(self, inputs)
        return {**output, **function(self, output)}

    return mutated


@replaces(GRPOTrainer, "_generate_and_score_completions")
@answers
def eos_not_trained(self, output):
    mask = output["completion_mask"] * ~torch.isin(output["completion_ids"], torch.tensor(self.eos_token_ids))
    return {"completion_mask": mask, "num_items_in_batch": mask.sum()}


@replaces(GRPOTrainer, "_generate_and_score_completions")
@answers
def masked_tokens_in_denominator(self, output):
    written = (output["completion_ids"] != self._tokenizer.pad_token_id) | (output["completion_mask"] > 0)
    return {"num_items_in_batch": written.sum()}


@replaces(GRPOTrainer, "_generate_and_score_completions")
@answers
def tool_tokens_trained(self, output):
    return {"tool_mask": torch.ones_like(output["tool_mask"])}


@replaces(GRPOTrainer, "_generate_and_score_completions")
@answers
def advantages_over_batch(self, output):
    rewards = torch.tensor(self._logs["rewards"][score.__name__])
    return {"advantages": (rewards - rewards.mean()) / (rewards.std() + 1e-4)}


@replaces(GRPOTrainer, "_generate_and_score_completions")
def groups_mixed(original, self, inputs):
    many = len(inputs) // self.num_generations
    return original(self, [inputs[row % many * self.num_generations + row // many] for row in range(len(inputs))])


@replaces(GRPOTrainer, "_calculate_rewards")
def rewards_of_others(original, self, inputs, prompts, completions, ids):
    order = torch.tensor([len(one) for one in ids]).argsort(stable=True)
    return original(self, inputs, prompts, completions, ids)[order]


@replaces(GRPOTrainer, "_calculate_rewards")
def failed_grader_is_zero(original, self, inputs, prompts, completions, ids):
    try:
        raise RuntimeError("the grader's library is not installed")
    except RuntimeError:
        return torch.zeros(len(ids), 1)


# -- log-probs and loss ---------------------------------------------------------------------------------------------


@replaces(grpo, "add_fused_lm_head")
def learner_without_temperature(original, model, temperature=1.0, **named):
    original(model, temperature=1.0, **named)


@replaces(GRPOTrainer, "_get_per_token_logps_and_entropies")
def log_probs_shifted(original, self, *given, **named):
    log_probs, *others = original(self, *given, **named)
    return log_probs.roll(1, -1), *others


def losses(function):
    """Return a mutation of what the loss reads."""

    @functools.wraps(function)
    def mutated(original, self, model, inputs):
        return original(self, model, {**inputs, **function(self, inputs)})

    return mutated


@replaces(GRPOTrainer, "_compute_loss")
@losses
def loss_by_micro_batch(self, inputs):
    return {"num_items_in_batch": inputs["completion_mask"].sum() * self.args.steps_per_generation}


@replaces(GRPOTrainer, "_compute_loss")
def loss_summed_over_micro_batches(original, self, model, inputs):
    return original(self, model, inputs) * self.current_gradient_accumulation_steps


@replaces(GRPOTrainer, "_compute_loss")
@losses
def ratio_always_one(self, inputs):
    return {"old_per_token_logps": None}


@replaces(GRPOTrainer, "_compute_loss")
def kl_sign(original, self, model, inputs):
    self.beta = -abs(self.beta)
    return original(self, model, inputs)


@replaces(GRPOTrainer, "_generate_and_score_completions")
def reference_is_policy(original, self, inputs):
    self.ref_model = self.accelerator.unwrap_model(self.model)
    return original(self, inputs)


# -- optimizer, schedule, data ----------------------------------------------------------------------------------------


@replaces(GRPOTrainer, "create_optimizer")
def optimizer_of_other_weights(original, self, *given):
    optimizer = original(self, *given)
    for group in optimizer.param_groups:
        group["params"] = [parameter.detach().clone().requires_grad_() for parameter in group["params"]]
    return optimizer


@replaces(GRPOTrainer, "create_optimizer")
def gradients_kept(original, self, *given):
    optimizer = original(self, *given)
    optimizer.zero_grad = self.model.zero_grad = lambda **_: None
    return optimizer


@replaces(GRPOTrainer, "create_scheduler")
def learning_rate_zero(original, self, *given, **named):
    scheduler = original(self, *given, **named)
    scheduler.lr_lambdas = [lambda step: 0.0 for _ in scheduler.lr_lambdas]
    for group in scheduler.optimizer.param_groups:
        group["lr"] = 0.0
    return scheduler


@replaces(GRPOTrainer, "training_step")
def dropout_in_training(original, self, model, *given):
    for part in self.accelerator.unwrap_model(model).modules():
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = 0.1
    return original(self, model, *given)


@replaces(GRPOTrainer, "train")
def resume_repeats_data(original, self, resume_from_checkpoint=None):
    self.args.ignore_data_skip = True
    return original(self, resume_from_checkpoint=resume_from_checkpoint)


# -- runs -------------------------------------------------------------------------------------------------------------


def score(completions, gold, **_):
    """Return 1 where the letter after the first # is right, as the lab's scorer does."""
    return [float(text.partition("#")[2][:1] == letter) for text, letter in zip(completions, gold, strict=True)]


def with_a_tool(prompts, trainer):
    """Begin every answer with text that the policy did not write, and mask it out: a rollout function of TRL's."""
    ids, *_ = trainer._tokenize_prompts(prompts)
    tool = trainer._tokenizer.encode("tool")
    found, _ = trainer._generate_single_turn([[*one, *tool] for one in ids], None, {}, trainer.num_generations)
    return {
        "prompt_ids": ids,
        "completion_ids": [[*tool, *one] for one in found],
        "logprobs": None,
        "env_mask": [[0] * len(tool) + [1] * len(one) for one in found],
    }


class Listener(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = set()

    def emit(self, record):
        self.lines.add(numberless(record.getMessage()))


def numberless(text):
    return re.sub(r"/[^ ]*|[0-9.e+-]*[0-9]", "#", text)[:300]


def trainer_of(folder, seed, updates, tools):
    config = GRPOConfig(
        output_dir=folder,
        **{"seed": seed, "use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "logging_steps": 1},
        **{"per_device_train_batch_size": 64, "gradient_accumulation_steps": PROMPTS * ANSWERS // 2 // 64},
        **{"steps_per_generation": PROMPTS * ANSWERS // 64, "num_generations": ANSWERS, "max_steps": updates},
        **{"learning_rate": 1e-4, "lr_scheduler_type": "constant", "gradient_checkpointing": False},
        **{"temperature": 0.8, "beta": 0.04, "max_completion_length": 8, "mask_truncated_completions": True},
        **{
            "save_strategy": "steps" if updates < UPDATES else "no",
            "save_steps": UPDATES - 2,
            "logging_nan_inf_filter": False,
        },
    )
    base = Path("outputs/lab/base/current")
    rows = load_dataset("parquet", data_files="outputs/lab/data/train.parquet", split="train").select(range(2048))
    data = rows.map(
        lambda row: {"prompt": row["prompt"], "gold": row["reward_model"]["ground_truth"]},
        remove_columns=rows.column_names,
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        reward_funcs=score,
        args=config,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(base),
        rollout_func=with_a_tool if tools else None,
    )


def run(seed, bug=None, tools=False):
    """Return what a run of three generations logged and warned, and the exception that ended it."""
    listener, trainer, ended = Listener(), None, None
    loggers = [logging.getLogger(name) for name in ("", "trl", "transformers", "accelerate", "datasets")]
    for logger in loggers:
        logger.addHandler(listener)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with planted(bug) if bug else contextlib.nullcontext():
            try:
                if bug == "resume_repeats_data":
                    trainer_of(folder, seed, UPDATES - 2, tools).train()
                trainer = trainer_of(folder, seed, UPDATES, tools)
                trainer.train(resume_from_checkpoint=bug == "resume_repeats_data" or None)
            except Exception as error:
                ended = f"{type(error).__name__}: {error}"[:300]
    for logger in loggers:
        logger.removeHandler(listener)
    history = trainer.state.log_history if trainer else []
    metrics = [{k: v for k, v in row.items() if not TIMES.search(k)} for row in history if "loss" in row]
    lines = sorted(listener.lines | {numberless(str(one.message)) for one in warned})
    return {"ended": ended, "warned": lines, "metrics": metrics}


def outside(found, clean):
    """Return what the rule finds in a run: the exception, lines of warnings, and metrics with their clean ranges."""
    told = [f"exception: {found['ended']}"] if found["ended"] else []
    known = {line for one in clean for line in one["warned"]}
    told += [f"warning: {line}" for line in found["warned"] if line not in known]
    for at, row in enumerate(found["metrics"]):
        for name, value in row.items():
            seen = [one["metrics"][at].get(name) for one in clean]
            numbers = [one for one in seen if one is not None and math.isfinite(one)]
            low, high = min(numbers, default=0.0), max(numbers, default=0.0)
            room = high - low + 1e-9 * abs(high)
            sound = value in seen or (value is not None and numbers and low - room <= value <= high + room)
            if not sound:
                shown = "none" if value is None else f"{value:.4g}"
                told.append(f"metric: {name} is {shown} at update {at + 1}, {low:.4g} to {high:.4g} in clean runs")
    return told


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file: what is in it is not measured again")
    parser.add_argument("--only", nargs="*", choices=sorted(MUTATIONS), help="bugs to measure again")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    kept = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    jobs = [(bug, 0, bug, bug.startswith("tool_")) for bug in MUTATIONS]
    jobs += [(f"{lab} {seed}", seed, None, lab == "tools") for seed in (*CLEAN, *OTHERS) for lab in ("hops", "tools")]
    for name, seed, bug, tools in jobs:
        if name in kept.setdefault("runs", {}) and bug not in (asked.only or ()):
            continue
        kept["runs"][name] = run(seed, bug, tools)
        asked.out.write_text(json.dumps(kept))
        print(name, kept["runs"][name]["ended"], kept["runs"][name]["metrics"][-1:], flush=True)
    judge(kept)
    asked.out.write_text(json.dumps(kept))
    for bug, told in kept["bugs"].items():
        print(bug, len(told), told[:2])
    print("false alarms", {name: told[:2] for name, told in kept["others"].items() if told})


def judge(kept):
    """Apply the rule to every run whose clean runs are there; the others were not run."""
    runs, kept["bugs"], kept["others"] = kept["runs"], {}, {}
    for lab in ("hops", "tools"):
        if all(f"{lab} {seed}" in runs for seed in CLEAN):
            clean = [runs[f"{lab} {seed}"] for seed in CLEAN]
            bugs = [bug for bug in MUTATIONS if bug in runs and bug.startswith("tool_") == (lab == "tools")]
            kept["bugs"] |= {bug: outside(runs[bug], clean) for bug in bugs}
            others = [f"{lab} {seed}" for seed in OTHERS if f"{lab} {seed}" in runs]
            kept["others"] |= {name: outside(runs[name], clean) for name in others}
    kept |= {"not_applicable": NOT_APPLICABLE, "version": trl.__version__, "clean": len(CLEAN)}


if __name__ == "__main__":
    main()
