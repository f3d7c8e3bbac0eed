"""The location of a thread, by its Python frames: in a collective or in user code, and in which line of the user's."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

import torch

import torchelastic
from torchelastic.p2p.hangs import Place, ThreadSample
from torchelastic.processes.family import below, stat_fields

_TORCH = str(Path(torch.__file__).parent) + "/"
_OURS = str(Path(torchelastic.__file__).parent) + "/"
_STANDARD_LIBRARY = str(Path(traceback.__file__).parent) + "/"
#: In there a thread waits for its peers; a backward pass does at its end, in C++, where there are no more frames.
_WAITING = (
    f"{_TORCH}distributed/",
    f"{_TORCH}autograd/",
    f"{_TORCH}nn/parallel/",
    f"{_OURS}p2p/",
    f"{_OURS}distributed/",
)
#: Frames between the user's call of a collective and torch's, which mean nothing to a reader.
_WRAPPER = f"{_OURS}p2p/abortable.py"
#: Of a line of a program, for people.
MAX_WHERE = 200


class Line(NamedTuple):
    """One frame of a stack."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.number} {self.function}"


def lines_of_frame(frame: FrameType | None) -> list[Line]:
    """A living stack, innermost first."""
    lines = []
    while frame is not None:
        lines.append(Line(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return lines


def lines_of_error(trace: TracebackType | None) -> list[Line]:
    """The stack on which an exception was raised, innermost first."""
    walked = [Line(f.f_code.co_filename, number, f.f_code.co_name) for f, number in traceback.walk_tb(trace)]
    return walked[::-1]


def place_of(lines: Iterable[Line]) -> Place:
    """Whether the innermost frames, up to the first of the user's, are those of a collective or of a backward pass."""
    for line in lines:
        if line.file.startswith(_WAITING):
            return Place.COLLECTIVE
        if _is_users(line):
            return Place.USER_CODE
    return Place.USER_CODE


def where(lines: Sequence[Line]) -> str:
    """The innermost line of the user's program, and torchelastic's below it if it is there.

    Empty if there is no such line. At most `MAX_WHERE` characters.
    """
    for depth, line in enumerate(lines):
        if _is_users(line):
            ours = next((one for one in lines[:depth] if one.file.startswith(_OURS) and one.file != _WRAPPER), None)
            return (f"{line}" if ours is None else f"{line} > {ours}")[:MAX_WHERE]
    return ""


def sample_thread(thread_id: int) -> tuple[ThreadSample, str]:
    """Sample a thread of this process; returns also `where` it is.

    Keeps no frame, which would keep its tensors alive.
    """
    frame = sys._current_frames().get(thread_id)
    lines = lines_of_frame(frame)
    point: list[object] = []
    while frame is not None:
        point += (frame.f_code, frame.f_lasti)
        frame = frame.f_back
    native_id = next((thread.native_id for thread in threading.enumerate() if thread.ident == thread_id), None)
    sample = ThreadSample(
        at_s=time.monotonic(),
        place=place_of(lines),
        point=tuple(point),
        cpu_s=_cpu_s(thread_id),
        io_bytes=_io_bytes(native_id),
        queued_s=_queued_s(native_id),
        children=_children() if place_of(lines) is Place.USER_CODE else {},
        may_spin=torch.cuda.is_initialized(),  # type: ignore[no-untyped-call]  # torch has no types here
    )
    return sample, where(lines)


def _is_users(line: Line) -> bool:
    if line.file.startswith((_TORCH, _OURS)) or line.file.startswith("<frozen "):
        return False
    return "site-packages" in line.file or not line.file.startswith(_STANDARD_LIBRARY)


def _cpu_s(thread_id: int) -> float:
    """Processor time of a thread so far; 0 where the system does not report it."""
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread_id))
    except (AttributeError, OSError):
        return 0.0


def _io_bytes(native_id: int | None) -> int:
    """How much a thread has read and written so far; 0 where the system does not report it.

    Of a write that has not returned the kernel counts at least what it has taken already.
    """
    return _bytes_of(f"/proc/self/task/{native_id}/io")


def _bytes_of(path: str) -> int:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split(": ", 1) for line in lines)
    return sum(int(counts.get(name, 0)) for name in ("rchar", "wchar", "read_bytes", "write_bytes"))


def _children() -> dict[int, tuple[float, int]]:
    """Of each process below this one: processor time so far, and how much it has read and written."""
    found = {}
    for pid in below(os.getpid()):
        fields = stat_fields(pid)
        if len(fields) > 12:
            cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            found[pid] = cpu_s, _bytes_of(f"/proc/{pid}/io")
    return found


def _queued_s(native_id: int | None) -> float:
    """For how long a thread has waited for a free processor so far; 0 where the system does not report it.

    See "/proc/<pid>/schedstat" in the kernel's documentation of its scheduler's statistics.
    """
    try:
        return int(Path(f"/proc/self/task/{native_id}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
