"""Profiles of chosen steps: torch's own profiler in any process, or Nsight Systems around Ray's workers.

``global_profiler.tool=torch`` writes a Chrome trace for each process and step (open it in ui.perfetto.dev).
``tool=nsys`` has Ray start every worker under ``nsys profile``, which records between the marks that :class:`Profile`
sets with the CUDA profiler's interface; Ray keeps its reports in the ``logs/nsight`` folder of its session.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.config.frozen import thaw
from core.config.paths import run_folder

if TYPE_CHECKING:
    from core.config.schema import Config
    from core.config.sections.trainer import GlobalProfilerConfig


class Profile:
    """The profiler of this process. ``start`` and ``stop`` enclose a step, in the same thread."""

    def __init__(self, tool: str | None):
        self.tool = tool
        self._running: Any = None

    def start(self) -> None:
        import torch

        if self.tool == "nsys":
            torch.cuda.profiler.start()
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._running = torch.profiler.profile(activities=activities)
        self._running.start()

    def stop(self, trace: Path) -> None:
        """End the profile. torch's is written to ``trace``."""
        import torch

        if self.tool == "nsys":
            torch.cuda.profiler.stop()
            return
        running, self._running = self._running, None
        running.stop()
        trace.parent.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(str(trace))


def wanted(config: GlobalProfilerConfig, step: int) -> bool:
    return config.tool is not None and step in (config.steps or ())


def runtime_env(config: GlobalProfilerConfig) -> Mapping[str, Any]:
    """Return the Ray worker options that nsys needs, ``{"runtime_env": {"nsight": {...}}}``; {} for other tools.

    ``capture-range-end`` is by default one recording for each step of ``global_profiler.steps``.
    """
    if config.tool != "nsys":
        return {}
    nsight = thaw(config.global_tool_config.nsys.worker_nsight_options)
    options = {name: str(value) for name, value in nsight.items() if value is not None}
    return {"runtime_env": {"nsight": {"capture-range-end": f"repeat-shutdown:{len(config.steps or ())}", **options}}}


@contextmanager
def profiled(config: Config, workers: Any, step: int) -> Iterator[None]:
    """Profile the step in every process that works on it, where ``global_profiler`` names it."""
    if not wanted(config.global_profiler, step):
        yield
        return
    workers.start_profile()
    try:
        yield
    finally:
        folder = config.global_profiler.save_path or run_folder(config) / "profile"
        workers.stop_profile(Path(folder), f"step_{step}")
