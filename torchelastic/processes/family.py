"""Which processes a process has started, and what those have started: as /proc shows it now."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from torchelastic.text import escaped

_PROC = Path("/proc")


def children() -> Mapping[int, list[int]]:
    """The children of each process that this one sees, by its pid; empty where there is no /proc."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for entry in _PROC.glob("[0-9]*"):
        fields = stat_fields(int(entry.name))
        if len(fields) > 1:
            found[int(fields[1])].append(int(entry.name))
    return found


def nearest(pid: int, is_one: Callable[[int], bool]) -> list[int]:
    """Of a process and all below it those that are one, and none that is below another of them.

    Args:
        pid: the process.
        is_one: asked of its pid first, then of those of its children, ..; may raise OSError, for one that has ended.

    >>> import os
    >>> nearest(os.getpid(), lambda pid: True) == [os.getpid()]
    True
    """
    return _nearest(pid, is_one, children())


def above(pid: int) -> list[int]:
    """The parent of a process, its parent, ..: as far as they are seen here."""
    found: list[int] = []
    while len(fields := stat_fields(found[-1] if found else pid)) > 1 and int(fields[1]) > 0:
        found.append(int(fields[1]))
    return found


def below(pid: int) -> list[int]:
    """All that a process has started, and what those have; without itself."""
    if not (_PROC / str(pid) / "task" / str(pid) / "children").exists():  # a kernel without these lists
        all_children, found = children(), [pid]
        for each in found:
            found += all_children.get(each, [])
        return found[1:]
    found = [pid]
    for each in found:
        for listed in _PROC.glob(f"{each}/task/*/children"):
            with suppress(OSError):  # it has ended since
                found += map(int, listed.read_text().split())
    return found[1:]


def in_session(session: int) -> list[int]:
    """The processes of a session, by the process that has begun it, which may have ended; without zombies."""
    found = []
    for entry in _PROC.glob("[0-9]*"):
        fields = stat_fields(int(entry.name))
        if len(fields) > 3 and fields[0] != "Z" and int(fields[3]) == session:
            found.append(int(entry.name))
    return sorted(found)


def command_of(pid: int) -> str:
    """The command line of a process; empty: it has ended, or shows none."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return b" ".join(words).decode(errors="replace").strip()


def command_text(pid: int, most: int = 100) -> str:
    """The command line of a process for people, in one printable line of so many characters; empty: as `command_of`."""
    text = escaped(" ".join(command_of(pid).split()))
    return text if len(text) <= most else f"{text[:most]}.."


def stat_fields(pid: int) -> list[str]:
    """What follows the name of the process in its /proc/pid/stat (proc(5)); empty: there is no such process."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _nearest(pid: int, is_one: Callable[[int], bool], all_children: Mapping[int, list[int]]) -> list[int]:
    try:
        if is_one(pid):
            return [pid]
    except OSError:
        pass
    return [found for child in all_children.get(pid, []) for found in _nearest(child, is_one, all_children)]
