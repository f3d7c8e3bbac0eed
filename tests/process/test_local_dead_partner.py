"""Replicated local saves with a partner that is dead: saved without the replica, with a warning; SIGKILL is real."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.few_examples import some_daily
from tests.process.forked_ranks import run_ranks
from tests.process.local_ranks import Crew, succeeded
from tests.process.log_ears import heard
from torchelastic.checkpoint.async_ckpt import AsyncCallsQueue
from torchelastic.checkpoint.compat.nvrx.local.strategies import LazyCliqueReplicationStrategy
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.format.disk import REAL_DISK, Disk
from torchelastic.checkpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager, OutOfStepError
from torchelastic.checkpoint.replicas.protocol import ReplicaConnection
from torchelastic.checkpoint.replicas.receive import Reception
from torchelastic.checkpoint.replicas.replica_client import ReplicaClient
from torchelastic.metrics import MetricData, MetricHandler, configure, initialize_metrics

STATE_BYTES = 8 << 20
#: Of the manager; a silent partner is given up after a quarter of it.
TIMEOUT_S = 30.0
#: For a save without its replica; far below `TIMEOUT_S`, after which the group would be given up.
BOUND_S = 25.0


#: The logger of saves.
SAVES = "torchelastic.checkpoint.compat.nvrx.local"


# What the ranks save


def state_of(rank: int, iteration: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1000 * iteration + rank)
    weight = torch.randint(-128, 128, (STATE_BYTES,), generator=generator, dtype=torch.int8)
    return {"weight": weight, "of": [rank, iteration]}


def is_state_of(state: Any, rank: int, iteration: int) -> bool:
    tree, expected = state.to_tree(), state_of(rank, iteration)
    return bool(torch.equal(tree["weight"], expected["weight"])) and tree["of"] == expected["of"]


def manager_at(root: Path, rank: int, *, replicated: bool = True, disk: Disk = REAL_DISK) -> LocalCheckpointManager:
    strategy = LazyCliqueReplicationStrategy(1, 2) if replicated else None
    return LocalCheckpointManager(
        root / f"host-{rank}", "session", strategy, timeout_s=TIMEOUT_S, replica_host="127.0.0.1", disk=disk
    )


def save(manager: LocalCheckpointManager, iteration: int, rank: int, is_async: bool) -> float:
    """Saves to the end, and returns how long it took, in seconds."""
    start_s = time.monotonic()
    request = manager.save(BasicTensorAwareStateDict(state_of(rank, iteration)), iteration, is_async=is_async)
    if request is not None:
        with AsyncCallsQueue(worker="thread", timeout_s=TIMEOUT_S) as queue:
            queue.schedule_async_request(request)
    return time.monotonic() - start_s


def shards(root: Path, host: int, iteration: int, of_rank: int) -> list[Path]:
    return sorted((root / f"host-{host}").glob(f"session/step-{iteration:09d}.*/shard-{of_rank:05d}-of-*.shard"))


class CountedFailures(MetricHandler):
    """How many replicas could not be made."""

    def __init__(self) -> None:
        self.count = 0.0

    def emit(self, metric_data: MetricData) -> None:
        if metric_data.name == "checkpoint.replication.failures":
            self.count += metric_data.value


# A partner whose rank still trains, and that takes no replicas


class FullForOthers(Disk):
    """From now on replicas find no room here."""

    is_full = False

    def allocate(self, descriptor: int, size_bytes: int, path: Path) -> None:
        if self.is_full and threading.current_thread().name.startswith("replica-"):
            raise CheckpointError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        super().allocate(descriptor, size_bytes, path)


@contextmanager
def silent_receptions() -> Iterator[None]:
    """Nobody who sends a replica to this process gets an answer."""
    is_over, begin = threading.Event(), Reception.begin

    def begin_later(reception: Reception, *arguments: Any) -> Any:
        is_over.wait(TIMEOUT_S)
        return begin(reception, *arguments)

    with mock.patch.object(Reception, "begin", begin_later):
        yield
    is_over.set()


CREW_SIZE = 2
SILENT = pytest.param("is silent", marks=pytest.mark.long)


@pytest.mark.parametrize("is_async", some_daily([False, True], bool), ids=["sync", "async"])
@pytest.mark.parametrize("fate", ["does not listen", "has no room", SILENT])
def test_a_save_succeeds_on_all_ranks_without_the_replica_of_an_unreachable_partner(
    crew: Crew, tmp_path: Path, fate: str, is_async: bool
) -> None:
    answers = succeeded(crew.run(save_without_partner, tmp_path, fate, is_async, ranks=2))
    (took_s, warnings, failures, *loaded), (other_took_s, other_warnings, other_failures, *other_loaded) = answers
    assert took_s < BOUND_S
    assert other_took_s < BOUND_S
    (warning,) = warnings
    save_id, rest = warning.removeprefix("the shard of rank 0 of ").split(" ", 1)
    assert save_id.startswith("step-000000004.e1.r1.g1.")
    assert rest.startswith("has no replica on rank 1 at 127.0.0.1:")
    assert (failures, other_warnings, other_failures) == (1, [], 0)
    assert loaded == other_loaded == [4, 4, True], "saved, found and loaded"
    assert len(shards(tmp_path, 0, 4, 0)) == len(shards(tmp_path, 0, 4, 1)) == len(shards(tmp_path, 1, 4, 1)) == 1
    assert len(shards(tmp_path, 1, 4, 0)) == 1, "the replica of rank 0 was made when the checkpoint was loaded"
    assert shards(tmp_path, 0, 3, 0) == shards(tmp_path, 1, 3, 1) == [], "the older checkpoint is pruned as usual"


def save_without_partner(root: Path, fate: str, is_async: bool) -> tuple[float, list[str], float, int, int, bool]:
    rank, disk, metrics = dist.get_rank(), FullForOthers(), CountedFailures()
    configure(metrics, "torchelastic")
    try:
        manager = manager_at(root, rank, disk=disk)
        save(manager, 3, rank, is_async)
        assert len(shards(root, 1, 3, 0)) == 1, "the first replica was made"
        dist.barrier()
        is_partner = rank == 1
        disk.is_full = is_partner and fate == "has no room"
        if is_partner and fate == "does not listen":
            assert manager._server is not None
            manager._server.close()
        dist.barrier()
        with (
            heard(SAVES) as warnings,
            silent_receptions() if is_partner and fate == "is silent" else nullcontext(),
        ):
            took_s = save(manager, 4, rank, is_async)
        saved, found = manager.latest_iteration, manager.find_latest()
        assert shards(root, 1, 4, 0) == [], "the replica of rank 0"
        dist.barrier()
        disk.is_full = False
        state, _ = manager.load()
        dist.barrier()
        manager.close()
        return took_s, warnings, metrics.count, saved, found, is_state_of(state, rank, 4)
    finally:
        initialize_metrics()


# A partner that is killed as a rank of the group

VICTIM = 1
SURVIVORS = [0, 2, 3]


def survivors_of(root: Path, is_async: bool, when: str) -> list[dict[str, Any]]:
    """What the survivors tell; the victim was killed, and no other rank."""
    ended = run_ranks(survive, root, is_async, when, ranks=4, others_go_on=True)
    assert [one.was_killed for one in ended] == [rank == VICTIM for rank in range(4)]
    assert [one.error for one in ended] == [None] * 4
    return [one.value for one in ended if not one.was_killed]


def die_in_the_middle_of_a_transfer() -> None:
    """Has this process kill itself when half of a replica has arrived and its own shard is at its partner."""
    has_sent = threading.Event()
    push, fill = ReplicaClient.push, ReplicaConnection.fill
    arrived_bytes = 0

    def push_and_tell(self: ReplicaClient, *arguments: Any, **options: Any) -> Any:
        sent = push(self, *arguments, **options)
        has_sent.set()
        return sent

    def fill_and_die(self: ReplicaConnection, buffer: memoryview | bytearray) -> None:
        nonlocal arrived_bytes
        fill(self, buffer)
        if not isinstance(buffer, memoryview):  # no piece of an object, but maybe the answer that `push` waits for
            return
        arrived_bytes += buffer.nbytes
        if arrived_bytes > STATE_BYTES // 2:
            assert has_sent.wait(TIMEOUT_S)
            os.kill(os.getpid(), signal.SIGKILL)

    ReplicaClient.push, ReplicaConnection.fill = push_and_tell, fill_and_die  # type: ignore[method-assign]


def survive(root: Path, is_async: bool, when: str) -> dict[str, Any]:
    """Saves iteration 3, then 4 while rank 1 dies; the others form a new group, and look what there is."""
    rank = dist.get_rank()
    manager = manager_at(root, rank)
    save(manager, 3, rank, is_async=False)
    if rank == VICTIM and when == "in the transfer":
        die_in_the_middle_of_a_transfer()
    dist.barrier()
    if rank == VICTIM and when == "before the save":
        os.kill(os.getpid(), signal.SIGKILL)
    told: dict[str, Any] = {"error": ""}
    start_s = time.monotonic()
    with heard(SAVES) as warnings, AsyncCallsQueue(worker="thread", timeout_s=TIMEOUT_S) as queue:
        try:
            request = manager.save(BasicTensorAwareStateDict(state_of(rank, 4)), 4, is_async=is_async)
        except OutOfStepError as error:
            told["error"], request = str(error), None
        if rank == VICTIM:
            assert request is not None
            request.work()
            threading.Event().wait()
        if request is not None:
            queue.schedule_async_request(request)
        dist.destroy_process_group()
        store = f"file://{root / 'store-of-survivors'}"
        dist.init_process_group("gloo", init_method=store, rank=SURVIVORS.index(rank), world_size=len(SURVIVORS))
        told["finalized"] = queue.maybe_finalize_async_calls(blocking=True)
        told["took_s"] = time.monotonic() - start_s
    told["warnings"] = warnings
    told["own"] = len(shards(root, rank, 4, rank))
    manager.close()
    # every survivor on its host; the ranks have moved up
    reader = manager_at(root, rank, replicated=False)
    told["found"] = reader.find_latest(), reader.latest_world_size
    told["loaded"] = [part.rank for state, part in reader.load_all() if is_state_of(state, part.rank, part.iteration)]
    dist.barrier()
    reader.close()
    return told


@pytest.mark.long
def test_an_asynchronous_save_survives_its_partner_that_is_killed_in_the_middle_of_the_transfer(tmp_path: Path) -> None:
    answers = survivors_of(tmp_path, True, "in the transfer")
    for told in answers:
        assert told["finalized"] == [1], "the save succeeded on the survivors"
        assert told["took_s"] < BOUND_S
        assert told["own"] == 1, "the own shard is published"
        assert told["found"] == (4, 4), "every shard is somewhere: that of rank 1 on rank 0"
        assert told["loaded"] == [0, 1, 2, 3]
    of_rank_0 = " ".join(answers[0]["warnings"])
    assert "the shard of rank 0 of step-000000004.e1.r1.g1." in of_rank_0
    assert "has no replica on rank 1 at 127.0.0.1:" in of_rank_0
    assert all("no replica" not in " ".join(told["warnings"]) for told in answers[1:])


@pytest.mark.long
@pytest.mark.parametrize("when", ["before the save", "in the transfer"])
def test_a_synchronous_save_names_the_killed_rank_on_all_others_and_keeps_what_it_wrote(
    tmp_path: Path, when: str
) -> None:
    """A rank of the group that takes no part in the agreement is an error; what was written before stays."""
    answers = survivors_of(tmp_path, False, when)
    iteration = 4 if when == "in the transfer" else 3
    for told in answers:
        assert "because a rank was lost: rank 1 (" in told["error"]
        assert told["took_s"] < BOUND_S
        assert told["own"] == (iteration == 4)
        assert told["found"] == (iteration, 4)
        assert told["loaded"] == [0, 1, 2, 3]
