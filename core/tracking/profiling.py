"""Profiles of chosen steps by torch's own profiler, in every process that holds a model.

``global_profiler.tool=torch`` writes a Chrome trace for each process and step (open it in ui.perfetto.dev).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.config.paths import run_folder

if TYPE_CHECKING:
    from core.config.schema import Config


class Profile:
    """The profiler of this process. ``start`` and ``stop`` enclose a step, in the same thread."""

    def __init__(self) -> None:
        self._running: Any = None

    def start(self) -> None:
        import torch

        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._running = torch.profiler.profile(activities=activities)
        self._running.start()

    def stop(self, trace: Path) -> None:
        """End the profile and write it to ``trace``."""
        running, self._running = self._running, None
        running.stop()
        trace.parent.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(str(trace))


@contextmanager
def profiled(config: Config, workers: Any, step: int) -> Iterator[None]:
    """Profile the step in every process that works on it, where ``global_profiler`` names it."""
    profiler = config.global_profiler
    if profiler.tool is None or step not in (profiler.steps or ()):
        yield
        return
    workers.start_profile()
    try:
        yield
    finally:
        folder = profiler.save_path or run_folder(config) / "profile"
        workers.stop_profile(Path(folder), f"step_{step}")
