"""Whether files are whole: what an interrupted download, or a clone without Git LFS, leaves is found before a model
loads. A file's own header, footer or syntax says how long it has to be; nothing of a tensor is read.
"""

from __future__ import annotations

import functools
import json
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from core.errors import InputError
from core.files.file_names import RULE, plain_name

POINTER = b"version https://git-lfs.github.com/spec/"
LARGEST_HEADER = 100_000_000  # bytes, as safetensors itself bounds it
# Of a model's folder, beside its weights and its tokenizer; other files are not read, or say nothing of their length.
CONFIGS = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "preprocessor_config.json", "processor_config.json", "adapter_config.json"),
)
# What is loaded is the first of each group that is there
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
WEIGHTS = tuple(f"{name}{end}" for name in ("model.safetensors", "pytorch_model.bin") for end in ("", ".index.json"))
FIX = "download it again, and compare its size with that at its source"


def damage(path: Path, *, weights: bool = True) -> str | None:
    """Return what is wrong with a file, or with the first such file of a model's folder; None where all are whole.

    A file that does not exist is not looked for, except for the parts that the index of a model names.
    """
    for file in _of_model(path, weights) if path.is_dir() else [path]:
        if file.is_file():
            stat = file.stat()
            what = _damage(file, stat.st_size, stat.st_mtime_ns)
            if what := what or (_parts(file) if file.name.endswith(".index.json") else None):
                return f"{file.name} {what}"
    return None


def _of_model(folder: Path, weights: bool) -> Iterator[Path]:
    """Yield the files of a model's folder that are loaded."""
    yield from (folder / name for name in CONFIGS)
    yield from _first(folder, TOKENIZERS)
    yield from _first(folder, ADAPTERS) if weights else ()
    for file in _first(folder, WEIGHTS) if weights else ():
        yield file
        if file.suffix == ".json":  # model-00001-of-00002.safetensors
            yield from sorted(folder.glob(f"{file.name.partition('.')[0]}-*-of-*"))


def _first(folder: Path, names: Sequence[str]) -> list[Path]:
    return [folder / name for name in names if (folder / name).is_file()][:1]


@functools.cache
def _damage(file: Path, size: int, changed: int) -> str | None:
    """Return what is wrong with one file; ``changed`` is a key of the cache."""
    with open(file, "rb") as stream:
        start = stream.read(512)
    if start.startswith(POINTER):
        stated = start.partition(b"\nsize ")[2].split(b"\n")[0].decode(errors="replace")
        return f"is a Git LFS pointer of {size:,} bytes to a file of {stated}, which was not fetched (git lfs pull)"
    if size == 0:
        return "is empty (0 bytes)"
    check = _CHECKS.get(file.suffix)
    return check(file, size) if check else None


def _safetensors(file: Path, size: int) -> str | None:
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > LARGEST_HEADER:
            return f"is no safetensors file ({size:,} bytes; its first eight are no length of a header)"
        header = stream.read(length)
    if size < 8 + length:
        return f"is cut short: it has {size:,} bytes, and its header alone takes {8 + length:,}"
    try:
        tensors = {name: one for name, one in json.loads(header).items() if name != "__metadata__"}
        needed = 8 + length + max((one["data_offsets"][1] for one in tensors.values()), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        return f"is no safetensors file ({size:,} bytes; its header cannot be read)"
    if size == needed:
        return None
    return f"is {'cut short' if size < needed else 'too long'}: it has {size:,} bytes, and its header names {needed:,}"


def _json(file: Path, size: int) -> str | None:
    try:
        json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        return f"is cut short or no JSON: it has {size:,} bytes ({error})"
    return None


def _parts(index: Path) -> str | None:
    """Return which file of a model in parts is missing; a name that leads elsewhere is not looked for."""
    names = json.loads(index.read_bytes())
    names = names.get("weight_map") if isinstance(names, dict) else None
    if not isinstance(names, dict):
        return "names no files (weight_map)"
    for name in names.values():
        try:
            plain_name(name, index)
        except InputError:
            return f"lists the file name {ascii(name)[:200]}, which {RULE}"
    absent = sorted({name for name in names.values() if not (index.parent / name).is_file()})
    of = len({*names.values()})
    return f"names {of} files, of which {len(absent)} are not there ({', '.join(absent[:3])})" if absent else None


def _zip(file: Path, size: int) -> str | None:
    with open(file, "rb") as stream:
        if stream.read(2) != b"PK":  # of before torch 1.6
            return None
    cut = f"is cut short: it has {size:,} bytes, and lacks the directory at its end"
    return None if zipfile.is_zipfile(file) else cut


def _parquet(file: Path, size: int) -> str | None:
    with open(file, "rb") as stream:
        start = stream.read(4)
        stream.seek(max(0, size - 8))
        end = stream.read()
    if start != b"PAR1":
        return f"is no parquet file: it has {size:,} bytes and does not begin with PAR1"
    if end[-4:] != b"PAR1" or size < 12:
        return f"is cut short: it has {size:,} bytes, and lacks the footer at its end"
    needed = 12 + int.from_bytes(end[:4], "little")
    return f"is cut short: it has {size:,} bytes, and its footer alone takes {needed:,}" if size < needed else None


_CHECKS = {
    ".safetensors": _safetensors,
    ".json": _json,
    ".bin": _zip,
    ".parquet": _parquet,
}
