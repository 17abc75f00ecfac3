"""The command that publishes a model: ``python -m results.model_card RUN OUT [--push org/name]``.

It exports a checkpoint's policy as ``core.export`` does (safetensors, tokenizer), writes the model card beside the
weights, and uploads the folder to a hub if one is named. The card needs the run's metrics, their intervals and the
removal of machine paths, which are in ``results``; core imports nothing from here, so this is a command of its own and
no option of ``core.export``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from core.errors import InputError
from core.export import export
from core.files import written_here
from results.reporting.model_card import model_card
from results.reporting.run_reader import load_run, run_copy

CARD = "README.md"
WEIGHTS = ".safetensors"


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
        raise InputError(f"{folder}: {rule}; export it anew, as {WEIGHTS}")
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
