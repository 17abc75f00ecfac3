"""Write a checkpoint's policy as a Hugging Face folder.

python -m core.export RUN_OR_CHECKPOINT OUT
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from core.checkpoint.provenance import MODELS
from core.checkpoint.store import Checkpoint, CheckpointStore, checkpoint_at
from core.errors import InputError
from core.files import written_here
from core.learner.saving import ADAPTERS, OPTIMIZER, export_hf


def find_checkpoint(source: str | Path, key: str = "source") -> Checkpoint:
    """Return the checkpoint at a path or URL, or the newest complete one of a run folder.

    Raises InputError.
    """
    return CheckpointStore(Path(source).expanduser()).latest() or checkpoint_at(source, key)


def export(source: str | Path, out: Path, base: str | None = None) -> Checkpoint:
    """Write the policy of a checkpoint to the new folder ``out``.

    Adapters are merged into ``base``, by default the base model where the run found it. Raises
    InputError.
    """
    if out.exists():
        raise InputError(f"{out} exists: give the export a new folder")
    checkpoint = find_checkpoint(source)
    actor = checkpoint.folder / "actor"
    if not (actor / ADAPTERS).exists():
        shutil.copytree(actor, out, ignore=shutil.ignore_patterns(OPTIMIZER))
        return checkpoint
    from core.learner.lora import merge_saved
    from core.learner.models import quiet, read_tokenizer
    from core.vision.pictures import modality_of

    provenance = checkpoint.provenance
    base_hashes = provenance.contents.get(MODELS["actor"]) if provenance else None
    with quiet():
        model = merge_saved(actor, base_hashes and base_hashes[0], base)
    modality_of(model.config).load_processor(model, str(actor))
    export_hf(model, read_tokenizer(str(actor)), out)
    return checkpoint


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m core.export", description="Write a checkpoint's policy as a model."
    )
    parser.add_argument(
        "source", help="The run folder (its newest checkpoint), a global_step_N, or the URL of one."
    )
    parser.add_argument("out", type=written_here, help="The folder to write, which is a new one.")
    parser.add_argument(
        "--base", help="The base model of a LoRA run (default: where the run found it)."
    )
    args = parser.parse_args(arguments)
    try:
        checkpoint = export(**vars(args))
    except (InputError, OSError) as error:
        print(f"core.export: {error}", file=sys.stderr)
        return 2
    run_folder = checkpoint.folder.parent
    print(f"{args.out}: the policy after step {checkpoint.step} of {run_folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
