"""Answers of a model to the questions of ``data.val_files``, into a file that a stopped call goes on with.

A sample's seed follows from ``trainer.seed``, the question's ordinal and the sample's number, as in a validation of a
run. On the hf engine in one process the batch counts too, by rounding: there the questions are answered in fixed
batches, of which an interrupted one is answered anew, so that a continued file is that of an undisturbed call to the
bit. Other engines make the missing answers only.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.config import Config, code_keys, convert, examine, recipes, registry
from core.config.problem import show
from core.data.stream import agent_names, load_val_prompts
from core.errors import InputError
from core.evaluation.answer_file import FORMAT, AnswerFile, answer_line
from core.evaluation.model_source import PATH, TOKENIZER_PATH, ModelSource, of_model, of_run
from core.launch import TRAINER
from core.rewards.grader_pool import to_json
from core.tracking.progress import progress
from core.tracking.run_manifest import data_hashes
from core.types import Prompt

if TYPE_CHECKING:
    from core.ray_trainer import RayPPOTrainer

# Keys that decide an answer beside model, data and prompts, which are compared by content. Recipes' own keys count too.
DECIDING = (
    *("data.max_prompt_length", "data.max_response_length", "data.max_start_length", "data.max_obs_length"),
    *(f"actor_rollout_ref.model.{name}" for name in ("override_config", "custom_chat_template")),
    *(f"actor_rollout_ref.rollout.{name}" for name in ("name", "dtype", "ignore_eos", "engine_kwargs", "agent_loop")),
    *("actor_rollout_ref.rollout.val_kwargs.", "actor_rollout_ref.rollout.multi_turn.", "trainer.seed"),
)
# Sections of which nothing is loaded here: answers are neither scored nor trained on
UNREAD = ("custom_reward_function.", "reward_model.", "algorithm.", "actor_rollout_ref.actor.", "critic.")
ADDRESS = ".url"  # a server may move between two calls


@dataclass(frozen=True)
class GenerateCall:
    """A checked call of ``generate``: nothing is loaded yet."""

    recipe: str
    trainer: str
    config: Config
    source: ModelSource
    out: Path

    def described(self) -> list[str]:
        """Return what the call would do, a line each."""
        part, data = self.config.actor_rollout_ref, self.config.data
        chosen, trainer, step = part.rollout.val_kwargs, self.config.trainer, self.source.described().get("step")
        sampling = f"temperature {chosen.temperature:g}, top_p {chosen.top_p:g}" if chosen.do_sample else "greedy"
        placed = "in this process"
        if trainer.backend == "ray":
            splits = "tensor_model_parallel_size" in registry.ENGINES[part.rollout.name].reads
            each = part.rollout.tensor_model_parallel_size if splits else 1
            placed = (
                f"{trainer.nnodes * (trainer.n_gpus_per_node // each)} of them over Ray, {each} GPUs each if on GPUs"
            )
        absent = [path for path in data.val_files if not Path(path).expanduser().is_file()]
        return [
            f"model: {self.source.path}" + (f", after step {step}" if step is not None else ""),
            f"engine: {part.rollout.name} in {part.rollout.dtype}, {placed}",
            f"questions: {', '.join(data.val_files)}",
            *([f"not there yet: {', '.join(absent)}"] if absent else []),
            f"answers: {chosen.n} a question, at most {data.max_response_length} tokens a turn, {sampling}",
            f"written to: {self.out} and {self.out.with_suffix('.manifest.json')}",
        ]


def request(
    recipe: str, overrides: Sequence[str], out: Path, *, model: str | None, run: str | None, step: int | None
) -> GenerateCall:
    """Compose and check. The settings of a run's checkpoint are those of the run, under what ``overrides`` set.

    Raises InputError with the problems of the configuration, or the first one of model and file.
    """
    if out.suffix != ".jsonl":
        raise InputError(f"--out={out}: must end in .jsonl")
    trainer, hooks = recipes.trainer_of(recipe)
    overridden = examine(recipe, overrides, hooks).given
    named = [name for name, value in (("--model", model), ("--run", run), (PATH, overridden.get(PATH))) if value]
    if len(named) != 1:
        has = f"{' and '.join(named)} name one each" if named else "none is named"
        raise InputError(f"model: {has}; give --model (a folder or hub id) or --run (a run folder or a checkpoint)")
    if step is not None and run is None:
        raise InputError(f"--step={step}: belongs to --run; give a run folder, or leave it out")
    if run is not None and any(text.lstrip("+").startswith("preset=") for text in overrides):
        raise InputError("preset: the settings of --run are the run's own; set single keys, or use --model")
    tokenizer = overridden.get(TOKENIZER_PATH)
    source = of_model(model or overridden[PATH], tokenizer) if run is None else of_run(run, step, recipe, tokenizer)
    composed = examine(recipe, overrides, hooks, source.settings)
    if composed.problems:
        raise InputError(composed.problems)
    if run is not None:
        code_keys.refuse(f"--run={run}", composed.config, recipe, overrides, UNREAD)
    for key, (value, reason) in composed.unused.items():
        print(f"no effect: {key}={show(value, key)}: {reason}", file=sys.stderr)
    return GenerateCall(recipe, trainer or TRAINER, composed.config, source, out)


def generate(asked: GenerateCall) -> bool:
    """Write the answers that the file lacks. Return whether there was anything to do.

    Raises InputError before a model loads for data, settings and files that do not go together.
    """
    from core.learner.models import load_modality, load_tokenizer
    from core.rollout.agent_loop import check_examples, make_agent_loop

    config, model = asked.config, asked.config.actor_rollout_ref.model
    tokenizer = load_tokenizer(model)
    data = config.data
    loop = make_agent_loop(config, tokenizer, agent_names(data, training=False))
    prompts = load_val_prompts(data, tokenizer, load_modality(model, tokenizer), word=loop and loop.worded)
    check_examples(loop, prompts)
    if not prompts:
        raise InputError("data.val_files=[]: there are no questions; give parquet files")
    _check_json(prompts)
    samples = range(config.actor_rollout_ref.rollout.val_kwargs.n)
    file = AnswerFile(asked.out, _manifest(asked, prompts), [(p.ordinal, i) for p in prompts for i in samples])
    try:
        if file.complete:
            if loop is not None:
                loop.close()
            return False
        # Imported once there is work: torch, transformers and the engine
        from core.evaluation.engine_only import answering

        with asked.source.loadable(asked.out.parent) as path:
            loaded = convert.replaced(config, {PATH: path})
            with answering(loaded, asked.trainer, tokenizer, loop, prompts) as run:
                asyncio.run(answer(run, prompts, file, batch_of(config)))
        return True
    finally:
        file.close()


def batch_of(config: Config) -> int | None:
    """Return how many questions are answered together where that decides rounding; None where it is out of our hands.

    They are as many as the engine decodes at once, so that a batch costs no more than the wait for its longest answer.
    """
    rollout = config.actor_rollout_ref.rollout
    if config.trainer.backend != "local" or rollout.name != "hf":
        return None
    return max(1, rollout.max_num_seqs // rollout.val_kwargs.n)


async def answer(run: RayPPOTrainer, prompts: Sequence[Prompt], file: AnswerFile, together: int | None) -> None:
    """Answer what the file lacks, ``together`` questions at a time, and append each answer as it ends."""
    samples = range(run.config.actor_rollout_ref.rollout.val_kwargs.n)

    async def one(prompt: Prompt, sample: int) -> None:
        trajectory = await run.generate(prompt, sample, run.val_sampling)
        text = run.tokenizer.decode(trajectory.prompt_ids.tolist())
        file.append((prompt.ordinal, sample), answer_line(prompt, sample, trajectory, text))
        answered()

    missing = sum((p.ordinal, i) not in file for p in prompts for i in samples)
    with progress("answers", missing, "answer") as answered:
        for batch in _batches(prompts, together or len(prompts)):
            keys = {(prompt.ordinal, sample) for prompt in batch for sample in samples}
            if all(key in file for key in keys):
                continue
            if together is not None:
                file.forget(keys)
            jobs = [one(p, i) for p in batch for i in samples if (p.ordinal, i) not in file]
            await asyncio.gather(*jobs)


def _batches(prompts: Sequence[Prompt], size: int) -> Iterator[Sequence[Prompt]]:
    return (prompts[start : start + size] for start in range(0, len(prompts), size))


def _manifest(asked: GenerateCall, prompts: Sequence[Prompt]) -> dict[str, Any]:
    config = asked.config
    return {
        "kind": "answers",
        "format": FORMAT,
        "recipe": asked.recipe,
        "model": asked.source.described(),
        "questions": len(prompts),
        "samples": config.actor_rollout_ref.rollout.val_kwargs.n,
        "data": (data := data_hashes(config.data.val_files)),
        "settings": {
            "model": asked.source.identity(),
            "data": [one["sha256"] for one in data],
            "prompts": digest_of(prompts),
            **deciding(config),
            "questions answered together": batch_of(config),
        },
        "config": convert.as_json(config),
    }


def deciding(config: Config) -> dict[str, Any]:
    """Return flat key -> value, of the keys that decide an answer: two calls with other values make other answers."""
    core_keys = convert.all_keys(Config)
    return {
        key: value
        for key, value in convert.as_json(config).items()
        if key.startswith(DECIDING) or (key not in core_keys and not key.endswith(ADDRESS))
    }


def digest_of(prompts: Sequence[Prompt]) -> str:
    """Return a hash of the questions as the model reads them: tokenizer, template and cutting are in their ids."""
    digest = hashlib.sha256(json.dumps([(p.ordinal, p.uid, p.token_ids) for p in prompts]).encode())
    for data in (data for prompt in prompts if prompt.media for data in prompt.media.files()):
        digest.update(data)
    return digest.hexdigest()


def _check_json(prompts: Sequence[Prompt]) -> None:
    """Check that ground truths can be kept in lines, where ``score`` finds them."""
    for prompt in prompts:
        try:
            to_json([prompt.ground_truth, prompt.extra_info])
        except (TypeError, ValueError) as error:
            raise InputError(
                f"data.val_files: uid {prompt.uid}: {error}; convert its ground_truth and extra_info"
            ) from error
