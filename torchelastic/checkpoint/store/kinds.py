"""What kinds of checkpoints are in a folder: nobody prunes, hides or starts afresh beside what another has saved."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path
from typing import BinaryIO

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError, explained
from torchelastic.checkpoint.store.manifest import MANIFEST_NAME
from torchelastic.checkpoint.store.save_id import SaveId

log = logging.getLogger(__name__)

#: What the headers of `BCPState`, of `LocalCheckpointManager` and of checkpoints in memory state; those of tiers, which
#: name their folders alike, state something else.
TRAINING_STATE = "training state"
LOCAL_STATE = "local state"
MEMORY_STATE = "memory state"

_SHARD_SUFFIX = ".shard"

_STREAM = "default"


class Kind(Enum):
    """Who has saved a checkpoint; the value is the name to use for it in messages."""

    STREAMS = "FileSystemCheckpointManager"
    TIERED = "TieredCheckpointManager"
    TRAINING_STATE = "BCPState"
    LOCAL = "LocalCheckpointManager"
    MEMORY = "torchelastic.checkpoint.memory"


_STATED = {TRAINING_STATE: Kind.TRAINING_STATE, LOCAL_STATE: Kind.LOCAL, MEMORY_STATE: Kind.MEMORY}


class ForeignCheckpointsError(CheckpointError):
    """The folder holds checkpoints that something else has saved, and none that could be loaded here."""


def may_hold_one(folder: str) -> bool:
    """Whether checkpoints have such a name; others are not even looked into. Pure.

    >>> [name for name in ("7", "step-000000123.e1.r5.g7", "lost+found") if may_hold_one(name)]
    ['7', 'step-000000123.e1.r5.g7']
    """
    is_number = folder.isdecimal() and folder == str(int(folder))
    return is_number or SaveId.find(folder) is not None


def kind_of(
    folder: str, files: Collection[str], opened: Callable[[str], AbstractContextManager[BinaryIO]]
) -> Kind | None:
    """The kind of checkpoint that one folder holds, or a rank's part of one.

    Args:
        folder: its name, one that checkpoints have.
        files: the names of what is in it.
        opened: opens one of them, to read what the header of a shard states; asked only where names do not decide. An
            OSError says that this one cannot be read: others state the same.

    Returns:
        None: no checkpoint, or one that nobody can tell.

    Raises:
        CheckpointError: what `opened` raises as such.

    >>> kind_of("7", ["default", "manifest.json"], open)
    <Kind.STREAMS: 'FileSystemCheckpointManager'>
    >>> kind_of("7", ["readme.txt"], open)
    """
    if SaveId.find(folder) is not None:
        stated = _first_stated(files, opened)
        if stated is None:
            return None
        return _STATED.get(stated, Kind.TIERED)
    return Kind.STREAMS if _STREAM in files or MANIFEST_NAME in files else None


def kind_in(folder: Path) -> Kind | None:
    """The kind of checkpoint in one folder of this host; see `kind_of`. From any thread.

    Raises:
        CheckpointError: it cannot be read.
    """
    if not may_hold_one(folder.name):
        return None
    return kind_of(folder.name, _names(folder), lambda name: (folder / name).open("rb"))


def is_foreign(folder: Path, own: Kind) -> bool:
    """Whether a folder certainly holds a checkpoint of another kind than the own one."""
    return _kind_if_readable(folder.name, lambda name: kind_in(folder.parent / name)) not in (own, None)


def require_own_folder(root: Path, own: Kind) -> None:
    """`require_own` for what is in a folder of this host; it may be missing. On any rank, from any thread.

    Raises:
        ForeignCheckpointsError: it holds only checkpoints of others.
        CheckpointError: it cannot be read.
    """
    require_own(own, _names(root), lambda name: kind_in(root / name), str(root))


def _kind_if_readable(folder: str, kind_in: Callable[[str], Kind | None]) -> Kind | None:
    """None where one of several folders cannot be read: it hides no other."""
    try:
        return kind_in(folder)
    except CheckpointError:
        return None


def require_own(own: Kind, names: Iterable[str], kind_in: Callable[[str], Kind | None], where: str) -> None:
    """Refuses a folder that holds only what others have saved; where it holds both, a warning names the others.

    Called before anything is loaded, saved or removed there; on any rank, from any thread.

    Args:
        own: who asks.
        names: of whatever lies in the folder.
        kind_in: the kind of checkpoint in the folder of that name; not asked where checkpoints have no such name. A
            `CheckpointError` says that this one cannot be read.
        where: the folder.

    Raises:
        ForeignCheckpointsError: what was found, whose it is, and what to do.
    """
    found: dict[Kind, list[str]] = {}
    for name in filter(may_hold_one, names):
        kind = _kind_if_readable(name, kind_in)
        if kind is not None:
            found.setdefault(kind, []).append(name)
    others = {kind: found[kind] for kind in Kind if kind in found and kind is not own}
    if not others:
        return
    whose = " and ".join(f"{len(names)} of {kind.value} (such as {max(names)!r})" for kind, names in others.items())
    listing = f"`torchelastic checkpoint ls {where}` lists them"
    if own not in found:
        raise ForeignCheckpointsError(
            f"{where} holds checkpoints that {own.value} did not save and cannot load: {whose}. To resume from them, "
            f"use {' or '.join(kind.value for kind in others)}; to start from scratch, give {own.value} another, empty "
            f"folder. {listing}"
        )
    text = f"{where} also holds checkpoints that {own.value} neither loads nor removes: {whose}. Give each of them a "
    log.warning("%s", f"{text}folder of its own; {listing}")


def _first_stated(names: Iterable[str], opened: Callable[[str], AbstractContextManager[BinaryIO]]) -> str | None:
    """The kind that the header of a shard states, "" for none; None if there is no whole header of one."""
    for name in sorted(names):
        if name.startswith(".") or not name.endswith(_SHARD_SUFFIX):
            continue
        try:
            with opened(name) as file:
                stated = _stated_in(file)
        except CheckpointError:
            raise
        except OSError:
            continue  # removed meanwhile, or unreadable
        if stated is not None:
            return stated
    return None


def _stated_in(file: BinaryIO) -> str | None:
    from torchelastic.checkpoint.format.header import PREAMBLE_BYTES, decode_preamble  # imports torch

    try:
        preamble = decode_preamble(file.read(PREAMBLE_BYTES))
        return str(json.loads(file.read(preamble.header_bytes))["meta"].get("kind", ""))
    except (CorruptCheckpointError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _names(folder: Path) -> list[str]:
    """What is in a folder; nothing if there is no such folder."""
    with explained("list the checkpoints", folder):
        try:
            return [path.name for path in folder.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
