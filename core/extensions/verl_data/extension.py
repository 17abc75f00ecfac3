"""What people wrote for verl that reads whole batches or files: reward managers and data set classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from core.config.extensions import Extension
from core.config.rulebook import Broken, RuleBook, View
from core.config.section import Section

if TYPE_CHECKING:
    from core.config.schema import Config

HERE = "core.extensions.verl_data"


class CustomClsConfig(Section):
    path: str | None = None  # file or module of a data set class for verl, which makes the examples of all files
    name: str | None = None  # the class in that file


class DataClassKeys(Section):
    custom_cls: CustomClsConfig = CustomClsConfig()


rules = RuleBook()


@rules.problem
def a_data_set_class(c: View) -> Broken:
    given, other = c.data.custom_cls, {"path": "name", "name": "path"}
    for key, needed in other.items():
        if getattr(given, key) and not getattr(given, needed):
            yield f"data.custom_cls.{key}", f"needs data.custom_cls.{needed} beside it; name the class and its file"


def _files(config: Config) -> Iterator[tuple[str, str]]:
    path = (config.data.custom_cls.path or "").removeprefix("file://").removeprefix("pkg://")
    if path.endswith(".py"):
        yield "data.custom_cls.path", path


EXTENSION = Extension(
    name="verl_data",
    keys={"data": DataClassKeys},
    rules=rules,
    files=_files,
    functions={
        "foreign_manager": f"{HERE}.reward_managers:adapt",
        "converted_data": f"{HERE}.data_class:converted_data",
    },
)
