"""Which process an agent is, so that a later agent of the same host can tell whether it still lives."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from torchelastic.foreign_json import Fields, RecordError, decode_json

log = logging.getLogger(__name__)

#: No process has a larger number: a pid is a C int.
MAX_PID = 2**31 - 1
_MOST_BYTES = 10_000
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


def has_ended(about: bytes, key: str = "what is told of a process") -> bool:
    """Whether the process that wrote this certainly does not run any more.

    False wherever that cannot be known: it ran before the last boot (hosts with one name are not always one host), or
    in another container, or the text is none of ours, which is logged with the key that it stands under.
    """
    here = this_process()
    try:
        other = Fields(key, decode_json(key, about, most_bytes=_MOST_BYTES))
        is_here = bool(here["boot"]) and all(other.text(name, None) == here[name] for name in ("boot", "namespace"))
        pid, started_ticks = other.whole("pid", None, most=MAX_PID), other.whole("started_ticks", None, least=-1)
    except RecordError as error:
        log.error("ignored: %s", error)
        return False
    return is_here and _started_ticks(pid) != started_ticks


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
