"""Two real processes in a gloo group, of which the second one is to die."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.process.forked_ranks import run_ranks


def survivor_of(folder: Path, survivor: Callable[[Path], Any], victim: Callable[[Path], None]) -> Any:
    """Run two functions of a module as ranks 0 and 1; returns what the survivor returned.

    Raises AssertionError if it raised, or if the victim was not killed.
    """
    kept, dead = run_ranks(_member, folder, survivor, victim, ranks=2, others_go_on=True)
    assert kept.error is None, kept.error
    assert dead.was_killed, "the victim was not killed"
    return torch.load(folder / "result-0", weights_only=True)


def _member(folder: Path, *functions: Callable[[Path], Any]) -> None:
    rank = dist.get_rank()
    torch.save(functions[rank](folder), folder / f"result-{rank}")  # tensors in a pipe would end with this process


def dies_at_reduction(number: int) -> None:
    """Have this process kill itself when it is about to begin this all-reduce (1: the first); those before are done."""
    original = dist.all_reduce
    begun: list[Any] = []

    def reduce(tensor: torch.Tensor, **options: Any) -> Any:
        if len(begun) + 1 == number:
            for work in begun:
                work.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        begun.append(original(tensor, **options))
        return begun[-1]

    setattr(dist, "all_reduce", reduce)  # noqa: B010 - mypy refuses the plain assignment
