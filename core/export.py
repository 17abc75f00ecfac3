"""``python -m core.export RUN_OR_CHECKPOINT OUT``: a checkpoint's policy as a Hugging Face folder.

It writes a folder that transformers and vLLM load: of the newest complete checkpoint of a run folder, or of the
``global_step_N`` that is named.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from core.checkpoint.store import Checkpoint, CheckpointStore, checkpoint_at
from core.errors import InputError
from core.files import written_here
from core.learner.saving import ADAPTERS, OPTIMIZER, export_hf

TRAINING_STATE = re.compile(rf"actor/{OPTIMIZER}[./]")  # names of files that resume a run and are not exported


def find_checkpoint(source: str | Path, key: str = "source") -> Checkpoint:
    """Return the checkpoint at a path or URL, or the newest complete one of a run folder; changes nothing there.

    Raises InputError where there is none, or all are damaged.
    """
    newest = CheckpointStore(Path(source).expanduser()).latest()
    return newest or checkpoint_at(source, key)


def export(
    source: str | Path, out: Path, *, dtype: str | None = None, base: str | None = None, trust_remote_code: bool = False
) -> Checkpoint:
    """Write the policy of a checkpoint to the new folder ``out``.

    Args:
        dtype: a torch dtype by name, such as ``bfloat16``; None leaves the weights as they are (float32 masters).
        base: of adapters, which are merged into it: where it is now, if not where the run found it.

    Raises:
        InputError: no checkpoint, a damaged one, another base, or ``out`` exists and is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and is not an empty folder: give the export a new one")
    found = find_checkpoint(source)
    unfinished = out.with_name(f".tmp-{out.name}")  # renamed at the end: a folder of the final name is complete
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        if dtype is None and not (found.folder / "actor" / ADAPTERS).exists():
            for name in found.files:
                if name.startswith("actor/") and not TRAINING_STATE.match(name):
                    target = unfinished / name.removeprefix("actor/")
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(found.folder / name, target)
        else:
            _convert(found, unfinished, dtype, base, trust_remote_code)
        unfinished.replace(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return found


def _convert(found: Checkpoint, out: Path, dtype: str | None, base: str | None, trust_remote_code: bool) -> None:
    """Write the policy in another number format, adapters merged."""
    import torch
    from transformers import AutoConfig, AutoTokenizer

    from core.learner.lora import merge_saved
    from core.learner.models import auto_class, quiet
    from core.vision.pictures import modality_of

    actor = found.folder / "actor"
    wanted = getattr(torch, dtype or "float32", None)
    if not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
        raise InputError(f"--dtype={dtype}: not a floating-point type of torch, such as bfloat16 or float32")
    with quiet():
        if (actor / ADAPTERS).exists():
            saved = found.provenance.models["actor"].base if found.provenance else None
            model = merge_saved(actor, wanted, saved, path=base, trust_remote_code=trust_remote_code)
        else:
            auto = auto_class(AutoConfig.from_pretrained(actor, trust_remote_code=trust_remote_code))
            model = auto.from_pretrained(actor, dtype=wanted, trust_remote_code=trust_remote_code)
        modality_of(model.config).load_processor(model, str(actor))
        tokenizer = AutoTokenizer.from_pretrained(actor, trust_remote_code=trust_remote_code)
    export_hf(model, tokenizer, out)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m core.export",
        description="Write a checkpoint's policy as a model.",
    )
    add = parser.add_argument
    add("source", help="The run folder (its newest checkpoint is taken), or a global_step_N, or the URL of one.")
    add("out", type=written_here, help="The folder to write, which must not exist or be empty.")
    add("--dtype", help="The number format of the weights, as in bfloat16 (default: as trained).")
    add("--base", help="The base model of a LoRA run (default: where the run found it).")
    add("--trust-remote-code", action="store_true", help="Run Python code that comes with the model.")
    args = parser.parse_args(arguments)
    try:
        found = export(**vars(args))
    except (InputError, OSError) as error:
        print(f"core.export: {error}", file=sys.stderr)
        return 2
    print(f"{args.out}: the policy after step {found.step} of {found.folder.parent}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
