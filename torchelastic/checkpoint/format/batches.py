"""Work on many tensors in batches, so that small ones cost no call each, and on several threads where that pays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import xxhash

from torchelastic.checkpoint.format.header import Entry
from torchelastic.processes.cpus import usable_cpus

#: How much is copied before it is hashed, so that the hash reads from the processor's cache.
CHUNK_BYTES = 2**20
#: How many tensors one call takes at most; one system call takes at most 1024 pieces of memory (IOV_MAX).
MAX_PER_BATCH = 500
#: Below this, starting threads costs more than they gain.
MIN_BYTES_PER_THREAD = 16 * 2**20
#: How many threads hash or copy where the caller does not say; memory is busy with so many.
DEFAULT_THREADS = min(4, usable_cpus())

_Result = TypeVar("_Result")


def batched(entries: Sequence[Entry]) -> list[range]:
    """Cuts a list of tensors into runs of neighbours: each about a chunk long, or one tensor that is longer.

    Returns:
        The positions in `entries`, in order, without gaps.
    """
    runs, begin, size_bytes = [], 0, 0
    for index, entry in enumerate(entries):
        if index > begin and (size_bytes + entry.size_bytes > CHUNK_BYTES or index - begin == MAX_PER_BATCH):
            runs.append(range(begin, index))
            begin, size_bytes = index, 0
        size_bytes += entry.size_bytes
    return [*runs, range(begin, len(entries))] if begin < len(entries) else runs


def over_batches(
    entries: Sequence[Entry], work: Callable[[range], list[_Result]], threads: int | None = None
) -> list[_Result]:
    """Calls `work` for each batch, on up to `threads` threads, and joins what it returns, in the entries' order.

    None: `DEFAULT_THREADS`, as it is at this moment.
    """
    runs = batched(entries)
    total_bytes = sum(entry.size_bytes for entry in entries)
    threads = DEFAULT_THREADS if threads is None else threads
    threads = max(1, min(threads, len(runs), total_bytes // MIN_BYTES_PER_THREAD))
    if threads == 1:
        return list(itertools.chain.from_iterable(map(work, runs)))
    with ThreadPoolExecutor(threads) as pool:
        try:
            running = [pool.submit(work, run) for run in runs]
        except RuntimeError:  # the interpreter ends: executors take no work any more
            return list(itertools.chain.from_iterable(map(work, runs)))
        return list(itertools.chain.from_iterable(each.result() for each in running))


def checksum_of(data: memoryview) -> str:
    """The checksum of a tensor's bytes: xxh3_64 as 16 hexadecimal digits."""
    return f"{xxhash.xxh3_64_intdigest(data):016x}"


def pieces_of(memory: memoryview, entries: Sequence[Entry], data_offset: int) -> list[memoryview]:
    """The bytes of tensors that lie in memory where their entries say, behind `data_offset` bytes."""
    begins = [data_offset + entry.offset_bytes for entry in entries]
    return [memory[begin : begin + entry.size_bytes] for begin, entry in zip(begins, entries, strict=True)]


def checksums_in(
    memory: memoryview, entries: Sequence[Entry], data_offset: int, threads: int | None = None
) -> list[str]:
    """The checksums of such tensors."""
    pieces = pieces_of(memory, entries, data_offset)
    return over_batches(entries, lambda batch: [checksum_of(pieces[index]) for index in batch], threads)
