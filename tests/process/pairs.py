"""Two real processes in a gloo group, of which the second one is to die."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.process.fork_server import fork_server


def survivor_of(folder: Path, survivor: Callable[[Path], Any], victim: Callable[[Path], None]) -> Any:
    """Run two functions of a module as ranks 0 and 1; returns what the survivor returned.

    Raises AssertionError if it raised, or if the victim was not killed.
    """
    context = fork_server()
    here, there = context.Pipe(duplex=False)
    processes = [
        context.Process(target=_member, args=(rank, function, folder, there))
        for rank, function in enumerate((survivor, victim))
    ]
    for process in processes:
        process.start()
    try:
        assert here.poll(60), "no answer"
        failure = here.recv()
    finally:
        for process in processes:
            process.join(20)
            process.kill()
    assert failure is None, failure
    assert processes[1].exitcode == -signal.SIGKILL, "the victim was not killed"
    return torch.load(folder / "result-0", weights_only=True)


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


def _member(rank: int, function: Callable[[Path], Any], folder: Path, answer: Connection) -> None:
    try:
        torch.set_num_threads(1)
        where = f"file://{folder / 'store'}"
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2, timeout=timedelta(seconds=30))
        torch.save(function(folder), folder / f"result-{rank}")  # tensors in a pipe would end with this process
        failure = None
    except BaseException:
        failure = traceback.format_exc()
    if rank == 0:
        answer.send(failure)
