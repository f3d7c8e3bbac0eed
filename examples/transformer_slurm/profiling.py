"""A trace of a few steps: torch.profiler's, and the range that `nsys profile -c cudaProfilerApi` captures."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

#: Set by `nsys profile` in the processes that it watches.
NSYS = "NSYS_PROFILING_SESSION_ID"


class StepProfiler:
    """Profiles the steps from one number to another; on one rank.

    Args:
        folder: where the trace goes, for chrome://tracing or Perfetto.
        start: the first step, counted from 0.
        end: the step before which it ends.
    """

    def __init__(self, folder: Path, start: int, end: int) -> None:
        self._folder, self._start, self._end = folder, start, end
        self._profile: profile | None = None
        self._has_begun = self._has_ended = False

    def begin(self, step: int) -> None:
        """A step is about to begin."""
        if step >= self._end:
            self.close()
        elif step >= self._start and not self._has_begun:
            self._has_begun = True
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
                torch.cuda.cudart().cudaProfilerStart()  # type: ignore[no-untyped-call]
            if NSYS not in os.environ:  # two profilers at once are one too many for the driver
                self._profile = profile(activities=activities)
                self._profile.start()

    def close(self) -> None:
        """Writes the trace, if one was begun."""
        if not self._has_begun or self._has_ended:
            return
        self._has_ended = True
        if torch.cuda.is_available():
            torch.cuda.cudart().cudaProfilerStop()  # type: ignore[no-untyped-call]
        if self._profile is None:
            return
        self._profile.stop()
        trace = self._folder / f"profile_{self._start}_{self._end}.json"
        self._profile.export_chrome_trace(str(trace))
        print(f"profile of steps {self._start} to {self._end - 1}: {trace}")
