"""Processes that have torch from their first moment: forked from one that has imported it and has done nothing else.

None outlives its pytest, however that ends, and neither does what it has started.
"""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

#: Torch takes a process two seconds, and torch._dynamo, which optimizers and DDP import, two more.
_IMPORTED = [
    "torch",
    "torch.distributed",
    "torch.distributed._functional_collectives",
    "torch._dynamo",
    "torchelastic.p2p",
]


def fork_server() -> ForkServerContext:
    """The way to start such processes; each process of pytest has one server, with the environment of its start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


def started(target: Callable[..., Any], *arguments: Any, daemon: bool = True) -> BaseProcess:
    """Start one that calls a module's function; a daemon may have no children by `multiprocessing`."""
    process = fork_server().Process(target=_begin, args=(_life()[0], target, arguments), daemon=daemon)
    process.start()
    return process


@contextmanager
def living(target: Callable[..., Any], *arguments: Any) -> Iterator[psutil.Process]:
    """One that has called a module's function, and keeps what that returns until the block ends or it is killed."""
    here, there = fork_server().Pipe()
    process = started(_live, there, target, arguments)
    there.close()
    try:
        assert here.recv() == "called"
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.join()
        here.close()


def _live(end: Connection, target: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    kept = target(*arguments)
    end.send("called")
    with suppress(EOFError):
        end.recv()
    del kept


def kill(process: BaseProcess) -> None:
    """SIGKILL for one that has called `lead_a_group`, and for all that it has started."""
    assert process.pid is not None
    with suppress(ProcessLookupError):  # it has not come so far, or all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def lead_a_group() -> None:
    """Called in such a process, or in a fork of one: the kernel kills it and its children when pytest has ended.

    Not by PR_SET_PDEATHSIG: the parent is the server, which ends only after all that it has forked. And not on a
    thread: a process that is stopped has to go, too.
    """
    os.setpgid(0, 0)
    # opened anew: of one that came from another process, the owner would be that one's as well
    descriptor = os.open(f"/proc/self/fd/{_held[0].fileno()}", os.O_RDONLY | os.O_CLOEXEC)
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_ASYNC)
    if select.select([descriptor], [], [], 0)[0]:  # it has ended before
        os.killpg(0, signal.SIGKILL)


#: In such a process: the end of the pipe that is told of pytest's end.
_held: list[Connection] = []


@cache
def _life() -> tuple[Connection, Connection]:
    """A pipe into which nothing is written: that its other end closes says that pytest has ended."""
    return fork_server().Pipe(duplex=False)


def _begin(life: Connection, target: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    _held.append(life)
    lead_a_group()
    gc.freeze()  # else each collection of garbage would copy the pages of all that the server has imported
    target(*arguments)
