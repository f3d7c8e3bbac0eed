"""Many saves at a steady pace: does anything grow?"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.memory_tier.processor_time import descendants

if TYPE_CHECKING:
    from benchmarks.memory_tier.contender import Contender
    from benchmarks.memory_tier.shared_bytes import SharedBytes

SAMPLES = 60
#: The first part of the time, in which memory is allocated, is not counted.
WARM_UP = 0.1


@dataclass(frozen=True)
class Sample:
    """What there is at one moment, between two saves.

    Attributes:
        at_s: since the beginning.
        resident_bytes: private memory of this process and of those that it has started (the state and the
            checkpoints are shared pages; the checkpoints are counted as files).
        file_bytes: allocated in the folder of the checkpoints.
        files: how many there, folders too.
        descriptors: open in this process.
        threads: of this process.
    """

    at_s: float
    resident_bytes: int
    file_bytes: int
    files: int
    descriptors: int
    threads: int


def endure(
    contender: Contender, memory: SharedBytes, folder: Path, seconds: float, per_s: float, checkpointer: str
) -> dict[str, Any]:
    """Saves in the background, `per_s` times a second, and says what has grown and how often it came too late.

    Args:
        contender: who saves.
        memory: what; a part of it changes before each save.
        folder: where the checkpoints are.
        seconds: how long.
        per_s: saves per second.
        checkpointer: a thread or a process.
    """
    kind = AsyncCheckpointerType[checkpointer.upper()]
    samples: list[Sample] = []
    blocking_ms: list[float] = []
    late = saves = 0
    pending: Future[Any] | None = None
    began_s = time.perf_counter()
    while (now_s := time.perf_counter() - began_s) < seconds:
        due_s = saves / per_s
        if now_s < due_s:
            time.sleep(due_s - now_s)
        if pending is not None:
            late += not pending.done()
            pending.result()
            contender.tidy()
            if time.perf_counter() - began_s >= len(samples) * seconds / SAMPLES:
                samples.append(sample(time.perf_counter() - began_s, folder))
        memory.payload.change()
        call_s = time.perf_counter()
        pending = contender.begin(kind)
        blocking_ms.append((time.perf_counter() - call_s) * 1e3)
        saves += 1
    if pending is not None:
        pending.result()
    took_s = time.perf_counter() - began_s
    samples.append(sample(took_s, folder))
    return {
        "saves": saves,
        "per_s": round(saves / took_s, 2),
        "unfinished_when_the_next_was_due": late,
        "blocking_ms": round(statistics.median(blocking_ms), 2),
        "blocking_worst_ms": round(max(blocking_ms), 2),
        **growth(samples),
    }


def growth(samples: Sequence[Sample]) -> dict[str, Any]:
    """What has grown: the median of the last quarter less that of the first one after the warm-up, and the extremes."""
    counted = samples[int(len(samples) * WARM_UP) :]
    quarter = max(len(counted) // 4, 1)
    rows: dict[str, Any] = {}
    for name in list(asdict(counted[0]))[1:]:
        values = [getattr(each, name) for each in counted]
        rows[name] = {
            "growth": statistics.median(values[-quarter:]) - statistics.median(values[:quarter]),
            "min": min(values),
            "max": max(values),
        }
    return rows | {"samples": len(counted)}


def sample(at_s: float, folder: Path) -> Sample:
    """What there is now."""
    found = list(_statuses(folder))
    process_ids = [os.getpid(), *descendants(os.getpid())]
    return Sample(
        at_s=round(at_s, 1),
        resident_bytes=sum(map(_private_bytes, process_ids)),
        file_bytes=sum(status.st_blocks * 512 for status in found),
        files=len(found),
        descriptors=len(list(Path("/proc/self/fd").iterdir())),
        threads=len(list(Path("/proc/self/task").iterdir())),
    )


def _private_bytes(process_id: int) -> int:
    """Resident and of no file: `RssAnon`, see proc(5)."""
    try:
        lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
    except OSError:
        return 0  # it has ended meanwhile
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def _statuses(folder: Path) -> Iterator[os.stat_result]:
    for path in folder.rglob("*"):
        try:
            yield path.lstat()
        except FileNotFoundError:
            continue  # it was removed meanwhile
