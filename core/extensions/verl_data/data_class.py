"""A data set class that was written for verl (``data.custom_cls``): its rows become a parquet file of the one schema.

The class is made with one file at a time, at start; what it returns is written once, under the hash of the file, the
class and the options, and read like any other data. So an example is a function of its ordinal, as it has to be, and a
resumed run reads what the run began with.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.config.frozen import thaw
from core.config.locations import local_path
from core.config.paths import run_folder
from core.config.plugins import load_object
from core.data.parquet import sha256_of
from core.errors import InputError
from core.rewards.custom_reward import users_code, without_scheme

if TYPE_CHECKING:
    from core.config.schema import Config
    from core.config.sections.data import DataConfig

KEY = "data.custom_cls"
CHAT = "raw_prompt"  # what a row of the class holds the messages in


class RLHFDataset:
    """The base class of data set classes that were written for verl: a parquet file's rows with their messages."""

    def __init__(
        self, data_files: Any, tokenizer: Any, config: Any, processor: Any = None, max_samples: int = -1, **kwargs: Any
    ):
        self.data_files = [data_files] if isinstance(data_files, str) else list(data_files)
        self.original_data_files = list(self.data_files)
        self.tokenizer, self.config, self.processor, self.max_samples = tokenizer, config, processor, max_samples
        self.prompt_key, self.image_key = config.get("prompt_key", "prompt"), config.get("image_key", "images")
        self.video_key = config.get("video_key", "videos")
        self.max_prompt_length = config.get("max_prompt_length", 1024)
        self.truncation = config.get("truncation", "error")
        self.filter_overlong_prompts = config.get("filter_overlong_prompts", False)
        self.apply_chat_template_kwargs = config.get("apply_chat_template_kwargs", {})
        self.num_workers = 1
        self._download()
        self._read_files_and_tokenize()

    def _download(self, use_origin_parquet: bool = False) -> None:
        """Do nothing: the files are on this machine."""

    def _read_files_and_tokenize(self) -> None:
        import datasets
        import pyarrow.parquet as pq

        parts = [datasets.Dataset(pq.read_table(path)) for path in self.data_files]
        self.dataframe = self.maybe_filter_out_long_prompts(datasets.concatenate_datasets(parts))

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """Return all rows: ``data.filter_overlong_prompts`` leaves out what is too long, afterwards."""
        return dataframe

    def _build_messages(self, example: dict[str, Any]) -> list[dict[str, Any]]:
        return example.pop(self.prompt_key)

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = dict(self.dataframe[item])
        row[CHAT] = self._build_messages(row)
        return row


def converted_data(config: Config, tokenizer: Any) -> DataConfig:
    """Return the section ``data`` with files that hold what the class makes of each. Raises InputError."""
    data = config.data
    path, name = without_scheme(data.custom_cls.path), data.custom_cls.name
    with users_code(f"{KEY}.path={path}", "importing it"):
        kind = load_object(f"{path}:{name}", f"{KEY}.path")
    folder = run_folder(config) / "custom_cls"

    def convert(file: str) -> str:
        return _converted(kind, path, str(file), data, tokenizer, folder)

    stages = data.curriculum and tuple(
        {**thaw(stage), "files": [convert(file) for file in _listed(stage.get("files"))]} for stage in data.curriculum
    )
    train = data.train_files if stages else tuple(map(convert, data.train_files))
    return data.replace(train_files=train, val_files=tuple(map(convert, data.val_files)), curriculum=stages)


def _listed(files: Any) -> Sequence[str]:
    return (files,) if isinstance(files, str) else files or ()


def _converted(kind: type, code: str, file: str, data: DataConfig, tokenizer: Any, folder: Path) -> str:
    """Return the parquet file with what the class makes of a file, written unless it is there."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from omegaconf import OmegaConf

    options, here = thaw(data.model_dump()), Path(local_path(file, "data")).expanduser()
    identity = [_content(here), _content(Path(code)), kind.__qualname__, options]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:12]
    target = folder / f"{Path(file).stem}-{digest}.parquet"
    if target.is_file():
        return str(target)
    with users_code(f"{KEY}={code}:{kind.__name__}", f"reading {file} with it"):
        dataset = kind(data_files=[str(here)], tokenizer=tokenizer, config=OmegaConf.create(options), processor=None)
        rows = list(_rows((dataset[number] for number in range(len(dataset))), kind, data))
        table = pa.Table.from_pylist(rows)
    folder.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}.partial")
    pq.write_table(table, partial)
    partial.replace(target)
    print(f"{KEY}: {kind.__name__} made {len(rows)} rows of {file}: {target}", flush=True)
    return str(target)


def _content(path: Path) -> Any:
    """Return what tells a file, or the files of a folder, from another one; of a module its name."""
    path = path.expanduser()
    if path.is_dir():
        return [[str(one), one.stat().st_size, one.stat().st_mtime_ns] for one in sorted(path.rglob("*"))]
    return sha256_of(path) if path.is_file() else str(path)


def _rows(rows: Iterable[Mapping[str, Any]], kind: type, data: DataConfig) -> Iterator[dict[str, Any]]:
    """Yield rows of the schema. Raises InputError for one without messages."""
    image_key = getattr(data, "image_key", "images")
    columns = (data.reward_fn_key, "reward_model", "extra_info", image_key, "agent_name")
    for number, row in enumerate(rows):
        chat = row.get(CHAT, row.get(data.prompt_key))
        if chat is None:
            raise InputError(
                f"{KEY}.name={kind.__name__}: its row {number} has no {CHAT!r}: the class must return the messages, as "
                "RLHFDataset's __getitem__ does; tokens and tensors are made here"
            )
        values = {name: row[name] for name in columns if row.get(name) is not None}
        facts = {name: row[name] for name in ("tools_kwargs", "interaction_kwargs") if row.get(name)}
        if facts:
            values["extra_info"] = {**(values.get("extra_info") or {}), **facts}
        if image_key in values:
            values[image_key] = [_picture(one) for one in values[image_key]]
        yield {**values, data.prompt_key: [_message(one) for one in chat] if not isinstance(chat, str) else chat}


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose content is text, with a placeholder for each picture."""
    content = message["content"]
    if isinstance(content, list | tuple):
        content = "".join(one.get("text") or f"<{one['type']}>" for one in content)
    return {**message, "content": content}


def _picture(value: Any) -> Any:
    """Return a picture as its file's bytes, where a class made a PIL picture of it."""
    if not hasattr(value, "save"):
        return value
    buffer = BytesIO()
    value.save(buffer, format="PNG")
    return {"bytes": buffer.getvalue(), "path": None}
