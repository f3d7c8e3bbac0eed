"""Which workers compute the same bits: those of one kind of processor, library and number of threads."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import torch


def kind_of_worker() -> str:
    """What the bits of a computation depend on, on this worker, for people.

    Sums are cut by the number of threads, and libraries choose their code by the processor.
    """
    parts = [
        f"torch {torch.__version__}",
        f"{_processor()} ({torch.backends.cpu.get_cpu_capability()})",
        f"{torch.get_num_threads()} threads",
    ]
    if torch.cuda.is_available():
        parts.append(f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")
    return ", ".join(parts)


def number_of(text: str) -> int:
    """A number for a text, from 0 to 2**62: for a message.

    >>> number_of("a") == number_of("a") != number_of("b")
    True
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
