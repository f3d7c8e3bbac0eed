"""What an `IterManager` leaves for the next life of its job: one small JSON file, replaced in one step."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from torchelastic.checkpoint.errors import CorruptCheckpointError, explained
from torchelastic.checkpoint.shards.disk import REAL_DISK, Disk
from torchelastic.foreign_json import MAX_COUNT, Amount, Count, CountIfAny, RecordError, checked, decode_object

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

    avg_iter_time: Amount = 0.0
    total_iters: CountIfAny = -1
    iter_count: Count = 0
    remaining_time: Annotated[float, Meta(ge=-1, le=sys.float_info.max)] = -1.0
    save_ckpt_time: Amount = 0.0
    completed_iters: Count = 0
    iter_bound_s: Amount = 0.0
    world_size: Annotated[int, Meta(ge=1, le=MAX_COUNT)] = 1
    save_times_s: Mapping[str, tuple[Amount, ...]] = field(default_factory=dict)
    iter_times_s: tuple[Amount, ...] = ()
    is_step_tried: bool = False


#: A file of an earlier version lacks the others.
_NEEDED = [one.name for one in fields(ManagerState) if one.name not in ("iter_times_s", "is_step_tried")]


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
        return parse_state(decode_object("it", data, most_bytes=_MAX_BYTES))
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


def parse_state(document: Mapping[str, Any]) -> ManagerState:
    """The state in a document. Raises RecordError: something is missing, or of the wrong type or range."""
    schema = document.get("schema")
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        raise RecordError(f"its schema is {schema!r}, and this version reads up to {SCHEMA}")
    return checked("it", document, ManagerState, needed=_NEEDED)
