"""Faults of what is stored: what may become of a file of a checkpoint, as verbs."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchelastic.checkpoint.store import SaveId

#: Where the header of a shard begins, as docs/checkpoint-format.md has it.
_HEADER = 64


@dataclass(frozen=True)
class Victim:
    """A file that is damaged.

    Attributes:
        path: it.
        other_rank: what another rank has saved of the same kind, in the same checkpoint.
        other_save: the file of the same name of another checkpoint.
        length: how much of the file counts: behind it a slot may have room.
    """

    path: Path
    other_rank: bytes
    other_save: bytes
    length: int


Damage = Callable[[Victim], None]


def _changed(change: Callable[[bytes], bytes]) -> Damage:
    def damage(victim: Victim) -> None:
        victim.path.write_bytes(change(victim.path.read_bytes()[: victim.length]))

    return damage


def _flipped(place: Callable[[bytes], int]) -> Damage:
    def change(content: bytes) -> bytes:
        at = place(content)
        return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]

    return _changed(change)


def _in_a_checksum(content: bytes) -> int:
    found = re.search(rb'"[0-9a-f]{16}",(?:true|false)\]', content)
    return found.start() + 5 if found is not None else content.index(b'"tensors"')  # a commit may have no tensor


def _folder(victim: Victim) -> None:
    victim.path.unlink()
    victim.path.mkdir()
    (victim.path / "notes.txt").write_text("something else")


def _dangling(victim: Victim) -> None:
    victim.path.unlink()
    victim.path.symlink_to(victim.path.parent / "nowhere")


#: What everybody can see who looks at names, kinds and sizes.
VISIBLE: Mapping[str, Damage] = {
    "deleted": lambda victim: victim.path.unlink(),
    "empty": _changed(lambda _: b""),
    "cut by one byte": _changed(lambda content: content[:-1]),
    "cut to its header": _changed(lambda content: content[: content.rindex(b"}") + 1]),
    "cut in its header": _changed(lambda content: content[: _HEADER + 10]),
    "cut to half": _changed(lambda content: content[: len(content) // 2]),
    "a folder": _folder,
    "a link to nowhere": _dangling,
}
#: What only a reader sees.
HIDDEN: Mapping[str, Damage] = {
    "a bit in its preamble": _flipped(lambda _: 20),
    "a bit in its header": _flipped(lambda _: _HEADER + 3),
    "a bit in its index": _flipped(lambda content: content.index(b'"tensors"') + 14),
    "a bit in a checksum": _flipped(_in_a_checksum),
    "a bit in its data": _flipped(lambda content: len(content) - 30),
    "another rank's": lambda victim: _put(victim, victim.other_rank),
    "another save's": lambda victim: _put(victim, victim.other_save),
    "unreadable": lambda victim: victim.path.chmod(0),
    "on a bad disk": lambda victim: wear_out(victim.path),
}
#: What changes nothing.
HARMLESS: Mapping[str, Damage] = {"longer": _changed(lambda content: content + b"more")}
SHARD_DAMAGES = {**VISIBLE, **HIDDEN, **HARMLESS}
MANIFEST_DAMAGES: Mapping[str, Damage] = {
    "manifest deleted": VISIBLE["deleted"],
    "manifest empty": VISIBLE["empty"],
    "manifest cut": VISIBLE["cut to half"],
    "a bit in the manifest": _flipped(lambda content: len(content) // 3),
    "manifest of another save": lambda victim: _put(victim, victim.other_save),
    "manifest unreadable": HIDDEN["unreadable"],
}


#: What may lie where the folder of a checkpoint was.
FOLDER_DAMAGES: Mapping[str, Damage] = {
    "folder moved, and a link to nowhere left": lambda victim: _moved(victim.path),
    "folder of another user": HIDDEN["unreadable"],
    "folder of empty files": lambda victim: _emptied(victim.path),
    "folder replaced by a file": lambda victim: _replaced_by_a_file(victim.path),
}


def _moved(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to("/nowhere/on/a/disk/that/is/not/mounted")


def _emptied(folder: Path) -> None:
    for path in folder.iterdir():
        path.write_bytes(b"")


def _replaced_by_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


def _put(victim: Victim, content: bytes) -> None:
    victim.path.write_bytes(content)


# --- what a system does that tests run as root on a good disk ---------------------------------------------------------

#: Files whose content the system reports as unreadable, in this process; see `bad_disk`.
BAD_SECTORS: dict[tuple[int, int], int] = {}


def wear_out(path: Path) -> None:
    """What is in a file now cannot be read any more, in this process; see `bad_disk`."""
    descriptor = os.open(path, os.O_RDONLY)  # as long as it is open no new file gets its number
    BAD_SECTORS[_inode(os.fstat(descriptor))] = descriptor


def repair_disk() -> None:
    """Nothing is unreadable any more."""
    while BAD_SECTORS:
        os.close(BAD_SECTORS.popitem()[1])


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


@dataclass
class Met:
    """How often a fault was met."""

    count: int = 0


@contextmanager
def bad_disk() -> Iterator[Met]:
    """In this process reading what is in `BAD_SECTORS` fails as on a disk with bad sectors (EIO).

    Gives how often that has happened.
    """
    met = Met()
    real: Mapping[str, Callable[..., Any]] = {name: getattr(os, name) for name in ("pread", "preadv")}

    def failing(name: str) -> Callable[..., Any]:
        def read(descriptor: int, *arguments: Any) -> Any:
            if BAD_SECTORS and _inode(os.fstat(descriptor)) in BAD_SECTORS:
                met.count += 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real[name](descriptor, *arguments)

        return read

    try:
        for name in real:
            setattr(os, name, failing(name))
        yield met
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def obey_modes() -> None:
    """From now on this thread, and those that it starts, may read what the modes of files allow, also as root.

    It gives up CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH; see capabilities(7) and capset(2).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: the low words, then the high ones
    for done in (libc.capget(header, sets), _without(sets, 1, 2), libc.capset(header, sets)):
        assert done == 0, os.strerror(ctypes.get_errno())


def _without(sets: Any, *capabilities: int) -> int:
    for capability in capabilities:
        for which in (0, 1):  # access(2) asks what root may have, and not what this thread has
            sets[which] &= ~(1 << capability)
    return 0


# --- where ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """The files of one checkpoint, wherever they lie, in paths below the root of all places.

    Attributes:
        shards: of each shard its copies: the one on the host that wrote it first, as far as there is one.
        manifests: all of them.
    """

    shards: Mapping[int, Sequence[Path]]
    manifests: Sequence[Path]

    @classmethod
    def newest(cls, root: Path) -> Stored:
        """What there is of the newest save."""
        there = [path for path in root.rglob("step-*.e*") if path.is_dir()]
        newest = max(SaveId.parse(path.name) for path in there).folder_name
        folders = sorted(path for path in there if path.name == newest)
        shards: dict[int, list[Path]] = {}
        for path in (path for folder in folders for path in sorted(folder.glob("shard-*.shard"))):
            shards.setdefault(int(path.name.split("-")[1]), []).append(path.relative_to(root))
        for shard, copies in shards.items():
            copies.sort(key=lambda path: (path.parts[0] != f"host-{shard}", path))
        manifests = [path.relative_to(root) for folder in folders for path in sorted(folder.glob("manifest.json"))]
        return cls(shards, manifests)


def copied(saved: Path, root: Path) -> None:
    """A copy of all places, for one more fault."""
    for folder in root.rglob("*"):
        if folder.is_dir() and not folder.is_symlink():
            folder.chmod(0o700)
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(saved, root, symlinks=True)
