"""What workers write down: JSON lines, one file for each process, each line in one call, so that a SIGKILL loses none.

Times are CLOCK_MONOTONIC seconds, which all processes of a machine share. Imports nothing but the standard library.
"""

from __future__ import annotations

import bisect
import json
import os
import time
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class EventLog:
    """One file for each process."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"events-{os.getpid()}.jsonl").open("ab", buffering=0)

    def __call__(self, event: str, **fields: Any) -> None:
        line = {"e": event, "t": time.monotonic(), "pid": os.getpid(), **fields}
        self._file.write(json.dumps(line).encode() + b"\n")


class EventReader:
    """Reads all files of a folder, and each line once.

    It is asked every 20 ms while a recovery is measured on the same cores, so an answer costs what is new and what is
    asked for, however many events there have been.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._positions: dict[Path, int] = {}
        self._events: list[Event] = []
        self._by_kind: dict[str, list[Event]] = {}

    def all(self) -> list[Event]:
        """All events so far, by time; a line that is not complete yet is left out."""
        for path in self._folder.glob("events-*.jsonl"):
            if path.stat().st_size <= self._positions.get(path, 0):
                continue
            with path.open("rb") as file:
                file.seek(self._positions.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._add(json.loads(line))
                    self._positions[path] = self._positions.get(path, 0) + len(line)
        return self._events

    def of(self, event: str, since_s: float = 0.0, **fields: Any) -> list[Event]:
        """Events of one kind from a time on, with these fields."""
        self.all()
        events = self._by_kind.get(event, [])
        first = bisect.bisect_left(events, since_s, key=_time_s)
        return [e for e in events[first:] if all(e.get(name) == value for name, value in fields.items())]

    def _add(self, event: Event) -> None:
        for events in (self._events, self._by_kind.setdefault(event["e"], [])):
            bisect.insort(events, event, key=_time_s)


def _time_s(event: Event) -> float:
    return float(event["t"])
