"""What an `IterManager` leaves for the next life of its job: one small JSON file, replaced in one step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchelastic.checkpoint.errors import CorruptCheckpointError, explained
from torchelastic.checkpoint.shards.disk import REAL_DISK, Disk
from torchelastic.foreign_json import Fields, RecordError, decode_json
from torchelastic.lifetime.iteration_times import WINDOW

#: The layout of the file; a reader refuses a newer one.
SCHEMA = 1
FILE_NAME = "manager_state.json"
#: How many of the newest saves of each tier are remembered.
MAX_SAVES = 200
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class ManagerState:
    """The contents of the file. The first five are those of velastic's, for whoever reads it from outside.

    Attributes:
        avg_iter_time: usual time of an iteration, in seconds.
        total_iters: of the run; -1: not known.
        iter_count: the iteration that had begun when it was written, counted from 1.
        remaining_time: seconds that the rest of the run was expected to take; -1: not known.
        save_ckpt_time: seconds that a save takes at most.
        completed_iters: how many iterations were done; where the count goes on from.
        iter_bound_s: how long an iteration takes at most, in seconds; 0: not known.
        world_size: how many ranks there were.
        save_times_s: by tier, how long its newest saves took, in seconds, oldest first.
        iter_times_s: how long the newest iterations took, in seconds, oldest first.
        is_step_tried: an iteration was begun only to know how long others than the first take.
    """

    avg_iter_time: float = 0.0
    total_iters: int = -1
    iter_count: int = 0
    remaining_time: float = -1.0
    save_ckpt_time: float = 0.0
    completed_iters: int = 0
    iter_bound_s: float = 0.0
    world_size: int = 1
    save_times_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    iter_times_s: tuple[float, ...] = ()
    is_step_tried: bool = False


def write_state(folder: Path, state: ManagerState, disk: Disk = REAL_DISK) -> Path:
    """Writes the file in one step: a kill leaves the old one or the new one. On one rank only.

    Raises:
        CheckpointError: the operating system refused; names the place and the remedy.
    """
    target, partial = folder / FILE_NAME, folder / f".{FILE_NAME}.{os.getpid()}"
    document = {"schema": SCHEMA, **asdict(state)}
    data = json.dumps(document, indent=1, allow_nan=False).encode() + b"\n"
    disk.make_folder(folder)
    disk.remove(partial)
    try:
        descriptor = disk.create(partial)
        try:
            disk.write(descriptor, [memoryview(data)], partial)
            disk.sync(descriptor, partial)
        finally:
            os.close(descriptor)
        disk.rename(partial, target)
        disk.sync_folder(folder)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return target


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
        return parse_state(decode_json("it", data, most_bytes=_MAX_BYTES))
    except RecordError as error:
        raise CorruptCheckpointError(
            f"{path} holds no state of an iteration manager ({error}): remove it, and the iterations are counted anew"
        ) from error


def remove_state(folder: Path, disk: Disk = REAL_DISK) -> None:
    """Removes the file, and the folder if nothing else is in it. Raises CheckpointError."""
    disk.remove(folder / FILE_NAME)
    try:
        folder.rmdir()
    except OSError:
        pass  # there is something else in it, or it never was


def parse_state(document: Any) -> ManagerState:
    """The state in a document. Raises RecordError: something is missing, or of the wrong type or range."""
    fields = Fields("it", document)
    schema = fields.whole("schema", None, least=1)
    if schema > SCHEMA:
        raise RecordError(f"its schema is {schema}, and this version reads up to {SCHEMA}")
    # -1: not known
    remaining_s = -1.0 if document.get("remaining_time") == -1 else fields.number("remaining_time", None)
    return ManagerState(
        avg_iter_time=fields.number("avg_iter_time", None),
        total_iters=fields.whole("total_iters", None, least=-1),
        iter_count=fields.whole("iter_count", None),
        remaining_time=remaining_s,
        save_ckpt_time=fields.number("save_ckpt_time", None),
        completed_iters=fields.whole("completed_iters", None),
        iter_bound_s=fields.number("iter_bound_s", None),
        world_size=fields.whole("world_size", None, least=1),
        save_times_s={
            tier: _seconds(times, f"save_times_s of {tier!r}", MAX_SAVES)
            for tier, times in fields.object("save_times_s").items()
        },
        # a file of an earlier version has none of these
        iter_times_s=_seconds(document.get("iter_times_s", []), "iter_times_s", WINDOW),
        is_step_tried=document.get("is_step_tried") is True,
    )


def _seconds(values: Any, name: str, most: int) -> tuple[float, ...]:
    """The newest of a list of durations."""
    if not isinstance(values, list) or not all(type(one) in (int, float) and 0.0 <= one < math.inf for one in values):
        raise RecordError(f"{name} is no list of seconds")
    return tuple(float(seconds) for seconds in values[-most:])
