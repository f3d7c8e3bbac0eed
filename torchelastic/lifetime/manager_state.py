"""The figures of an `IterManager`, and the state that it leaves for the next incarnation: one small JSON file."""

from __future__ import annotations

import json
import math
import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from torchelastic.checkpoint.errors import CorruptCheckpointError, explained
from torchelastic.checkpoint.policy.arguments import real_number
from torchelastic.checkpoint.shards.disk import REAL_DISK
from torchelastic.foreign_json import MAX_COUNT, Amount, Count, CountIfAny, RecordError, checked, decode_object
from torchelastic.lifetime.iteration_times import IterationTimes

if TYPE_CHECKING:
    from torchelastic.lifetime.group_monitor import GroupMonitor

#: The layout of the file; a reader refuses a newer one.
SCHEMA = 1
FILE_NAME = "manager_state.json"
#: How many of the newest saves of each tier are remembered.
MAX_SAVES = 200
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class ManagerState:
    """The contents of the file. The first five are velastic's, for programs that read them. Seconds are `float`.

    Attributes:
        avg_iter_time: usual seconds of an iteration.
        total_iters: of the run; -1: not known.
        iter_count: the iteration that had begun when it was written, counted from 1.
        remaining_time: expected seconds of the rest of the run; -1: not known.
        save_ckpt_time: upper bound of the seconds of a save.
        completed_iters: how many iterations were done; where the count is resumed.
        world_size: number of ranks.
        save_times_s: by tier, how long its newest saves took, in seconds, oldest first.
        iter_times_s: how long the newest iterations took, in seconds, oldest first.
        is_step_tried: an iteration was begun only to know how long others than the first take.
    """

    avg_iter_time: Amount = 0.0
    total_iters: CountIfAny = -1
    iter_count: Count = 0
    remaining_time: Annotated[float, Meta(ge=-1, le=sys.float_info.max)] = -1.0
    save_ckpt_time: Amount = 0.0
    completed_iters: Count = 0
    world_size: Annotated[int, Meta(ge=1, le=MAX_COUNT)] = 1
    save_times_s: Mapping[str, tuple[Amount, ...]] = field(default_factory=dict)
    iter_times_s: tuple[Amount, ...] = ()
    is_step_tried: bool = False


#: A file of an earlier version lacks the others.
_NEEDED = [one.name for one in fields(ManagerState) if one.name not in ("iter_times_s", "is_step_tried")]


