"""A call that fails on one of two ranks holds up no later call, whatever the other rank's part of it is at."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.process.async_work import fail, hang, note_sum, wait_for
from tests.process.forked_ranks import run_ranks, values
from tests.waiting import is_gone, wait_until
from torchelastic.checkpoint.async_ckpt import AsyncCallsQueue, AsyncCheckpointError, AsyncRequest
from torchelastic.checkpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager

Worker = Literal["thread", "process", "persistent"]

#: No call may need so long, and a rank whose part hangs needs longer.
TIMEOUT_S = 40.0
#: A second one of the same kind finds what the first one has left behind.
ROUNDS = 2


class Rank:
    """One rank and its queue; every method is called on both ranks."""

    def __init__(self, folder: Path, worker: Worker) -> None:
        self.folder, self.rank, self.number = folder, dist.get_rank(), 0
        self.queue = AsyncCallsQueue(worker=worker, sigterm_timeout=5.0, timeout_s=TIMEOUT_S)
        self.finalized: list[str] = []

    def schedule(self, name: str, function: Callable[..., object], *args: Any) -> None:
        self.queue.schedule_async_request(AsyncRequest(function, args, [partial(self.finalized.append, name)]))

    def path(self, name: str) -> Path:
        return self.folder / f"{name}-{self.number}-{self.rank}"

    def hang(self) -> int:
        """Both ranks are in a call that does not end; returns the number of the process that is in it."""
        self.number += 1
        self.schedule("hung", hang, self.path("pid"))
        pid = int(wait_for(self.path("pid")))
        dist.barrier()
        return pid

    def told(self) -> str:
        try:
            return str(self.queue.maybe_finalize_async_calls(blocking=True))
        except AsyncCheckpointError as error:
            return str(error)

    def next_one(self) -> str:
        self.schedule("next", note_sum, torch.ones(3), self.path("next"))
        return self.told()

    def close(self) -> list[str]:
        self.queue.close()
        wait_until(lambda: not psutil.Process().children(), TIMEOUT_S, "no process is left, not even a dead one")
        return self.finalized


def killed(folder: Path, worker: Worker, victims: list[int]) -> list[Any]:
    rank = Rank(folder, worker)
    facts: list[Any] = []
    for _ in range(ROUNDS):
        pid = rank.hang()
        if rank.rank in victims:
            os.kill(pid, signal.SIGKILL)
        facts.append([rank.told(), rank.next_one()])
        wait_until(partial(is_gone, pid), TIMEOUT_S, "the part of the rank that did not fail is aborted")
    return [*facts, rank.close()]


@pytest.mark.long
@pytest.mark.parametrize("victims", [[1], [0, 1]])
@pytest.mark.parametrize("worker", ["persistent", "process"])
def test_a_killed_worker_costs_its_call_and_not_the_next_one(
    tmp_path: Path, worker: Worker, victims: list[int]
) -> None:
    ranks = run_ranks(killed, tmp_path, worker, victims, ranks=2)
    for *rounds, finalized in values(ranks):
        for number, (error, after) in enumerate(rounds):
            assert f"call {1 + 2 * number} failed on rank {victims[0]}: BrokenExecutor" in error
            assert after == f"[{2 + 2 * number}]"
        assert finalized == ["next"] * ROUNDS


def failed_before_the_next(folder: Path, worker: Worker) -> list[Any]:
    """The next call was scheduled before anybody could know that this one has failed."""
    rank = Rank(folder, worker)
    rank.schedule("failed", *((fail, "disk on fire") if rank.rank else (hang, rank.path("pid"))))
    rank.schedule("next", note_sum, torch.ones(3), rank.path("next"))
    if rank.rank == 0:
        wait_for(rank.path("pid"))
    facts = [rank.told(), rank.told(), wait_for(rank.path("next")), rank.next_one()]
    return [*facts, rank.close()]


@pytest.mark.long
@pytest.mark.parametrize("worker", ["thread", "persistent", "process"])
def test_what_was_scheduled_behind_a_call_that_failed_elsewhere_is_done(tmp_path: Path, worker: Worker) -> None:
    for error, behind, content, after, finalized in values(
        run_ranks(failed_before_the_next, tmp_path, worker, ranks=2)
    ):
        assert "call 1 failed on rank 1: ValueError: disk on fire" in error
        assert (behind, content, after, finalized) == ("[2]", "3.0", "[3]", ["next", "next"])


def die(rank: Rank) -> None:
    """Rank 1 has no worker any more."""
    for child in multiprocessing.active_children() if rank.rank else []:
        child.kill()
    wait_until(lambda: not (rank.rank and multiprocessing.active_children()), TIMEOUT_S, "the worker dies")


def killed_between(folder: Path) -> list[Any]:
    """Rank 1's worker dies before it is ready, then with nothing to do, then while rank 1 finalises."""
    rank = Rank(folder, "persistent")
    rank.schedule("unborn", note_sum, torch.ones(1), rank.path("unborn"))
    die(rank)
    facts = [rank.told()]
    for _ in range(2):
        rank.number += 1
        facts.append(rank.next_one())
        die(rank)
    rank.number += 1
    rank.queue.schedule_async_request(AsyncRequest(note_sum, (torch.ones(1), rank.path("last")), [partial(die, rank)]))
    return [*facts, rank.told(), rank.next_one(), rank.close()]


