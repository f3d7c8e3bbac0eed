"""The progress of a run, for whoever has started it: a small file of JSON, described in docs/simulate-esi.md."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from torchelastic.foreign_json import Count

log = logging.getLogger(__name__)

#: The path of the progress file; `torchelastic simulate-esi` sets it.
PROGRESS_VARIABLE = "TORCHELASTIC_PROGRESS_FILE"
#: Seconds between two writes, unless there is a reason to write at once.
_EVERY_S = 0.5


@dataclass(frozen=True)
class Steps:
    """What the file holds; steps count over all attempts of the job. None: not reported.

    Attributes:
        resumed_step: what this attempt resumed from.
        committed_step: the last step that is done.
        saved_step: the last step that the next attempt can resume from.
        total_steps: of the run. Reported when it is known whether the run is over: a job that exits with 0 after fewer
            is started again.
    """

    resumed_step: Count | None = None
    committed_step: Count | None = None
    saved_step: Count | None = None
    total_steps: Count | None = None


class StepCount:
    """Counts the steps of a run, on from where the attempt of the job before this one has ended.

    Attributes:
        begun: the step that has begun, from 1; before the first one of this attempt, how many are done.
        calls: how many have begun in this attempt.
        resumed: how many were done when it had begun; None: not known yet.
        saved: how many were done at the newest save; None: there was none.
    """

    def __init__(self) -> None:
        self.begun = self.calls = 0
        self.resumed: int | None = None
        self.saved: int | None = None

    @property
    def done(self) -> int:
        """How many steps of the run are done: the present one is not."""
        return self.begun - 1 if self.calls else self.begun


class ProgressFile:
    """The file. If it cannot be written, there is one warning, and training goes on.

    Args:
        path: of the file; None: nothing is reported.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._next_s = -math.inf
        self._last: Steps | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> ProgressFile:
        """The file that `TORCHELASTIC_PROGRESS_FILE` names, if it does."""
        path = (os.environ if environment is None else environment).get(PROGRESS_VARIABLE, "").strip()
        return cls(Path(path) if path else None)

    def is_due(self, now_s: float) -> bool:
        """Whether there is a file, and it was not written for a while; monotonic seconds."""
        return self._path is not None and now_s >= self._next_s

    def report(self, steps: Steps, now_s: float) -> None:
        """Replaces the file atomically. It is not synced: its reader runs on this host, at the same time."""
        if self._path is None or steps == self._last:
            return
        self._last, self._next_s = steps, now_s + _EVERY_S
        document = {name: step for name, step in asdict(steps).items() if step is not None}
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            partial.write_text(json.dumps(document) + "\n")
            partial.replace(self._path)
        except OSError as error:
            log.warning("the progress of this job is not reported: %s=%s: %s", PROGRESS_VARIABLE, self._path, error)
            self._path = None