def write_state(folder: Path, state: ManagerState) -> None:
    """Writes the file atomically: a kill leaves the old one or the new one. On one rank only.

    Raises:
        CheckpointError: the operating system refused; names the path and the remedy.
    """
    path, partial = folder / FILE_NAME, folder / f".{FILE_NAME}.{os.getpid()}"
    document = {"schema": SCHEMA, **asdict(state)}
    with explained("write the state of the iteration manager", path):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("w") as file:
                file.write(json.dumps(document, indent=1, allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    REAL_DISK.sync_folder(folder)


def read_state(folder: Path) -> ManagerState | None:
    """The file's contents; None if there is none. Any number of ranks may read it.

    Raises:
        CorruptCheckpointError: it is something else; names it and the remedy.
        CheckpointError: the operating system refused to read it.
    """
    path = folder / FILE_NAME
    with explained("read the state of the iteration manager", path):
        try:
            with path.open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            return None
    try:
        return parse_state(decode_object("it", data, most_bytes=_MAX_BYTES))
    except RecordError as error:
        raise CorruptCheckpointError(
            f"{path} holds no state of an iteration manager ({error}): remove it, and the iterations are counted anew"
        ) from error


def remove_state(folder: Path) -> None:
    """Removes the file, and the folder if nothing else is in it. Raises CheckpointError."""
    with explained("remove the state of the iteration manager", folder / FILE_NAME):
        (folder / FILE_NAME).unlink(missing_ok=True)
    with suppress(OSError):  # there is something else in it, or it never was
        folder.rmdir()


def parse_state(document: Mapping[str, Any]) -> ManagerState:
    """The state in a document. Raises RecordError: something is missing, or of the wrong type or range."""
    schema = document.get("schema")
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        raise RecordError(f"its schema is {schema!r}, and this version reads up to {SCHEMA}")
    return checked("it", document, ManagerState, needed=_NEEDED)


class SaveTimes:
    """How long saves took, by tier.

    Args:
        tiers: their names, the most durable first.

    Raises:
        ValueError: there are no tiers, one has no name, or two have the same.
    """

    def __init__(self, tiers: Sequence[str]) -> None:
        if isinstance(tiers, str) or not tiers or not all(tiers) or len(set(tiers)) < len(tiers):
            raise ValueError(f"tiers is {tiers!r}: give the names of the tiers, each once, the most durable first")
        self.first_tier = tiers[0]
        self._times: dict[str, deque[float]] = {tier: deque(maxlen=MAX_SAVES) for tier in tiers}
        self._earlier: Mapping[str, Sequence[float]] = {}

    @property
    def times_s(self) -> Mapping[str, tuple[float, ...]]:
        """By tier, how long the newest saves took, oldest first."""
        return {tier: (*self._earlier.get(tier, ()), *times)[-MAX_SAVES:] for tier, times in self._times.items()}

    def took(self, tier: str, seconds: float) -> None:
        """One more save. Raises ValueError: no such tier, or the time is negative, infinite or NaN."""
        if tier not in self._times:
            raise ValueError(f"there is no tier {tier!r}: the tiers are {', '.join(self._times)}")
        self._times[tier].append(real_number("seconds", seconds, remedy="give seconds, 0 or more"))

    def remember(self, times_s: Mapping[str, Sequence[float]]) -> None:
        """Saves of earlier incarnations, before those of this one; those to removed tiers are left out."""
        self._earlier = times_s


class RunFigures:
    """The figures of a run, which `IterManager` measures.

    Attributes:
        total_iters: of the run; -1: not known.
        velastic_dir: folder of the state file.
        given_up_s: seconds that were left when the save before the deadline was done; None: not yet.
    """

    total_iters: int
    velastic_dir: Path
    given_up_s: float | None = None
    _times: IterationTimes
    _saves: SaveTimes
    _monitor: GroupMonitor
    _iter_count = 0  # the iteration that has begun, over all incarnations
    _calls = 0  # of `iter`, in this one

    @property
    def velastic_state_path(self) -> Path:
        """The file with the state for the next incarnation of the job."""
        return self.velastic_dir / FILE_NAME

    @property
    def iter_times(self) -> tuple[float, ...]:
        """The iterations that count, in seconds, oldest first."""
        return self._times.recent_s

    @property
    def avg_iter_time(self) -> float:
        """Seconds of a usual iteration: the mean of the newest, without pauses and without the first; 0: not known."""
        return self._times.average_s()

    @property
    def max_iter_time(self) -> float:
        """Seconds of the longest of the newest iterations, without the first; 0: not known."""
        return self._times.longest_s

    @property
    def remaining_time(self) -> float | None:
        """Seconds that the rest of the run is expected to take; None: not known."""
        if self.total_iters <= 0 or not self._times.recent_s:
            return None
        return self._times.expected_s(max(0, self.total_iters - self._done()))

    @property
    def save_ckpt_time(self) -> float:
        """Seconds to leave for a save into the most durable tier."""
        return self._monitor.tiers()[0].bound.seconds

    @property
    def save_times_s(self) -> Mapping[str, tuple[float, ...]]:
        """By tier, how long the newest saves took, in seconds, oldest first."""
        return self._saves.times_s

    def summary(self) -> str:
        """What has been seen so far, in lines for people."""
        of = f" of {self.total_iters}" if self.total_iters > 0 else ""
        first = ", ".join(f"{seconds:.3g}" for seconds in self._times.set_apart) or "none"
        lines = [
            f"iterations: {self._done()}{of}, {self.avg_iter_time:.3g} s each, the longest {self.max_iter_time:.3g} s, "
            f"set apart at the start: {first} s"
        ]
        if self.remaining_time is not None:
            lines.append(f"rest of the run: {timedelta(seconds=int(self.remaining_time))}")
        for tier, times in self.save_times_s.items():
            lines.append(f"saves to {tier!r}: {len(times)}, the longest {max(times, default=0.0):.3g} s")
        left_s, decision = self._left_s(), self._monitor.decision
        lines.append(f"deadline: {self._monitor.deadline_text()}" + ("" if left_s is None else f", in {left_s:.1f} s"))
        if decision is not None and decision.stops:
            lines.append(f"decision: {decision}")
        if self.given_up_s is not None:
            lines.append(f"given up: {self.given_up_s:.1f} s were left when the save was done")
        return "\n".join(lines)

    def _left_s(self) -> float | None:
        """Seconds until the deadline; None: none is known."""
        left_s = self._monitor.remaining_s()
        return None if left_s == math.inf else left_s

    def _done(self) -> int:
        """Iterations of the run that are done: the present one is not."""
        return self._iter_count - 1 if self._calls else self._iter_count

    def _state(self) -> ManagerState:
        remaining_s = self.remaining_time
        return ManagerState(
            avg_iter_time=self.avg_iter_time,
            total_iters=self.total_iters,
            iter_count=self._iter_count,
            remaining_time=-1.0 if remaining_s is None else remaining_s,
            save_ckpt_time=self.save_ckpt_time,
            completed_iters=self._done(),
            world_size=self._monitor.world_size,
            save_times_s=self._saves.times_s,
            is_step_tried=self._monitor.is_step_tried,
            iter_times_s=tuple(round(seconds, 6) for seconds in self._times.known_s),
        )
