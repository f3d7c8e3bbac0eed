"""The state that an `IterManager` leaves for the next attempt of its job: one small JSON file."""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from torchelastic.checkpoint.errors import CorruptCheckpointError, explained
from torchelastic.checkpoint.format.disk import REAL_DISK, replacing
from torchelastic.checkpoint.policy.arguments import real_number
from torchelastic.foreign_json import MAX_COUNT, Amount, Count, CountIfAny, RecordError, checked, decode_object

#: The layout of the file; a reader refuses a newer one.
SCHEMA = 1
FILE_NAME = "manager_state.json"
#: How many of the newest saves of each tier are remembered.
MAX_SAVES = 200
#: A save that was killed is expected to take so many times what it had: it took longer, and nobody knows how long. An
#: iteration that was killed is expected to begin with up to so many times as much time left.
_UNFINISHED_FACTOR = 2.0
#: What is left of the time is noted anew when it is less than this share of what was noted before.
_NOTE_BELOW = 0.75
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
        unfinished_save_s: by tier, how long to expect of a save after one before the deadline that was not finished.
        unfinished_iter_s: at most so many seconds were left when the last iteration began; 0: it stopped in time.
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
    unfinished_save_s: Mapping[str, Amount] = field(default_factory=dict)
    unfinished_iter_s: Amount = 0.0

    @property
    def careful_below_s(self) -> float:
        """With less time left than that, an iteration may begin that is too long: maybe earlier than it did before."""
        return _UNFINISHED_FACTOR * self.unfinished_iter_s


def is_to_note(left_s: float, noted_s: float) -> bool:
    """Whether to note how much time is left: often enough to know well when a killed iteration began, and seldom.

    Args:
        left_s: until the deadline; infinite: none is known.
        noted_s: what was noted last, likewise.

    >>> is_to_note(100.0, float("inf")), is_to_note(80.0, 100.0), is_to_note(70.0, 100.0), is_to_note(200.0, 70.0)
    (True, False, True, True)
    """
    return left_s > noted_s or left_s < _NOTE_BELOW * noted_s


#: A file of an earlier version lacks the others.
_LATER = ("iter_times_s", "is_step_tried", "unfinished_save_s", "unfinished_iter_s")
_NEEDED = [one.name for one in fields(ManagerState) if one.name not in _LATER]


def write_state(folder: Path, state: ManagerState) -> None:
    """Writes the file atomically: a kill leaves the old one or the new one. On one rank only.

    Raises:
        CheckpointError: the operating system refused; names the path and the remedy.
    """
    path, partial = folder / FILE_NAME, folder / f".{FILE_NAME}.{os.getpid()}"
    document = {"schema": SCHEMA, **asdict(state)}
    with explained("write the state of the iteration manager", path):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path, partial, "w") as file:
            file.write(json.dumps(document, indent=1, allow_nan=False) + "\n")
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

    Attributes:
        unfinished_s: by tier, what to expect after a save that was not finished.

    Raises:
        ValueError: there are no tiers, one has no name, or two have the same.
    """

    def __init__(self, tiers: Sequence[str]) -> None:
        if isinstance(tiers, str) or not tiers or not all(tiers) or len(set(tiers)) < len(tiers):
            raise ValueError(f"tiers is {tiers!r}: give the names of the tiers, each once, the most durable first")
        self.first_tier = tiers[0]
        self._times: dict[str, deque[float]] = {tier: deque(maxlen=MAX_SAVES) for tier in tiers}
        self._earlier: Mapping[str, Sequence[float]] = {}
        self.unfinished_s: dict[str, float] = {}

    @property
    def times_s(self) -> Mapping[str, tuple[float, ...]]:
        """By tier, how long the newest saves took, oldest first."""
        return {tier: (*self._earlier.get(tier, ()), *times)[-MAX_SAVES:] for tier, times in self._times.items()}

    @property
    def expected_s(self) -> Mapping[str, tuple[float, ...]]:
        """The same, and what is expected after a save that was not finished, until another one is measured."""
        unfinished = {tier: (self.unfinished_s[tier],) for tier in self._times if tier in self.unfinished_s}
        return {tier: (*times, *unfinished.get(tier, ())) for tier, times in self.times_s.items()}

    def begins(self, tier: str, left_s: float) -> None:
        """One begins, and so much is left for it: if the process is killed, it took longer."""
        self.unfinished_s[tier] = _UNFINISHED_FACTOR * left_s

    def ends(self, tier: str) -> None:
        """One has ended, however: it was not killed."""
        self.unfinished_s.pop(tier, None)

    def took(self, tier: str, seconds: float) -> None:
        """One more save. Raises ValueError: no such tier, or the time is negative, infinite or NaN."""
        if tier not in self._times:
            raise ValueError(f"there is no tier {tier!r}: the tiers are {', '.join(self._times)}")
        self._times[tier].append(real_number("seconds", seconds, remedy="give seconds, 0 or more"))
        self.ends(tier)

    def summary(self) -> list[str]:
        """What was measured, in lines for people."""
        return [
            f"saves to {tier!r}: {len(times)}, the longest {max(times, default=0.0):.3g} s"
            for tier, times in self.times_s.items()
        ]

    def remember(self, times_s: Mapping[str, Sequence[float]], unfinished_s: Mapping[str, float]) -> None:
        """Saves of earlier attempts, before those of this one; those to removed tiers are left out."""
        self._earlier, self.unfinished_s = times_s, dict(unfinished_s)
