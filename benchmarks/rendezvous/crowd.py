"""Many members spread over a few processes, and one parent that tells them all at once what to do."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

Answer = dict[str, Any]
Work = Callable[..., None]


class TooSlowError(Exception):
    """Not all processes have answered in time."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"not done in {limit_s:g} s")


class Crowd:
    """Starts fresh processes; ends them by SIGKILL at the end of its block, however far they are.

    Args:
        work: what each process does: called with the process's end of a pipe, its number, and `arguments`. It answers
            each message with one message.
        arguments: one set for each process.
    """

    def __init__(self, work: Work, arguments: Sequence[tuple[Any, ...]]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for number, own in enumerate(arguments):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, number, *own), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Crowd:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def ask(self, command: str, limit_s: float, last: str = "") -> list[Answer]:
        """Send a command to all processes (another one to the last of them, if given) and wait for every answer.

        Raises:
            TooSlowError: after `limit_s` an answer is missing.
            EOFError: a process has ended; its traceback is on stderr.
        """
        deadline_s = time.monotonic() + limit_s
        for pipe in self._pipes[:-1]:
            pipe.send(command)
        self._pipes[-1].send(last or command)
        answers = []
        for pipe in self._pipes:
            if not pipe.poll(max(0.0, deadline_s - time.monotonic())):
                raise TooSlowError(limit_s)
            answers.append(pipe.recv())
        return answers


def shares(members: int, processes: int) -> list[range]:
    """Which members each process runs: as equal as can be, no process without one."""
    count = min(members, processes)
    bounds = [members * number // count for number in range(count + 1)]
    return [range(low, high) for low, high in itertools.pairwise(bounds)]


def elapsed_ms(answers: Sequence[Answer]) -> float:
    """From the first process's release to the last member's end."""
    began_s = min(float(answer["released_s"]) for answer in answers)
    return 1000 * (max(float(answer["ended_s"]) for answer in answers) - began_s)
