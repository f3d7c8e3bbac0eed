"""Jobs of several ranks that are killed, or stopped for a while: forked from a process that has imported everything.

When a rank is killed, the others are left alone until they end by themselves: that is when they could do most harm.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.process.fork_server import fork_server
from tests.process.forked_ranks import Ended, answer_with, answers_of
from tests.waiting import wait_until

#: How long the others are waited for when a rank was killed or stopped.
ENDING_S = 40.0
GROUP_S = 20.0


@dataclass(frozen=True)
class Stop:
    """A rank that stops itself (SIGSTOP), and what has to happen before it goes on (SIGCONT).

    Attributes:
        rank: which.
        until: a file that has to be there; None: all other ranks have ended.
        meanwhile: function, arguments and number of ranks of another job that runs then.
    """

    rank: int
    until: Path | None = None
    meanwhile: tuple[Callable[..., Any], tuple[Any, ...], int] | None = None


class Nursery:
    """Forks jobs."""

    def __init__(self) -> None:
        self._open()

    def _open(self) -> None:
        context = fork_server()
        self._end, there = context.Pipe()
        self._process = context.Process(target=_be_nursery, args=(there,))
        self._process.start()
        there.close()

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: int,
        group_s: float = GROUP_S,
        stop: Stop | None = None,
    ) -> list[Ended]:
        """Runs a function on each rank of a new gloo group, until all have ended by themselves, or were killed.

        Args:
            function: of a module.
            arguments: for it.
            ranks: how many.
            group_s: the time limit of the process group.
            stop: one of them stops itself.

        Returns:
            How each has ended; behind them, the ranks of the job that ran while one was stopped.
        """
        try:
            self._end.send((function, arguments, ranks, group_s, stop))
            assert self._end.poll(4 * ENDING_S), "the processes do not end"
            answer = self._end.recv()
        except BaseException:  # a time limit of pytest, say: the answer that is still to come is no other test's
            self.close()
            self._open()
            raise
        assert not isinstance(answer, str), answer
        ended: list[Ended] = answer
        return ended

    def close(self) -> None:
        self._end.close()
        self._process.join(10)
        self._process.kill()


def _be_nursery(end: Connection) -> None:
    torch.set_num_threads(1)
    answer_with(end, _fork)


def _fork(function: Callable[..., Any], arguments: Any, ranks: int, group_s: float, stop: Stop | None) -> list[Ended]:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ends: list[Connection] = []
        processes: list[Any] = []
        try:
            for rank in range(ranks):
                here, there = context.Pipe()
                ends.append(here)
                target = (there, rank, ranks, f"{folder}/store", group_s, function, arguments)
                processes.append(context.Process(target=_be_rank, args=target))
                processes[-1].start()
                there.close()
            further: list[Ended] = []
            answers: dict[int, tuple[Any, str | None]] = {}
            if stop is not None:
                if stop.until is None:
                    answers = answers_of({rank: end for rank, end in enumerate(ends) if rank != stop.rank}, ENDING_S)
                wait_until(lambda: _is_stopped(processes[stop.rank].pid), ENDING_S, f"rank {stop.rank} stops")
                wait_until(lambda: stop.until is None or stop.until.exists(), ENDING_S, f"{stop.until} is there")
                if stop.meanwhile is not None:
                    other, others_arguments, others = stop.meanwhile
                    further = _fork(other, others_arguments, others, group_s, None)
                os.kill(processes[stop.rank].pid, signal.SIGCONT)
            answers |= answers_of({rank: end for rank, end in enumerate(ends) if rank not in answers}, ENDING_S)
            for process in processes:
                process.join(20)
            return [Ended(*answers[rank], each.exitcode) for rank, each in enumerate(processes)] + further
        finally:
            for process, here in zip(processes, ends, strict=False):
                process.kill()
                process.join(20)
                here.close()


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _be_rank(
    end: Connection, rank: int, ranks: int, store: str, group_s: float, function: Callable[..., Any], arguments: Any
) -> None:
    warnings.simplefilter("ignore")
    # after a fork torch makes a new thread pool at its first use, without a lock: two threads at once would fail
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(ENDING_S - 5, file=2)
    try:
        timeout = timedelta(seconds=group_s)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timeout)
        answer: tuple[Any, str | None] = function(*arguments), None
    except BaseException as error:
        answer = None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    end.send(answer)
    end.close()
    os._exit(0 if answer[1] is None else 1)  # other ranks may be gone: nothing is waited for
