"""`convert`: from any format to any other, bit by bit the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchelastic.checkpoint.command.command_error import CheckpointCommandError
from torchelastic.checkpoint.command.foreign import dcp, safetensors_file, torch_file
from torchelastic.checkpoint.command.format import FoundCheckpoint
from torchelastic.checkpoint.command.stored_saves import FOREIGN, StoredSaves
from torchelastic.checkpoint.errors import CheckpointError, explained
from torchelastic.checkpoint.format.disk import REAL_DISK, Disk
from torchelastic.checkpoint.format.shard_writing import hidden_path, write_shard
from torchelastic.checkpoint.format.tree import Flat, flatten
from torchelastic.console import say
from torchelastic.text import bytes_text, counted


def convert(
    saves: StoredSaves, target: Path, to: str, *, part: str | None = None, allow_pickles: bool, disk: Disk = REAL_DISK
) -> int:
    """`torchelastic checkpoint convert`; returns the exit code. The whole state is held in memory once.

    Args:
        saves: of several the newest complete one is taken; or what is there is in a format of others.
        target: must not exist; it appears when all of it is on the disk, or not at all.
        to: "torch", "dcp", "safetensors" or "shard".
        part: keys from the outside in, with slashes between; only what is there is converted.
        allow_pickles: read objects of any type, which can run any code; and write them, where the target can hold them.
        disk: what publishes and removes files.

    Raises:
        CheckpointCommandError: the source cannot be read in this way or has no such part, or the target cannot hold
            it, or exists.
        CheckpointError: the source is damaged, or the disk refuses.
    """
    if os.path.lexists(target):
        raise CheckpointCommandError(
            f"{target} exists already, and nothing is overwritten: give another name, or remove it"
        )
    if not target.parent.is_dir():
        raise CheckpointCommandError(f"{target.parent} is no folder: create it, or give another target")
    tree, place, meta = read_any(saves, allow_pickles=allow_pickles)
    if part is not None:
        tree = part_of(tree, part, place)
    try:
        flat = flatten(tree, allow_pickles=allow_pickles)
    except (TypeError, ValueError) as error:
        raise CheckpointCommandError(f"{place}: {error}; or use --allow-pickles") from error
    write_any(target, tree, flat, to, meta=meta, allow_pickles=allow_pickles, disk=disk)
    held = sum(named.tensor.nbytes for named in flat.tensors)
    say(f"{place} -> {target} ({to}, {counted(len(flat.tensors), 'tensor')}, {bytes_text(held)})")
    return 0


def read_any(saves: StoredSaves, *, allow_pickles: bool) -> tuple[Any, Path, dict[str, Any]]:
    """The state that is there, the path of the checkpoint that was taken, and what a shard of it should say besides.

    Errors as `convert`.
    """
    for _, is_one, read in FOREIGN:
        if is_one(saves.path):
            return read(saves.path, allow_pickles=allow_pickles), saves.path, {"converted_from": saves.path.name}
    found, tree = saves.read_newest(lambda one: _load(one, allow_pickles=allow_pickles))
    return tree, found.path, {"converted_from": found.name, found.format.step_title: found.step}


def _load(found: FoundCheckpoint, *, allow_pickles: bool) -> Any:
    try:
        return found.format.load(found, allow_pickles=allow_pickles)
    except CheckpointError as error:
        if "allow_pickles=True" in str(error):
            raise CheckpointCommandError(
                f"{found.path} holds pickled objects: use --allow-pickles if you trust its writer"
            ) from error
        raise


def part_of(tree: Any, part: str, place: Path) -> Any:
    """What is under some keys of a state.

    Args:
        tree: the state.
        part: the keys as text, from the outside in, with slashes between; `~1` is a slash in a key and `~0` a tilde.
        place: for the error.

    Raises:
        CheckpointCommandError: there is no such part; lists what there is.
    """
    for token in part.split("/"):
        key = token.replace("~1", "/").replace("~0", "~")
        if isinstance(tree, (list, tuple)):
            tree = dict(enumerate(tree))
        named = {str(name): value for name, value in tree.items()} if isinstance(tree, dict) else {}
        if key not in named:
            some = ", ".join(map(repr, list(named)[:10])) or "no parts at all"
            raise CheckpointCommandError(f"{place} has no part {part!r}: where {key!r} should be, it has {some}")
        tree = named[key]
    return tree


def write_any(
    target: Path,
    tree: Any,
    flat: Flat,
    to: str,
    *,
    meta: Mapping[str, Any],
    allow_pickles: bool,
    disk: Disk = REAL_DISK,
) -> None:
    """Writes a state under a hidden name and publishes it; errors as `convert`."""
    if to == "shard":
        write_shard(target.absolute(), flat, meta, disk=disk)
    elif to == "dcp":
        dcp.check(tree, flat.structure)
        _publish_folder(target.absolute(), lambda hidden: dcp.write(hidden, tree, flat.structure), disk)
    elif to == "torch":
        torch_file.check(flat.structure, allow_pickles=allow_pickles)
        _publish_file(target.absolute(), lambda hidden: torch_file.write(hidden, tree), disk)
    else:
        safetensors_file.check(flat)
        _publish_file(target.absolute(), lambda hidden: safetensors_file.write(hidden, flat), disk)


def _publish_file(target: Path, write: Callable[[Path], None], disk: Disk) -> None:
    hidden = hidden_path(target.parent)
    with explained("write the checkpoint", hidden):
        hidden.touch(exist_ok=False)
        mode = hidden.stat().st_mode  # what the user's umask says, which not every library asks
    try:
        write(hidden)
        if hidden.stat().st_mode != mode:  # FAT has no modes, and refuses
            hidden.chmod(mode)
        _sync(hidden, disk)
        disk.publish(hidden, target)
    except BaseException:
        disk.remove(hidden)
        raise
    disk.sync_folder(target.parent)


def _publish_folder(target: Path, write: Callable[[Path], None], disk: Disk) -> None:
    hidden = hidden_path(target.parent)
    try:
        disk.make_folder(hidden)
        write(hidden)
        disk.sync_folder(hidden)
        if not disk.rename_folder(hidden, target):  # replaces an empty folder at most
            _publish_files(hidden, target, disk)
    except BaseException:
        disk.remove_folder(hidden)
        raise
    disk.sync_folder(target.parent)


def _publish_files(hidden: Path, target: Path, disk: Disk) -> None:
    """Where folders cannot be renamed: no reader takes a folder of DCP for one without its metadata."""
    try:
        disk.rename_files(hidden, target, last=dcp.METADATA_FILE)
    except BaseException:
        disk.remove_folder(target)
        raise
    disk.remove_folder(hidden)


def _sync(path: Path, disk: Disk) -> None:
    with explained("write the checkpoint", path):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # SMB refuses fsync of what is open for reading alone
    try:
        disk.sync(descriptor, path)
    finally:
        os.close(descriptor)
