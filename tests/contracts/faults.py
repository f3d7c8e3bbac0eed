"""A job of one process that is killed, or is told that the disk is full, at its n-th call to the disk.

The calls are counted by Python's own profiler, so that nothing of the package is replaced: whatever way it takes to the
disk, it passes here.
"""

from __future__ import annotations

import errno
import gc
import importlib
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

Fault = Literal["kill", "full"]

#: What changes something on a disk; a file that was only created is seen at the call after it. "store" is no call to
#: the system: it is how the package writes into mapped memory.
CHANGES = {
    *("mkdir", "symlink", "link", "rename", "replace", "unlink", "remove", "rmdir"),
    *("write", "pwrite", "writev", "posix_fallocate", "ftruncate", "truncate", "fsync", "store"),
}
#: Of these, what a full disk refuses; of the rest, a system has no reason to.
NEED_ROOM = {"mkdir", "symlink", "link", "rename", "replace", "write", "pwrite", "writev", "posix_fallocate", "fsync"}


@dataclass(frozen=True)
class Ended:
    """How a child has ended.

    Attributes:
        value: what its action returned; None if it was killed.
        was_killed: by SIGKILL.
    """

    value: Any
    was_killed: bool


def in_child(action: Callable[[], Any]) -> Ended:
    """Does something in a forked process: torch is imported once for all. Its value has to fit into JSON."""
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(here)
            gc.freeze()  # else a collection copies all pages of the parent's objects, for a second
            with os.fdopen(there, "w") as end:
                json.dump(action(), end)
            status = 0
        finally:
            os._exit(status)
    os.close(there)
    with os.fdopen(here) as end:
        text = end.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), f"the child ended with {status}"
    return Ended(json.loads(text) if status == 0 else None, status != 0)


def warm_up(actions: Sequence[Callable[[], object]]) -> None:
    """Imports what these actions import, so that no child has to; the actions themselves run in a child."""

    def imported() -> list[str]:
        for action in actions:
            action()
        return [name for name in sys.modules if name.partition(".")[0] in ("torch", "torchelastic", "fsspec")]

    for name in in_child(imported).value:
        with suppress(ImportError):
            importlib.import_module(name)


def with_fault(action: Callable[[], Any], fault: Fault, number: int) -> Callable[[], list[Any]]:
    """The action with a fault at the call of that number, counted from 1; it gives also whether it came to that."""
    numbers, struck = itertools.count(1), threading.Event()
    counted = CHANGES if fault == "kill" else NEED_ROOM

    def profile(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call":
            name, module = function.__name__, getattr(function, "__module__", None)
            is_one = name in counted and (module in ("posix", "io", "_io") or _is_file(function))
        else:
            is_one = event == "call" and frame.f_code.co_name == "store" and "store" in counted
        if is_one and next(numbers) == number:
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            struck.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def acted() -> list[Any]:
        return [under_profile(profile, action), struck.is_set()]

    return acted


def under_profile(profile: Callable[[FrameType, str, Any], None], action: Callable[[], Any]) -> Any:
    """What an action returns whose calls, and those of the threads that it starts, are shown to `profile` before."""
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        return action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _is_file(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    return hasattr(owner, "fileno")


def numbers() -> Iterator[int]:
    """For a sweep that ends by itself; the bound is for one that does not."""
    return iter(range(1, 1000))
