"""Whether checkpoints can be written to a folder: everything that publishing one needs is done there once, hidden."""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torchelastic.checkpoint.errors import OTHER_FILE_SYSTEM, REMEDIES_BY_CALL, CheckpointError
from torchelastic.checkpoint.format.abilities import ALL_ABILITIES, FALLBACKS, FolderAbilities
from torchelastic.checkpoint.format.disk import Disk
from torchelastic.doctor.findings import Finding, Level
from torchelastic.file_systems import Call, file_system_of
from torchelastic.text import bytes_text

NAME = "checkpoint folder"
#: How the hidden folder begins in which things are tried; a doctor that was killed leaves it behind.
PROBE_PREFIX = ".torchelastic-doctor-"
#: Written to see how fast it goes: so much, or as much as can be written in this time.
PROBE_BYTES, PROBE_S = 16 * 2**20, 1.5
#: With less than this there is a warning.
LITTLE_BYTES = 2**30
_CHUNK_BYTES = 2**20
_VOLATILE = ("tmpfs", "ramfs", "overlay", "aufs")


@dataclass(frozen=True)
class FolderFacts:
    """What was seen.

    Attributes:
        path: the folder.
        is_there: whether it is there and a folder.
        in_the_way: it is there and no folder.
        may_be_made: it is not there, and this user may make it.
        failed: what could not be done in it, with the reason; "" if all could.
        file_system: its type, such as "ext4"; "" if it is not known.
        free_bytes: what is left for this user.
        size_bytes: of the file system.
        free_files: how many more files fit; None: not known.
        bytes_per_s: how fast one stream was written and forced to the disk; None: not tried.
        abilities: what its file system can do, as it was tried.
        is_absent: whether what failed is a call that the file system does not have.
    """

    path: str
    is_there: bool = True
    in_the_way: bool = False
    may_be_made: bool = False
    failed: str = ""
    file_system: str = ""
    free_bytes: int = 0
    size_bytes: int = 0
    free_files: int | None = None
    bytes_per_s: float | None = None
    abilities: FolderAbilities = ALL_ABILITIES
    is_absent: bool = False


def judge_folder(facts: FolderFacts, needed_bytes: int | None) -> list[Finding]:
    """What prevents saving there. Pure.

    Args:
        facts: see there.
        needed_bytes: the state that the ranks of this host save together; None: not known.
    """
    path = facts.path
    if facts.in_the_way:
        return [Finding(NAME, Level.ERROR, f"{path} is no folder", "a file is in the way", "choose another path")]
    if not facts.is_there:
        if facts.may_be_made:
            because = "managers make it themselves; but if it should be a mount, that is missing"
            return [Finding(NAME, Level.WARNING, f"{path} does not exist", because, f"mount it, or mkdir -p {path}")]
        because = "and this user may not make it"
        remedy = f"have it made and given to this user, or mount what should be there: {path}"
        return [Finding(NAME, Level.ERROR, f"{path} does not exist", because, remedy)]
    if facts.failed:
        remedy = "make it writable for this user, or choose another folder; see the reason"
        if facts.is_absent:
            remedy = OTHER_FILE_SYSTEM
        return [Finding(NAME, Level.ERROR, f"no checkpoint can be published in {path}", facts.failed, remedy)]
    found = [*_judge_kind(facts), *_judge_space(facts, needed_bytes)]
    return found or [Finding(NAME, Level.OK, _described(facts), _time_text(facts, needed_bytes))]


def _judge_kind(facts: FolderFacts) -> list[Finding]:
    found = []
    if facts.file_system in _VOLATILE:
        kind = facts.file_system
        why = "memory" if kind in ("tmpfs", "ramfs") else "the container's own layer"
        because, remedy = (
            f"{kind} is {why}: it is gone with it",
            "choose a folder on durable storage, or mount one there",
        )
        found.append(Finding(NAME, Level.WARNING, f"{facts.path} does not last", because, remedy))
    for call, fallback in FALLBACKS.items():
        if fallback.costs and not facts.abilities.has(call):
            what, because = f"{facts.path} has no {call.value}", f"so {fallback.instead}"
            remedy = REMEDIES_BY_CALL.get(call, OTHER_FILE_SYSTEM)
            found.append(Finding(NAME, Level.WARNING, what, because, remedy))
    return found


def _judge_space(facts: FolderFacts, needed_bytes: int | None) -> list[Finding]:
    if not facts.abilities.has_free_space:
        return []
    what, remedy = _described(facts), "free space, keep fewer checkpoints (keep=N), or choose another folder"
    if needed_bytes is not None and facts.free_bytes < 2 * needed_bytes:
        level = Level.ERROR if facts.free_bytes < needed_bytes else Level.WARNING
        because = f"the next checkpoint ({bytes_text(needed_bytes)}) is written before the last one goes"
        return [Finding(NAME, level, what, because, remedy)]
    if needed_bytes is None and facts.free_bytes < LITTLE_BYTES:
        level = Level.ERROR if facts.free_bytes < _CHUNK_BYTES else Level.WARNING
        return [Finding(NAME, level, what, f"that is less than {bytes_text(LITTLE_BYTES)}", remedy)]
    if facts.free_files is not None and facts.free_files < 1000:
        return [Finding(NAME, Level.WARNING, f"{facts.path} has room for {facts.free_files} files", what, remedy)]
    return []


