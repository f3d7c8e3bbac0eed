"""The split of a save for frameworks with queues of their own: copied here, written elsewhere, committed at the end."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from tests.process.memory_saves import Saving, State, blank, same, saving
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.memory import StagedItems
from torchelastic.checkpoint.replication import ReplicationError

WAIT_S = 60


@pytest.fixture
def alone(root: Path) -> Iterator[Saving]:
    with saving(root) as one:
        yield one


def state_of(step: int, size: int = 10_000) -> State:
    return {"w": torch.arange(size, dtype=torch.float32) + step, "n": {"step": step}, "e": torch.empty(0)}


def begin(one: Saving, state: State, step: int) -> tuple[StagedItems, Any]:
    """What a framework does up to here, on one rank; returns also the metadata."""
    writer, planner = one.writer, DefaultSavePlanner()
    writer.reset(one.id(step))
    planner.set_up_planner(state, writer.storage_meta(), True)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    (plan,) = writer.prepare_global_plan(plans)
    return writer.stage_items(planner.finish_plan(plan), planner), metadata


def in_a_thread(staged: StagedItems) -> bool:
    thread = threading.Thread(target=staged.write)
    thread.start()
    thread.join(WAIT_S)
    return False


def in_a_fork(staged: StagedItems) -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)
            staged.write()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return True


def write_pickled(pickled: bytes) -> None:
    pickle.loads(pickled).write()


def in_another_process(staged: StagedItems) -> bool:
    process = multiprocessing.get_context("spawn").Process(target=write_pickled, args=(pickle.dumps(staged),))
    process.start()
    process.join(WAIT_S)
    assert process.exitcode == 0
    return True


@pytest.mark.parametrize("write", [in_a_thread, in_a_fork, pytest.param(in_another_process, marks=pytest.mark.long)])
def test_what_was_copied_may_be_written_elsewhere(alone: Saving, write: Callable[[StagedItems], bool]) -> None:
    steps = (1,) if write is in_another_process else (1, 2, 3, 4)
    for step in steps:
        state = state_of(step)
        staged, metadata = begin(alone, state, step)
        alone.writer.attach("common.pt", b"common")
        state["w"].zero_()
        if write(staged):
            assert len(alone.shards()) == (step > 1), "only who staged it gives it its name"
            staged.adopt()
        alone.writer.finish(metadata, [staged.results])
        assert same(alone.load(blank(state_of(step)), step), state_of(step))
    assert alone.latest() == steps[-1]
    assert (Path(alone.id(steps[-1])) / "common.pt").read_bytes() == b"common"
    del staged
    assert len(alone.inodes()) == min(2, len(steps))


def test_saves_may_be_finished_after_others_were_begun(alone: Saving) -> None:
    first, metadata = begin(alone, state_of(1), 1)
    second, later = begin(alone, state_of(2), 2)
    for staged in (first, second):
        staged.write()
    alone.writer.finish(metadata, [first.results])
    assert alone.steps() == [1]
    alone.writer.finish(later, [second.results])
    assert alone.steps() == [2]
    assert same(alone.load(blank(state_of(2)), 2), state_of(2))


@pytest.mark.parametrize("write", [None, in_a_thread, in_a_fork])
def test_an_abandoned_save_gives_its_memory_back(alone: Saving, write: Callable[[StagedItems], bool] | None) -> None:
    alone.save(state_of(1), 1)
    for step in (2, 3, 4):
        staged, _ = begin(alone, state_of(step), step)
        if write is not None:
            write(staged)
        staged.abandon()
        staged.abandon()
        assert len(alone.inodes()) == 2
    assert alone.latest() == 1
    assert alone.shards() != []
    assert same(alone.load(blank(state_of(1)), 1), state_of(1))


def test_what_was_not_written_cannot_be_adopted(alone: Saving) -> None:
    staged, _ = begin(alone, state_of(1), 1)
    with pytest.raises(CheckpointError, match="was not written"):
        staged.adopt()
    staged.abandon()
    with pytest.raises(CheckpointError, match="released"):
        staged.adopt()


def test_a_replica_that_cannot_be_made_raises_and_removes_the_shard(
    alone: Saving, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise ReplicationError("the peer is on fire")

    monkeypatch.setattr(type(alone.replication), "partners", (1,))
    monkeypatch.setattr(alone.replication, "push", refuse)
    staged, _ = begin(alone, state_of(1), 1)
    with pytest.raises(ReplicationError, match="on fire"):
        staged.write()
    assert not alone.shards()
