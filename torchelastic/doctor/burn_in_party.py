"""A process of its own for each core and each GPU, which computes the same again and again, and digests the results.

`burn_in` starts `main` in a child, and reads a line of JSON for each round. That imports torch once, and forks: on a
host with 200 cores 200 imports would take all of the time. The work is of the kinds of which training consists, on
random numbers that are the same everywhere and each time.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from torchelastic.model.digest import digest

#: The random numbers of a round are those of the round so many before it.
PATTERNS = 4
#: A round is begun only if there is time for so many of the last one.
_MARGIN = 1.5
_MASK = (1 << 62) - 1


@dataclass(frozen=True)
class Sizes:
    """How much one round computes.

    Attributes:
        matrix: rows of a square matrix.
        products: matrix products in a row.
        numbers: elements of a vector.
    """

    matrix: int
    products: int
    numbers: int


@dataclass(frozen=True)
class Until:
    """When it ends, whatever comes first: a time of this host's monotonic clock, or so many rounds of each."""

    time_s: float
    rounds: float


CORE, GPU = Sizes(320, 2, 1 << 19), Sizes(2048, 8, 1 << 23)
#: By name: 32-bit random numbers, the matrices among them, and integers.
Inputs = Mapping[str, torch.Tensor]
Work = Callable[[Inputs, Sizes], torch.Tensor]


def _matmul(type_: torch.dtype, part: int = 1) -> Work:
    def work(inputs: Inputs, sizes: Sizes) -> torch.Tensor:
        rows = sizes.matrix // part
        left, right = (inputs[name][:rows, :rows].to(type_) for name in ("left", "right"))
        for _ in range(sizes.products):  # what one product has got wrong is in all that follow
            left = torch.matmul(left, right) / sizes.matrix**0.5
        return left

    return work


def _reductions(inputs: Inputs, _sizes: Sizes) -> torch.Tensor:
    numbers = inputs["numbers"]
    rows = numbers.view(-1, 1024)
    return torch.cat([rows.sum(0), rows.sum(1), rows.var(1), rows.amax(0), numbers.mean().reshape(1)])


def _exp_softmax(inputs: Inputs, _sizes: Sizes) -> torch.Tensor:
    rows = inputs["numbers"].view(-1, 1024)
    return torch.softmax(rows, 1) + torch.exp(-rows.abs()) + torch.tanh(rows)


def _copy(inputs: Inputs, _sizes: Sizes) -> torch.Tensor:
    copied = inputs["integers"].clone()
    copied.copy_(copied.flip(0))
    return copied


def _hashing(inputs: Inputs, _sizes: Sizes) -> torch.Tensor:
    numbers = inputs["integers"]
    for shift in (13, 7, 17):  # xorshift, on numbers that stay positive
        numbers = ((numbers ^ (numbers << shift)) & _MASK) ^ (numbers >> shift)
    return numbers * 0x2545F4914F6CDD1D


#: The kinds of work, by their names in findings.
WORKS: Mapping[str, Work] = {
    "matmul in float32": _matmul(torch.float32),
    "matmul in float64": _matmul(torch.float64),
    "matmul in bfloat16": _matmul(torch.bfloat16, 2),  # by software on many cores
    "reductions": _reductions,
    "exp and softmax": _exp_softmax,
    "copy of memory": _copy,
    "integer hashing": _hashing,
}


def inputs_of(pattern: int, sizes: Sizes, device: str) -> Inputs:
    """The same numbers wherever it is called, made on the CPU."""
    generator = torch.Generator().manual_seed(pattern)
    shape, count = (sizes.matrix, sizes.matrix), sizes.numbers
    made = {
        "left": torch.randn(shape, generator=generator),
        "right": torch.randn(shape, generator=generator),
        "numbers": torch.randn(count, generator=generator),
        "integers": torch.randint(0, _MASK, (count,), generator=generator),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


@dataclass(frozen=True)
class Moment:
    """Who does what work, in which round."""

    party: str
    work: str
    round: int


def computed(moment: Moment, inputs: Inputs, sizes: Sizes) -> torch.Tensor:
    """The result of one kind of work; `testing.compute_faults` puts a fault in its place."""
    return WORKS[moment.work](inputs, sizes)


@torch.no_grad()
def compute(party: str, sizes: Sizes, device: str, until: Until) -> None:
    """Do round after round, and write a line for each."""
    inputs = [inputs_of(pattern, sizes, device) for pattern in range(PATTERNS)]
    parent, round_, took_s = os.getppid(), 0, 0.0
    while round_ < until.rounds and os.getppid() == parent:
        began_s = time.monotonic()
        if began_s + _MARGIN * took_s >= until.time_s:
            break
        pattern = round_ % PATTERNS
        results = {}
        for work in WORKS:
            result = computed(Moment(party, work, round_), inputs[pattern], sizes)
            results[work] = f"{digest([(work, result)]):016x}"
        _write(party=party, pattern=pattern, results=results)
        round_, took_s = round_ + 1, time.monotonic() - began_s


def _write(**document: object) -> None:
    """A line at once: shorter than PIPE_BUF, it is not mixed with those of others."""
    os.write(1, f"{json.dumps(document)}\n".encode())


def _on_core(core: int, until: Until) -> None:
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    compute(f"core {core}", CORE, "cpu", until)


def _on_gpu(index: int, until: Until) -> None:
    torch.cuda.set_device(index)
    torch.use_deterministic_algorithms(True)
    properties = torch.cuda.get_device_properties(index)
    memory_mib = properties.total_memory >> 20
    kind = f"{properties.name}, {properties.multi_processor_count} multiprocessors, {memory_mib} MiB"
    _write(party=f"GPU {index}", kind=kind)
    compute(f"GPU {index}", GPU, f"cuda:{index}", until)


def _gpus() -> int:
    """How many there are, asked of a fork: whoever has asked CUDA itself cannot fork any more."""
    pid = os.fork()
    if pid == 0:
        os._exit(min(255, torch.cuda.device_count()) if torch.cuda.is_available() else 0)
    return max(0, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _forked(work: Callable[[int, Until], None], number: int, until: Until, party: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work(number, until)
        code = 0
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is written down
        traceback.print_exc()
        _write(party=party, failure=f"{type(error).__name__}: {error}"[:500])
    finally:
        os._exit(code)


def main(until_s: float, rounds: float, cores: Collection[int]) -> None:
    """Start one for each, and write how those have ended that did not end in order; in a process with one thread.

    Args:
        until_s: see `Until`.
        rounds: see `Until`; may be infinite.
        cores: numbers of those that are tried; all GPUs that are visible are.
    """
    gpus, until = _gpus(), Until(until_s, rounds)
    parties = {f"core {core}": (_on_core, core) for core in cores} | {f"GPU {i}": (_on_gpu, i) for i in range(gpus)}
    _write(parties=list(parties))  # before there is anybody whose lines could be mixed with it
    forked = {_forked(work, number, until, party): party for party, (work, number) in parties.items()}
    while forked:
        pid, status = os.wait()
        party, code = forked.pop(pid), os.waitstatus_to_exitcode(status)
        if code:
            _write(party=party, exit_code=code)
