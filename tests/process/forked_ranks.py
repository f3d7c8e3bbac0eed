"""Ranks that may be killed, or stopped: each run gets fresh processes, and what takes long to import is imported once.

They are forked by a process that has imported what the functions of earlier runs need, and has done nothing else.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.process.fork_server import fork_server, kill, lead_a_group, started
from tests.waiting import stands_still, wait_until

#: How long a rank may take, also behind the death or the stop of another one.
ANSWER_S = 60


@dataclass(frozen=True)
class Stop:
    """A rank that stops itself (SIGSTOP), and what has to happen before it goes on (SIGCONT).

    Attributes:
        rank: which.
        until: a file that has to be there.
    """

    rank: int
    until: Path


@dataclass(frozen=True)
class Ended:
    """How a rank has ended.

    Attributes:
        value: what its function returned; None if it did not return.
        error: what it raised, with the traceback; None if it raised nothing.
        exit_code: of the process; negative: the signal that killed it.
    """

    value: Any
    error: str | None
    exit_code: int | None

    @property
    def was_killed(self) -> bool:
        return self.exit_code == -signal.SIGKILL


def run_ranks(
    function: Callable[..., Any],
    *arguments: Any,
    ranks: int = 1,
    environments: Sequence[Mapping[str, str]] = (),
    others_go_on: bool = False,
    stop: Stop | None = None,
) -> list[Ended]:
    """Runs a module's function on each rank of a new gloo group; with one rank there is no group.

    Args:
        function: of an importable module; returns plain values (a tensor is sent by a process that has to live).
        arguments: for it.
        ranks: how many.
        environments: further variables for each rank.
        others_go_on: when a rank is killed, the others are left alone until they end by themselves, which is when they
            could do most harm; else they are killed too, as an agent does.
        stop: one of them stops itself.

    Returns:
        How each has ended.
    """
    nursery = _nursery()
    try:
        nursery.send((function, arguments, ranks, environments, others_go_on, stop))
        assert nursery.poll(3 * ANSWER_S), "the processes do not end"
        answer = nursery.recv()
    except BaseException:  # a time limit of pytest, say: the answer that is still to come is no other test's
        nursery.close()
        _nursery.cache_clear()
        raise
    if isinstance(answer, str):
        raise AssertionError(answer)
    ended: list[Ended] = answer
    return ended


@cache
def _nursery() -> Connection:
    """The process that the ranks are forked from. It ends when this one does."""
    here, there = fork_server().Pipe()
    started(_answer_with, there, _fork, daemon=False)
    there.close()
    atexit.register(here.close)  # before multiprocessing waits for it
    return here


def _answer_with(end: Connection, fork: Callable[..., Any]) -> None:
    """What a process does that forks the others: it answers until the other end closes."""
    while True:
        try:
            request = end.recv()  # which imports the module of the function
        except EOFError:
            return
        try:
            end.send(fork(*request))
        except Exception:
            end.send(traceback.format_exc())


def _fork(
    function: Callable[..., Any],
    arguments: Any,
    ranks: int,
    environments: Sequence[Mapping[str, str]],
    others_go_on: bool,
    stop: Stop | None,
) -> list[Ended]:
    context = multiprocessing.get_context("fork")
    gc.freeze()  # what this process has imported since it began, see `fork_server`
    # a store may be writing here while its process is killed
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        ends: dict[int, Connection] = {}
        processes: list[Any] = []

        def on_killed() -> None:
            for process in () if others_go_on else processes:
                kill(process)

        try:
            for rank in range(ranks):
                ends[rank], there = context.Pipe()
                environment = _environment(rank, ranks) | dict(environments[rank] if environments else {})
                target = (there, environment, f"{folder}/store", function, arguments)
                processes.append(context.Process(target=_be_rank, args=target, daemon=True))
                processes[-1].start()
                there.close()
            if stop is not None:
                wait_until(lambda: stands_still(processes[stop.rank].pid), ANSWER_S, f"rank {stop.rank} stops")
                wait_until(stop.until.exists, ANSWER_S, f"{stop.until} is there")
                os.kill(processes[stop.rank].pid, signal.SIGCONT)
            answers = _answers_of(ends, on_killed)
            for process in processes:
                process.join(20)
            return [Ended(*answers[rank], each.exitcode) for rank, each in enumerate(processes)]
        finally:
            for process, here in zip(processes, ends.values(), strict=True):
                kill(process)
                process.join(20)
                here.close()


def values(ended: Sequence[Ended]) -> list[Any]:
    """What the ranks returned, of which all did."""
    failures = [f"rank {rank}: {one.error or one.exit_code}" for rank, one in enumerate(ended) if one.exit_code != 0]
    assert not failures, "\n".join(failures)
    return [one.value for one in ended]


def _environment(rank: int, ranks: int) -> dict[str, str]:
    if ranks == 1:
        return {"OMP_NUM_THREADS": "1"}  # else Accelerate sets a number of threads
    names = {"OMP_NUM_THREADS": 1, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def _answers_of(ends: Mapping[int, Connection], on_killed: Callable[[], None]) -> dict[int, tuple[Any, str | None]]:
    """What the ranks answer, by rank; (None, None) for one that was killed, of which `on_killed` is told."""
    answers: dict[int, tuple[Any, str | None]] = {}
    deadline_s = time.monotonic() + ANSWER_S
    waiting = dict(ends)
    while waiting:
        ready = wait(list(waiting.values()), timeout=max(0.0, deadline_s - time.monotonic()))
        assert ready, f"ranks {sorted(waiting)} do not answer"
        for rank in [rank for rank, end in waiting.items() if end in ready]:
            try:
                answers[rank] = waiting.pop(rank).recv()
            except (EOFError, ConnectionResetError):
                answers[rank] = (None, None)
                on_killed()
    return answers


def _be_rank(
    end: Connection,
    environment: Mapping[str, str],
    store: str,
    function: Callable[..., Any],
    arguments: Any,
) -> None:
    import torch
    import torch.distributed as dist

    lead_a_group()
    # after a fork torch makes a new thread pool at its first use, without a lock: two threads at once would fail
    torch.set_num_threads(1)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
    faulthandler.dump_traceback_later(ANSWER_S - 10, file=2)
    os.environ.update(environment)
    ranks = int(environment.get("WORLD_SIZE", "1"))
    try:
        if ranks > 1:
            rank = int(environment["RANK"])
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=ranks,
                timeout=timedelta(seconds=60),
            )
        answer: tuple[Any, str | None] = function(*arguments), None
    except BaseException as error:
        answer = None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    end.send(answer)
    end.close()
    os._exit(0 if answer[1] is None else 1)  # other ranks may be gone: nothing is waited for
