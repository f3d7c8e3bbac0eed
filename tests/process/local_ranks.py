"""A few processes that become the ranks of one gloo group after another: many tests, and torch is imported once."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.process.fork_server import fork_server, kill, started
from torchelastic.p2p.groups import ProcessGroups
from torchelastic.torch_internals.c10d_types import PrefixStore, Store
from torchelastic.torch_internals.process_groups import default_store

ANSWER_S = 110


@dataclass(frozen=True)
class Failed:
    """What a rank answers whose function raised."""

    kind: str
    text: str


class Crew:
    """Processes that wait for something to do.

    Args:
        size: how many.
    """

    def __init__(self, size: int) -> None:
        context = fork_server()
        self._ends: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for _ in range(size):
            here, there = context.Pipe()
            self._ends.append(here)
            self._processes.append(started(_serve, there, dict(os.environ)))

    def run(self, function: Callable[..., Any], *arguments: Any, ranks: int) -> list[Any]:
        """What a module's function returned on each rank of a new group, or `Failed`; it is called with `arguments`."""
        with tempfile.TemporaryDirectory() as folder:
            for rank, end in enumerate(self._ends[:ranks]):
                end.send((function, arguments, rank, ranks, str(Path(folder) / "store")))
            answers = []
            for rank, end in enumerate(self._ends[:ranks]):
                assert end.poll(ANSWER_S), f"rank {rank} does not answer"
                answers.append(end.recv())
            return answers

    def close(self) -> None:
        for process in self._processes:
            kill(process)
            process.join(20)


@contextmanager
def crew_of(size: int) -> Iterator[Crew]:
    crew = Crew(size)
    try:
        yield crew
    finally:
        crew.close()


def succeeded(answers: list[Any]) -> list[Any]:
    """The answers, of which none is a failure."""
    failures = [f"rank {rank}: {answer.text}" for rank, answer in enumerate(answers) if isinstance(answer, Failed)]
    assert not failures, "\n".join(failures)
    return answers


def form_ours(timeout_s: float = 20.0) -> tuple[ProcessGroups, Store]:
    """In place of the group of the ranks one as `CoordinatorP2P` makes it; and a store of theirs."""
    rank, size, store = dist.get_rank(), dist.get_world_size(), default_store()
    connected = PrefixStore("connected", store)
    connected.set(str(rank), "1")
    connected.wait([str(each) for each in range(size)])  # else one may yet be connecting when another one destroys
    dist.destroy_process_group()
    groups = ProcessGroups("gloo", timedelta(seconds=timeout_s))
    groups.form(PrefixStore("ours", store), rank, size)
    return groups, PrefixStore("tests", store)


def _serve(end: Connection, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    while True:
        function, arguments, rank, ranks, store = end.recv()
        try:
            where = f"file://{store}"
            dist.init_process_group(
                "gloo", init_method=where, rank=rank, world_size=ranks, timeout=timedelta(seconds=30)
            )
            answer = function(*arguments)
        except BaseException as error:
            answer = Failed(type(error).__name__, f"{error}\n{traceback.format_exc()}")
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        end.send(answer)
