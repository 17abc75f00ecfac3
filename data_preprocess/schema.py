"""Rows of the schema of ``core/data/parquet.py``, written so that a reader accepts them.

Checking a finished file is ``data_preprocess.check``; reading one for training is core's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.data.parquet import ExampleFile
from core.errors import InputError, Problems
from core.files import file_sha256, replacing


@dataclass(frozen=True)
class Written:
    """A parquet file that was written, with its number of rows."""

    path: Path
    rows: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.path}: {self.rows} rows, sha256 {self.sha256}"


def make_row(
    data_source: str,
    prompt: str | Sequence[Mapping[str, Any]],
    ground_truth: Any,
    ability: str,
    **extra_info: Any,
) -> dict[str, Any]:
    """Return a row that a rule grades.

    ``extra_info`` should hold ``split`` and ``index``, which name the question.
    """
    return {
        "data_source": data_source,
        "prompt": prompt if isinstance(prompt, str) else [dict(message) for message in prompt],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": extra_info,
    }


def write_rows(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> Written:
    """Write the rows as one parquet file, all or nothing.

    The file is written under another name, read back through the training reader, and renamed when
    that finds no problem: what is at ``path`` is always complete and valid. Raises InputError,
    naming ``path``.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(path).expanduser()
    if not rows:
        raise InputError([f"{path}: there are no rows to write; look at where they come from"])
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        table = pa.Table.from_pylist([dict(row) for row in rows], schema=_schema(rows))
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise InputError(
            f"{path}: the rows do not fit into one schema ({error}); a column holds one type, "
            "reward_model.ground_truth too"
        ) from error
    with replacing(path) as partial:
        pq.write_table(table, partial)
        _verify(partial, path)
    return Written(path, len(rows), file_sha256(path))


def _verify(part: Path, path: Path) -> None:
    problems = Problems()
    try:
        for _ in ExampleFile(part).examples(problems):
            pass
        problems.raise_if_any()
    except InputError as error:
        raise InputError([line.replace(str(part), str(path)) for line in error.problems]) from None


def _schema(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return the columns of all rows, with their types.

    A column that is null throughout becomes text, so that files of the same data set have the same
    types.
    """
    import pyarrow as pa

    names = list(dict.fromkeys(name for row in rows for name in row))
    arrays = {name: pa.array([row.get(name) for row in rows]) for name in names}
    return pa.schema([(name, _typed(array.type)) for name, array in arrays.items()])


def _typed(kind: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct(
            [(kind.field(i).name, _typed(kind.field(i).type)) for i in range(kind.num_fields)]
        )
    if pa.types.is_list(kind):
        return pa.list_(_typed(kind.value_type))
    return kind
