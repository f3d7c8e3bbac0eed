"""What a job tells about its steps: a line of JSON in a file of ours, and velastic's `manager_state.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torchelastic.foreign_json import MAX_COUNT, decode_json

#: velastic's file, and that of `torchelastic.lifetime.IterManager`.
MANAGER_FILE = "manager_state.json"
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Progress:
    """What a job has told in one life. Steps are counted over all lives; None: it has not said.

    Attributes:
        resumed_step: the step that this life went on from; 0: from the start.
        committed_step: the last step that was done.
        saved_step: the last step that the next life can go on from.
        total_steps: of the run. A job that says so and exits with 0 before them is started again.
    """

    resumed_step: int | None = None
    committed_step: int | None = None
    saved_step: int | None = None
    total_steps: int | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all steps are known to be done."""
        return self._are_both_known and (self.committed_step or 0) >= (self.total_steps or 0)

    @property
    def is_incomplete(self) -> bool:
        """Whether steps are known to be left."""
        return self._are_both_known and not self.is_complete

    def or_else(self, other: Progress) -> Progress:
        """This, and from `other` what this does not say."""
        mine = {field.name: getattr(self, field.name) for field in fields(self)}
        return Progress(**{name: getattr(other, name) if value is None else value for name, value in mine.items()})

    @property
    def _are_both_known(self) -> bool:
        return self.committed_step is not None and self.total_steps is not None


def parse_progress(document: Any) -> Progress:
    """The progress in a document; names that are not ours are left alone.

    Raises:
        ValueError: it is no JSON object, or a step is no whole number from 0 on; names it.
    """
    if not isinstance(document, dict):
        raise ValueError('it is no JSON object such as {"committed_step": 120, "saved_step": 100}')
    return Progress(**{field.name: _step(document, field.name) for field in fields(Progress)})


def parse_manager_state(document: Any) -> Progress:
    """What `manager_state.json` tells.

    velastic writes it at the start of each iteration, before `iter_count` is done. Ours has a schema, and says how many
    are done; it is written at a save that may not be durable yet, so it is no word on what was saved.

    Raises:
        ValueError: it is no such file.
    """
    if not isinstance(document, dict):
        raise ValueError("it is no JSON object")
    if "schema" in document:
        committed = _step(document, "completed_iters")
    else:
        begun = _step(document, "iter_count")
        committed = None if begun is None else max(0, begun - 1)
    total = document.get("total_iters")
    return Progress(committed_step=committed, total_steps=total if type(total) is int and total > 0 else None)


class Told:
    """Reads both files while a life goes on; what was last readable counts: a killed job may leave half a line.

    Args:
        progress_path: of our file; it is removed at the start of each life.
        manager_path: of velastic's, which is only read, and only if it was written in this life.
    """

    def __init__(self, progress_path: Path, manager_path: Path) -> None:
        self._progress_path, self._manager_path = progress_path, manager_path
        self._seen: dict[Path, tuple[int, int, int] | None] = {}
        self._progress, self._manager = Progress(), Progress()
        self.fault = ""

    def begin(self) -> None:
        """A life begins; nothing is known of it."""
        self._progress_path.unlink(missing_ok=True)
        self._seen = {self._progress_path: None, self._manager_path: _stamp(self._manager_path)}
        self._progress, self._manager, self.fault = Progress(), Progress(), ""

    def look(self) -> None:
        """Read what has changed. `fault` then says what is wrong with our file, "" if nothing is."""
        if self._has_changed(self._progress_path):
            try:
                self._progress, self.fault = parse_progress(_read(self._progress_path)), ""
            except (OSError, ValueError, RecursionError) as error:
                self.fault = str(error)
        if self._has_changed(self._manager_path):
            try:
                self._manager = parse_manager_state(_read(self._manager_path))
            except (OSError, ValueError, RecursionError):
                pass  # velastic writes it in place, so half of it is nothing unusual

    @property
    def progress(self) -> Progress:
        """Of this life. velastic's total is left out: it does not tell whether an exit with 0 was the end."""
        manager = Progress(committed_step=self._manager.committed_step)
        return self._progress.or_else(manager)

    def _has_changed(self, path: Path) -> bool:
        stamp = _stamp(path)
        changed = stamp is not None and stamp != self._seen.get(path)
        if changed:
            self._seen[path] = stamp
        return changed


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _read(path: Path) -> Any:
    with path.open("rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError(f"it is larger than {_MAX_BYTES} bytes")
    return decode_json(path.name, data, most_bytes=_MAX_BYTES)


def _step(document: Mapping[str, Any], name: str) -> int | None:
    value = document.get(name)
    if value is not None and (type(value) is not int or not 0 <= value <= MAX_COUNT):
        raise ValueError(f"{name} is {value!r}: give a whole number from 0 on")
    return value