@pytest.mark.long
def test_a_worker_that_dies_at_its_start_or_between_calls_costs_no_later_call(tmp_path: Path) -> None:
    for unborn, *others, finalized in values(run_ranks(killed_between, tmp_path, ranks=2)):
        assert "call 1 failed on rank 1: BrokenExecutor" in unborn
        assert "before it was ready" in unborn
        assert others == ["[2]", "[3]", "[4]", "[5]"]
        assert finalized == ["next", "next", "next"]


def hung(folder: Path, worker: Worker) -> list[Any]:
    """Rank 0 hangs for ever, rank 1 is done at once."""
    rank = Rank(folder, worker)
    rank.queue.close()
    rank.queue = AsyncCallsQueue(worker=worker, sigterm_timeout=0.5, timeout_s=3.0)
    rank.queue._agreement._timeout_s = TIMEOUT_S  # a busy host may hold up a rank for longer than that call gets
    if rank.rank:
        rank.schedule("hung", note_sum, torch.ones(1), rank.path("begun"))
    else:
        rank.schedule("hung", hang, rank.path("begun"), True)
    begun = wait_for(rank.path("begun"))
    facts = [rank.told()]
    if rank.rank == 0:  # it ignores SIGTERM
        wait_until(lambda: is_gone(int(begun)), TIMEOUT_S, "the worker is killed")
    rank.queue._timeout_s = TIMEOUT_S
    return [*facts, rank.next_one(), rank.close()]


@pytest.mark.long
@pytest.mark.parametrize("worker", ["persistent", "process"])
def test_a_call_that_never_ends_on_one_rank_fails_on_all_after_the_limit(tmp_path: Path, worker: Worker) -> None:
    for error, after, finalized in values(run_ranks(hung, tmp_path, worker, ranks=2)):
        assert "call 1 failed on rank 0: TimeoutError: it was not done within 3 s" in error
        assert (after, finalized) == ("[2]", ["next"])


def saved_locally(folder: Path) -> list[Any]:
    """Rank 1's worker dies in three saves one after the other, while rank 0 has long written its part."""
    rank = Rank(folder, "persistent")
    manager = LocalCheckpointManager(folder / f"host-{rank.rank}", "job", timeout_s=4 * TIMEOUT_S)
    state = BasicTensorAwareStateDict({"weights": torch.zeros(250_000)})
    rank.next_one()  # the worker is ready
    sizes, errors = [], []
    for step in range(1, 5):
        request = manager.save(state, step, is_async=True)
        assert request is not None
        if rank.rank and step < 4:
            request = request._replace(async_fn=leave_at_once, async_fn_args=())
        rank.queue.schedule_async_request(request)
        errors.append(rank.told())
        sizes.append(sum(path.stat().st_size for path in manager.local_ckpt_dir.rglob("*") if path.is_file()))
    found = manager.find_latest()
    manager.close()
    return [errors, sizes, found, rank.close()]


def leave_at_once() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long
def test_local_saves_whose_worker_died_keep_no_memory_and_stop_no_later_save(tmp_path: Path) -> None:
    for errors, sizes, found, _ in values(run_ranks(saved_locally, tmp_path, ranks=2)):
        assert all("failed on rank 1: BrokenExecutor" in error for error in errors[:3])
        assert (errors[3], found) == ("[5]", 4)
        assert max(sizes) < 1.5 * 1_000_000, sizes
