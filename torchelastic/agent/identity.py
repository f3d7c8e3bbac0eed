"""Which process an agent is, so that a later agent of the same host can tell whether it still lives."""

from __future__ import annotations

import json
import os
from pathlib import Path

_PROC = Path("/proc")


def this_process() -> dict[str, str | int]:
    """Names this process among all that have ever run: boot, pid namespace, pid and the moment of its start.

    Where the system does not tell (not Linux), `boot` is empty and nothing can be said of such a process later.
    """
    namespace = _PROC / "self/ns/pid"
    return {
        "boot": _read(_PROC / "sys/kernel/random/boot_id"),
        "namespace": str(namespace.readlink()) if namespace.exists() else "",
        "pid": os.getpid(),
        "started_ticks": _started_ticks(os.getpid()),
    }


def has_ended(about: bytes) -> bool:
    """Whether the process that wrote this certainly does not run any more.

    False wherever that cannot be known: it ran before the last boot (hosts with one name are not always one host), or
    in another container, or the text is none of ours.
    """
    here = this_process()
    try:
        other = json.loads(about)
        same_place = bool(here["boot"]) and all(other[field] == here[field] for field in ("boot", "namespace"))
        pid, started_ticks = int(other["pid"]), int(other["started_ticks"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return False
    return same_place and _started_ticks(pid) != started_ticks


def _started_ticks(pid: int) -> int:
    """When a process was started, in the kernel's ticks since the boot: unlike seconds of the day they are never set.

    -1 where there is no such process. See proc(5), /proc/pid/stat: the 22nd field, the 2nd one being in parentheses.
    """
    text = _read(_PROC / str(pid) / "stat")
    fields = text.rpartition(")")[2].split()
    is_a_zombie = fields[:1] == ["Z"]
    return int(fields[19]) if len(fields) > 19 and not is_a_zombie else -1


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
