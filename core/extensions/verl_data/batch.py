"""As much of verl's ``DataProto`` as reward managers read of it: a batch of finished answers, a row an answer.

``batch`` has tensors (``prompts`` padded on the left, ``responses`` on the right, ``attention_mask`` and
``position_ids`` over both, ``response_mask``), ``non_tensor_batch`` arrays of objects, a column a key, and
``meta_info`` what holds for all. A row, ``data[i]``, has the same without the first axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


class Tensors(dict):
    """Tensors by name; an attribute is its key."""

    @property
    def batch_size(self) -> torch.Size:
        return next(iter(self.values())).shape[:1]


@dataclass
class DataProtoItem:
    """One answer."""

    batch: dict[str, torch.Tensor]
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataProto:
    """A batch of answers."""

    batch: Tensors
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(
        cls, tensors: Mapping[str, torch.Tensor], non_tensors: Any = None, meta_info: Any = None
    ) -> DataProto:
        return cls(Tensors(tensors), dict(non_tensors or {}), dict(meta_info or {}))

    def __len__(self) -> int:
        return len(next(iter((self.batch or self.non_tensor_batch).values())))

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, int | np.integer):
            rows = {name: value[item] for name, value in self.batch.items()}
            return DataProtoItem(
                rows, {name: value[item] for name, value in self.non_tensor_batch.items()}, self.meta_info
            )
        index = np.asarray(range(len(self))[item] if isinstance(item, slice) else item)
        rows = Tensors({name: value[torch.from_numpy(index)] for name, value in self.batch.items()})
        return DataProto(rows, {name: value[index] for name, value in self.non_tensor_batch.items()}, self.meta_info)

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self[number] for number in range(len(self)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"DataProto.{name}: the stand-in for verl has what reward managers read: batch, non_tensor_batch, "
            "meta_info, rows and slices"
        )


@dataclass(frozen=True)
class FinishedAnswer:
    """An answer as token ids, and the columns of its example."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    response_mask: Sequence[bool]
    columns: Mapping[str, Any]


def batch_of(answers: Sequence[FinishedAnswer], pad_id: int, prompt_length: int, response_length: int) -> DataProto:
    """Return the batch of answers, padded as verl pads: prompts to ``prompt_length``, responses to the other.

    Shapes: prompts [B, P], responses and response_mask [B, T], attention_mask and position_ids [B, P + T], int64.
    """
    wide = max(prompt_length, *(len(one.prompt_ids) for one in answers))
    long = max(response_length, *(len(one.response_ids) for one in answers))
    shape = (len(answers), wide + long)
    ids, attended = np.full(shape, pad_id, np.int64), np.zeros(shape, np.int64)
    mask = np.zeros((len(answers), long), np.int64)
    for row, one in enumerate(answers):
        start, end = wide - len(one.prompt_ids), wide + len(one.response_ids)
        ids[row, start:end] = [*one.prompt_ids, *one.response_ids]
        attended[row, start:end] = 1
        mask[row, : len(one.response_ids)] = one.response_mask
    tensors = {"input_ids": ids, "attention_mask": attended, "position_ids": (attended.cumsum(1) - 1).clip(0)}
    tensors |= {"prompts": ids[:, :wide], "responses": ids[:, wide:], "response_mask": mask}
    columns = {name: np.empty(len(answers), dtype=object) for one in answers for name in one.columns}
    for row, one in enumerate(answers):
        for name, column in columns.items():
            column[row] = one.columns.get(name)
    return DataProto(Tensors({name: torch.from_numpy(value.copy()) for name, value in tensors.items()}), columns)