def _described(facts: FolderFacts) -> str:
    speed = "" if facts.bytes_per_s is None else f", {bytes_text(facts.bytes_per_s)}/s in one stream"
    known = ": ".join(filter(None, (facts.file_system, str(facts.abilities))))
    room = f"{bytes_text(facts.free_bytes)} of {bytes_text(facts.size_bytes)} free"
    if not facts.abilities.has_free_space:
        room = "room unknown"
    return f"{facts.path}{f' ({known})' if known else ''}: {room}{speed}"


def _time_text(facts: FolderFacts, needed_bytes: int | None) -> str:
    if needed_bytes is None or not facts.bytes_per_s:
        return ""
    return f"{bytes_text(needed_bytes)} take about {needed_bytes / facts.bytes_per_s:.0f} s at that speed"


class _QuietDisk(Disk):
    """One that has found out nothing yet; what it finds out is told as a finding."""

    def report_lack(self, call: Call, folder: Path, error: OSError | None) -> None:
        pass


def gather_folder(path: Path, *, disk: Disk | None = None, clock: Callable[[], float] = time.monotonic) -> FolderFacts:
    """Try in a hidden folder what publishing a checkpoint needs, and remove it.

    Args:
        path: the folder; it is not made if it is not there.
        disk: what writes; None: a new one, which has found out nothing yet.
        clock: monotonic seconds.
    """
    if not path.is_dir():
        above = next((parent for parent in path.absolute().parents if parent.exists()), Path("/"))
        may_be_made = above.is_dir() and os.access(above, os.W_OK | os.X_OK)
        return FolderFacts(str(path), False, os.path.lexists(path), may_be_made)
    disk = _QuietDisk() if disk is None else disk
    status = os.statvfs(path)
    facts = FolderFacts(
        str(path),
        file_system=file_system_of(path),
        free_bytes=status.f_bavail * status.f_frsize,
        size_bytes=status.f_blocks * status.f_frsize,
        free_files=status.f_favail if status.f_files else None,
        abilities=replace(ALL_ABILITIES, has_free_space=status.f_blocks > 0),
    )
    probe = path / f"{PROBE_PREFIX}{secrets.token_hex(8)}"
    try:
        probe.mkdir(mode=0o700)
        try:
            bytes_per_s = _try(probe, disk, clock)
            return replace(facts, bytes_per_s=bytes_per_s, abilities=_found(probe, disk, facts.abilities))
        finally:
            disk.remove_folder(probe)
    except CheckpointError as error:
        return replace(facts, failed=f"{error.strerror or error}", is_absent=error.absent is not None)
    except OSError as error:
        return replace(facts, failed=f"could not create a folder: {error.strerror}")


def _try(probe: Path, disk: Disk, clock: Callable[[], float]) -> float:
    """Write, force to the disk, rename over another file, publish under a name that must be free; rename the folder."""
    below = probe / "below"
    disk.make_folder(below)
    first, second = below / "first", below / "second"
    descriptor = disk.create(first)
    try:
        began_s, written = clock(), 0
        chunk = memoryview(secrets.token_bytes(_CHUNK_BYTES))  # nothing that a file system could pack
        while written < PROBE_BYTES and clock() - began_s < PROBE_S:
            disk.write(descriptor, [chunk], first)
            written += len(chunk)
        disk.sync(descriptor, first)
        took_s = clock() - began_s
    finally:
        os.close(descriptor)
    os.close(disk.create(second))
    disk.rename(first, second)
    disk.publish(second, below / "published")
    disk.sync_folder(below)
    if not disk.rename_folder(below, probe / "renamed"):
        disk.rename_files(below, probe / "renamed", last="published")
    return written / max(took_s, 1e-6)


def _found(probe: Path, disk: Disk, known: FolderAbilities) -> FolderAbilities:
    """What the disk has found out, and whether files have modes and names a case."""
    published = probe / "renamed" / "published"
    try:
        mode = stat.S_IMODE(published.stat().st_mode) ^ stat.S_IXUSR
        published.chmod(mode)
        has_modes = stat.S_IMODE(published.stat().st_mode) == mode
    except OSError:
        has_modes = False
    has_case = not published.with_name(published.name.upper()).exists()
    return replace(known, lacking=disk.abilities(probe).lacking, has_modes=has_modes, has_case=has_case)


def check(path: Path, needed_bytes: int | None) -> Sequence[Finding]:
    """Check one folder."""
    return judge_folder(gather_folder(path), needed_bytes)
