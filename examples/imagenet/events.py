"""What each worker did and when, as JSON lines that outlive a SIGKILL.

One file for each worker process, one write for each line, so a worker that dies leaves at most its last line torn. All
times are CLOCK_MONOTONIC, which all processes of one host share.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Event:
    """One line of an event file.

    Attributes:
        kind: ``formed`` (a group is ready), ``attempt`` (a step has its images and begins), ``commit`` (the step is
            part of the model for good) or ``validated``.
        time_s: CLOCK_MONOTONIC.
        pid: the worker process.
        rank: its rank in the present group.
        world_size: workers in the present group.
        group: a number that only this group has.
        step: committed steps before this one began; on ``formed`` and ``validated``, committed steps so far.
        epoch: which pass over the images, from 0.
        indices: the images of this worker's part of the step (``attempt`` only).
        loss: mean over this worker's part (``commit`` only).
        accuracy: top-1 on the validation images, 0..1 (``validated`` only).
    """

    kind: str
    time_s: float
    pid: int
    rank: int
    world_size: int
    group: int
    step: int
    epoch: int
    indices: tuple[int, ...] = ()
    loss: float | None = None
    accuracy: float | None = None


class EventWriter:
    """Appends this process's events to ``folder/PID.jsonl``, which it creates.

    Args:
        folder: made if missing; None writes nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._descriptor: int | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(
                folder / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
            )

    def write(
        self,
        kind: str,
        *,
        rank: int,
        world_size: int,
        group: int,
        step: int,
        epoch: int,
        indices: tuple[int, ...] = (),
        loss: float | None = None,
        accuracy: float | None = None,
    ) -> None:
        """Appends one event; the fields are those of ``Event``."""
        if self._descriptor is None:
            return
        event = Event(
            kind, time.monotonic(), os.getpid(), rank, world_size, group, step, epoch, indices, loss, accuracy
        )
        os.write(self._descriptor, json.dumps(asdict(event)).encode() + b"\n")


class EventReader:
    """Follows all event files of a folder; each call of ``poll`` returns what is new.

    Args:
        folder: may not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offset_bytes: dict[Path, int] = {}

    def poll(self) -> list[Event]:
        """Returns the events written since the last call, in order of time; a torn last line is left for later."""
        fresh: list[Event] = []
        for file in sorted(self._folder.glob("*.jsonl")):
            offset = self._offset_bytes.get(file, 0)
            with file.open("rb") as stream:
                stream.seek(offset)
                data = stream.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offset_bytes[file] = offset + len(whole)
            fresh.extend(_parse(line) for line in whole.splitlines())
        return sorted(fresh, key=lambda event: event.time_s)


def read_events(folder: Path) -> list[Event]:
    """All events of all workers, in order of time."""
    return EventReader(folder).poll()


def _parse(line: bytes) -> Event:
    fields = json.loads(line)
    return Event(**{**fields, "indices": tuple(fields["indices"])})
