"""Finding what is at a path, `ls`, and `verify`, which reads everything and names what is damaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from torchelastic.checkpoint.command.command_error import CheckpointCommandError
from torchelastic.checkpoint.command.foreign import dcp, safetensors_file, torch_file
from torchelastic.checkpoint.command.format import Format, FoundCheckpoint, MovedOnError
from torchelastic.checkpoint.command.memory_steps import MemorySteps
from torchelastic.checkpoint.command.screen import progress
from torchelastic.checkpoint.command.shard_checkpoints import FolderOfShards, ShardFile
from torchelastic.checkpoint.command.stream_checkpoints import StreamFolder
from torchelastic.console import complain, say, say_json, table
from torchelastic.text import age_text, bytes_text

Read = TypeVar("Read")

#: In the order in which they are looked for and listed.
FORMATS: tuple[Format, ...] = (ShardFile(), FolderOfShards(), MemorySteps(), StreamFolder())

#: What it is, how to tell it, how to read it. The first bytes of safetensors can look like a pickle's, not the reverse.
FOREIGN = (
    ("a folder of torch.distributed.checkpoint", dcp.is_one, dcp.read),
    ("of safetensors", safetensors_file.is_one, safetensors_file.read),
    ("a file of torch.save", torch_file.is_one, torch_file.read),
)


def find(path: Path) -> list[FoundCheckpoint]:
    """The checkpoints at a path, of every kind, each kind newest first; at least one.

    Raises:
        CheckpointCommandError: there are none; says what is there instead.
        CheckpointError: it cannot be looked at.
    """
    before: list[Path] = []
    while True:
        with suppress(MovedOnError):
            found = _find_now(path)
            paths = [one.path for one in found]
            if paths == before or any(one.is_usable for one in found):
                return found
            before = paths  # a run may just have finished one, and have removed the one before


def _find_now(path: Path) -> list[FoundCheckpoint]:
    """Raises MovedOnError where a run has replaced all of them meanwhile."""
    if not path.exists():
        raise CheckpointCommandError(
            f"{path} does not exist: give the folder or file of a checkpoint, or a folder of them"
        )
    foreign = foreign_kind(path)
    if foreign is not None:
        raise CheckpointCommandError(f"{path} is {foreign}, which only `torchelastic checkpoint convert` reads")
    found = [one for known in FORMATS for one in known.find(path)]
    if found:
        return found
    if path.is_dir() and not any(path.iterdir()):
        raise CheckpointCommandError(f"{path} is empty: give the folder that checkpoints were written to")
    raise CheckpointCommandError(
        f"{path} holds no checkpoint that torchelastic knows: give a folder of checkpoints, one of them, or a shard"
    )


def foreign_kind(path: Path) -> str | None:
    """Which format of others it is, in words; None for none of them."""
    return next((what for what, is_one, _ in FOREIGN if is_one(path)), None)


def newest_complete(path: Path) -> FoundCheckpoint:
    """The one that `show` and `convert` mean where a path has several; of several kinds, the one saved last.

    Raises:
        CheckpointCommandError: none can be used, or there are none.
    """
    found = find(path)
    usable = [one for one in found if one.is_complete] or [one for one in found if one.is_usable]
    if not usable:
        raise none_usable(path, found)
    first_of_kind = {one.format.kind: one for one in reversed(usable)}
    return max(first_of_kind.values(), key=lambda one: one.saved_s)


def read_newest(path: Path, read: Callable[[FoundCheckpoint], Read]) -> tuple[FoundCheckpoint, Read]:
    """`newest_complete`, and what is read of it; where a run at work removes it meanwhile, of the newest one then.

    Errors as `newest_complete` and `read`.
    """
    while True:
        found = newest_complete(path)
        try:
            return found, read(found)
        except (CheckpointCommandError, OSError):  # a CheckpointError is one
            if not _is_removed(found):
                raise


def _is_removed(found: FoundCheckpoint) -> bool:
    """Whether a run at work has removed what was found finished, or has begun to."""
    try:
        now = found.format.find(found.path)
    except MovedOnError:
        return True
    return not any(one.path == found.path and not one.is_unfinished for one in now)


def none_usable(path: Path, found: Sequence[FoundCheckpoint]) -> CheckpointCommandError:
    """The error for a path without a usable checkpoint."""
    why = f"damaged: {found[0].damage}" if found[0].damage is not None else str(found[0].partial)
    if len(found) == 1:
        return CheckpointCommandError(f"{path} is {why}; use another copy of it, or an older checkpoint")
    return CheckpointCommandError(f"all {len(found)} checkpoints in {path} are of no use (the newest is {why})")


def ls(path: Path, *, as_json: bool, now_s: float) -> int:
    """`torchelastic checkpoint ls`; returns the exit code.

    Raises:
        CheckpointCommandError: there is nothing at the path.
    """
    found = find(path)
    if as_json:
        for one in found:
            say_json(record_of(one))
    else:
        titles = ("NAME", found[0].format.step_title.upper(), "RANKS", "SIZE", "AGE", "KIND", "STATE")
        table(titles, [_row(one, now_s) for one in found])
    if not any(one.is_usable for one in found):
        complain(f"torchelastic checkpoint ls: {none_usable(path, found)}")
        return 2
    return 0


def verify(path: Path, *, as_json: bool) -> int:
    """`torchelastic checkpoint verify`, for all checkpoints at a path.

    Returns:
        The exit code: 0 if all that are finished are intact, 1 if one is damaged or none is finished, 2 if one cannot
        be read.

    Raises:
        CheckpointCommandError: there is nothing at the path.
    """
    found = find(path)
    code = int(all(one.is_unfinished for one in found))
    for one in found:
        unreadable = False
        try:
            with progress(one.size_bytes, one.name) as advance:
                lines = one.format.verify(one, advance)
        except OSError as error:  # a CheckpointError is one
            lines, unreadable = [str(error)], True
        state = "unreadable" if unreadable else "damaged" if lines else "intact"
        if one.is_unfinished and not lines:
            state = "not finished"
        if lines and _is_removed(one):
            state, lines = "removed meanwhile", []
        code = max(code, {"unreadable": 2, "damaged": 1}.get(state, 0))
        if as_json:
            about = {"path": str(one.path), "name": one.name, "kind": one.format.kind, "partial": one.partial}
            say_json({**about, "state": state, "damage": lines})
        else:
            said, part = (one.partial, None) if one.is_unfinished else (state, one.partial)
            say(f"{one.name}: {said} ({bytes_text(one.size_bytes)}{f'; {part}' if part else ''})")
            for line in lines:
                say(f"  {line}")
    return code


def record_of(found: FoundCheckpoint) -> dict[str, object]:
    """What `--json` says of a checkpoint."""
    return {
        "kind": found.format.kind,
        "name": found.name,
        "path": str(found.path),
        found.format.step_title: found.step,
        "world_size": found.world_size,
        "size_bytes": found.size_bytes,
        "saved_s": found.saved_s,
        "complete": found.is_complete,
        "damage": found.damage,
        "partial": found.partial,
        "files": [str(path) for path in found.shards],
        "metrics": {name: value if value - value == 0 else str(value) for name, value in found.metrics.items()},
    }


def _row(found: FoundCheckpoint, now_s: float) -> tuple[str, ...]:
    return (
        found.name,
        "-" if found.step is None else str(found.step),
        "-" if found.world_size is None else str(found.world_size),
        bytes_text(found.size_bytes),
        age_text(now_s - found.saved_s),
        found.format.kind,
        f"damaged: {found.damage}" if found.damage is not None else found.partial or "complete",
    )
