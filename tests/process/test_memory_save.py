"""Saving into memory with DCP: what comes back, what is kept, and what a save does that cannot be made.

With `dcp.async_save` values are those at the call, and no copy is made twice.
"""

from __future__ import annotations

import dataclasses
import errno
import gc
import io
import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import ReadItem, SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.few_examples import some_daily
from tests.older_torch import async_save_in, needs_cached_plans, needs_helper_process
from tests.process.local_ranks import Crew, succeeded
from tests.process.memory_jobs import EMPTY
from tests.process.memory_saves import Saving, State, blank, quietly, same, saving
from tests.process.open_files import open_files
from torchelastic.checkpoint import CheckpointError, DurableTier, EverySteps, KeepAll
from torchelastic.checkpoint.memory import (
    CheckpointObjectManager,
    DefaultCheckpointSaver,
    MemoryStorageReader,
    MemoryStorageWriter,
    StagedItems,
)
from torchelastic.checkpoint.store import SaveId
from torchelastic.checkpoint.store.host_memory.room import Free
from torchelastic.network.ports import unused_ports
from torchelastic.testing.disk_faults import FaultyDisk, fail_at
from torchelastic.torch_internals.checkpoints import forget_plans

SIZE = 50_000
WAIT_S = 60
Place: TypeAlias = Literal["thread", "process"]
CREW_SIZE = 3


@pytest.fixture
def alone(root: Path) -> Iterator[Saving]:
    with saving(root) as one:
        assert one.container
        yield one


def state_of(step: int, size: int = SIZE) -> State:
    return {
        "w": torch.arange(size, dtype=torch.float32) + step,
        "nested": {"m": torch.full((7, 3), float(step)), "lr": 0.5**step, "betas": [0.9, 0.99]},
        "step": step,
    }


def change(state: Any) -> None:
    """In place, all that can be changed."""
    for value in state.values() if isinstance(state, dict) else state:
        if isinstance(value, torch.Tensor) and value.numel() and not value._is_view():
            with torch.no_grad():
                value.zero_()
        elif isinstance(value, (dict, list)):
            change(value)
    if isinstance(state, list):
        state.append("later")


# --- what comes back --------------------------------------------------------------------------------------------------


def all_kinds() -> State:
    base = torch.randn(6, 8)
    kinds: State = {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.5),
        "bool": torch.tensor([True, False, True]),
        "complex": torch.randn(4, dtype=torch.complex64),
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "uint16": torch.arange(5).to(torch.uint16),
        "strided": base[:, ::2],
        "transposed": base.t(),
        "expanded": torch.randn(3, 1).expand(3, 5),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.randn(3, 3)),
        "tied": base,
        "tied_again": base,
        "ünïcode.0": torch.randn(2),
    }
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.float64):
        kinds[str(dtype)] = torch.randn(9).to(dtype)
    return kinds


@pytest.mark.parametrize("is_async", [False, True])
def test_tensors_of_all_kinds_come_back_as_they_were(alone: Saving, is_async: bool) -> None:
    torch.manual_seed(0)
    state = all_kinds()
    expected = {key: value.detach().clone() for key, value in state.items()}
    if is_async:
        future = alone.async_save(state, 1)
        change(state)
        future.result(WAIT_S)
    else:
        alone.save(state, 1)
    assert same(alone.load(blank(expected), 1), expected)


def test_a_step_that_is_saved_again_replaces_the_first(alone: Saving) -> None:
    alone.save(state_of(1), 5)
    alone.save(state_of(2), 5)
    assert same(alone.load(blank(state_of(2)), 5), state_of(2))
    assert len(alone.shards()) == 1


@needs_cached_plans
def test_planners_may_cache_their_plans(alone: Saving) -> None:
    for step in (1, 2, 3):
        alone.save(state_of(step), step, planner=DefaultSavePlanner(enable_plan_caching=True))
        assert same(alone.load(blank(state_of(step)), step), state_of(step))
    grown = {**state_of(4), "late": torch.ones(3)}
    alone.save(grown, 4, planner=DefaultSavePlanner(enable_plan_caching=True))
    assert same(alone.load(blank(grown), 4), grown)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["step-x_ckpt", "20", "step-007_ckpt"])
def test_a_folder_that_is_not_named_for_a_step_is_refused(alone: Saving, name: str) -> None:
    with pytest.raises(ValueError, match="format_version_container"):
        save({}, checkpoint_id=f"{alone.base}/{name}", storage_writer=alone.writer)


class Custom:
    """No plain value."""


def test_objects_are_refused_by_name_unless_pickles_are_allowed(alone: Saving, root: Path) -> None:
    with pytest.raises(CheckpointException, match=r"opt.thing.*allow_pickles=True"):
        alone.save({"opt": {"thing": Custom()}, "w": torch.ones(2)}, 1)
    assert alone.latest() is None
    with saving(root, "b", allow_pickles=True) as trusting:
        trusting.save({"thing": Custom()}, 1)
        assert trusting.steps() == [1]


class Noting(DefaultLoadPlanner):
    """Looks at what is no tensor."""

    noted: Any = None

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.noted = torch.load(io.BytesIO(value.getvalue()), weights_only=True)
        super().load_bytes(read_item, value)


@pytest.mark.parametrize("is_nested", [False, True])
def test_plain_values_reach_any_planner(alone: Saving, is_nested: bool) -> None:
    def state_of(step: int) -> State:
        return {"run": {"step": step}} if is_nested else {"step": step}

    alone.save(state_of(3), 10)
    as_it_is = DefaultLoadPlanner(flatten_state_dict=is_nested, flatten_sharded_tensors=is_nested)
    for planner in (DefaultLoadPlanner(), as_it_is, Noting()):
        state, reader = state_of(0), MemoryStorageReader(alone.id(10), alone.loader)
        load(state, checkpoint_id=alone.id(10), storage_reader=reader, planner=planner)
        assert state == state_of(3)
    assert isinstance(planner, Noting)
    assert planner.noted == 3


@pytest.mark.parametrize("bad", [torch.eye(3).to_sparse(), torch.empty(2, device="meta")])
def test_tensors_that_are_not_stored_are_refused_by_name(alone: Saving, bad: torch.Tensor) -> None:
    with pytest.raises(CheckpointException, match=r"'n\.bad'"):
        alone.save({"n": {"bad": bad}}, 1)


# --- what cannot be saved ---------------------------------------------------------------------------------------------


def is_kept(one: Saving, step: int) -> bool:
    return one.latest() == step and same(one.load(blank(state_of(step)), step), state_of(step))


def test_a_save_without_room_is_left_out(alone: Saving, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    alone.save(state_of(1), 1)
    monkeypatch.setattr("torchelastic.checkpoint.compat.flashpoint.saver.measure", lambda _: Free(1000, 2**40))
    alone.save(state_of(2, 4 * SIZE), 2)
    assert is_kept(alone, 1)
    assert "tmpfs" in caplog.text
    assert alone.saver.skipped.count("tmpfs") == 1


def test_failed_saves_leave_nothing_behind(root: Path) -> None:
    disk = FaultyDisk()
    with saving(root, disk=disk) as one:
        one.save(state_of(1), 1)
        one.save(state_of(2), 2)
        before = len(one.files())
        for step in range(3, 8):
            disk.struck.clear()
            disk._faults[:] = [fail_at("publish", errno.EIO)]
            one.save(state_of(step), step)
        assert len(one.files()) == before
        assert is_kept(one, 2)


def test_a_save_that_is_complete_does_not_fail_where_what_it_replaces_cannot_be_removed(root: Path) -> None:
    disk = FaultyDisk()
    with saving(root, disk=disk, on_failure="raise") as one:
        one.save(state_of(1), 1)
        disk.calls.clear()
        one.save(state_of(2), 2)
        first, count = disk.calls.index("sync_folder"), len(disk.calls)
        for step, number in enumerate(itertools.count(first), start=3):
            disk.calls.clear()
            disk.struck.clear()
            disk._faults[:] = [fail_at(number, errno.EIO)]
            try:
                one.save(state_of(step), step)
                is_complete = True
            except CheckpointException:
                is_complete = False
            disk._faults.clear()  # what is read afterwards has no fault
            assert is_kept(one, step) if is_complete else step not in one.steps()
            if not disk.struck:  # each call of a save has failed once
                break
        assert number > count - 3  # a save after a failed removal may have fewer calls than the one that was counted


# --- memory -----------------------------------------------------------------------------------------------------------


def test_two_slots_serve_all_saves(alone: Saving, root: Path) -> None:
    alone.save(state_of(1), 1)
    alone.save(state_of(2), 2)
    slots, files = alone.inodes(), open_files(root)
    assert files
    assert len(slots) == 2
    for step in range(3, 23):
        alone.save(state_of(step), step)
        assert alone.inodes() == slots
    gc.collect()
    assert open_files(root) <= files
    assert is_kept(alone, 22)


# --- several ranks ----------------------------------------------------------------------------------------------------


def sharded(step: int) -> State:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5) + step
    return {
        "sharded": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole.clone(), mesh, [Shard(1)]),
        "same": distribute_tensor(whole * 2, mesh, [Replicate()]),
        "replicated": torch.full((11,), float(step)),
        "nested": {"step": step, "x": torch.tensor(step), "list": [step], "set": {step}},
    }


def whole_of(state: State) -> State:
    return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}


def save_steps(root: str, hosts: str, steps: list[int], cached: bool = False) -> dict[str, Any]:
    forget_plans()  # of a group that these ranks formed before
    with saving(root, hosts) as one:
        for step in steps:
            planner = DefaultSavePlanner(enable_plan_caching=True) if cached else None
            one.save(sharded(step), step, planner=planner)
        one.replication.all_gather("saved", None)
        target = sharded(0)
        one.load(target, steps[-1])
        answer = {
            "latest": one.latest(),
            "steps": one.steps(),
            "same": same(whole_of(target), whole_of(sharded(steps[-1]))),
            "files": len(one.shards()),
        }
        one.replication.all_gather("done", None)
        return answer


@pytest.mark.parametrize("cached", [False, pytest.param(True, marks=needs_cached_plans)], ids=["planned", "cached"])
@pytest.mark.parametrize(
    ("hosts", "shards"),
    some_daily([("aa", 2), ("ab", 2), ("abc", 2), ("aab", 3)], lambda case: case[0] in ("ab", "aab")),
)
def test_ranks_save_together(crew: Crew, root: Path, hosts: str, shards: int, cached: bool) -> None:
    answers = succeeded(crew.run(save_steps, str(root), hosts, [1, 2, 3, 4], cached, ranks=len(hosts)))
    for rank, answer in enumerate(answers):
        assert (answer["latest"], answer["steps"], answer["same"]) == (4, [4], True)
        assert answer["files"] >= shards or hosts == "aab", (rank, answer)


def save_what_one_rank_writes(root: str, hosts: str) -> tuple[Any, ...]:
    with saving(root, hosts) as one:
        one.save({"w": torch.arange(5.0)}, 1)
        one.replication.all_gather("saved", None)
        target = {"w": torch.zeros(5)}
        latest = one.latest()
        one.load(target, 1)
        answer = latest, len(one.shards()), target["w"].tolist()
        one.replication.all_gather("done", None)
        return answer


def test_a_rank_that_has_nothing_to_write_has_an_empty_shard(crew: Crew, root: Path) -> None:
    answers = succeeded(crew.run(save_what_one_rank_writes, str(root), "ab", ranks=2))
    assert answers == [(1, 2, [0.0, 1.0, 2.0, 3.0, 4.0])] * 2


# --- beside the training ---------------------------------------------------------------------------------------------


def test_a_copy_for_which_there_is_no_memory_leaves_the_save_out(
    alone: Saving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    alone.async_save(state_of(1), 1).result(WAIT_S)
    monkeypatch.setattr("torchelastic.checkpoint.compat.flashpoint.container.measure", lambda _: Free(0, 2**40))
    large = state_of(2, 500_000)
    alone.async_save(large, 2).result(WAIT_S)
    assert alone.latest() == 1
    assert "skipped" in caplog.text
    assert "tmpfs" in caplog.text
    monkeypatch.undo()
    alone.async_save(large, 3).result(WAIT_S)
    assert alone.latest() == 3


def test_the_container_need_not_be_known_before_the_first_save(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_MEMORY_ROOT", str(root))
    with saving(root) as one:
        for step in (1, 2, 3):
            state = state_of(step)
            future = one.async_save(state, step)
            change(state)
            future.result(WAIT_S)
            assert same(one.load(blank(state_of(step)), step), state_of(step))
        assert len(one.inodes()) == 2
        assert not [path for path in root.glob("torchelastic-*/copies-*/*") if path.name not in EMPTY]


def test_a_failed_save_that_is_not_looked_at_holds_up_no_later_one(
    alone: Saving, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no plan")

    with monkeypatch.context() as patched:
        patched.setattr(alone.saver, "prepare_local_plan", fail)
        failed = [alone.async_save(state_of(step), step) for step in (1, 2)]
        with pytest.raises(CheckpointException, match="no plan"):
            failed[1].result(WAIT_S)
    alone.async_save(state_of(3), 3).result(WAIT_S)
    assert alone.latest() == 3
    assert failed[0].exception() is not None


@pytest.mark.parametrize("is_other", [False, True], ids=["one writer", "two writers"])
def test_a_save_at_once_waits_for_the_one_in_the_background(
    alone: Saving, monkeypatch: pytest.MonkeyPatch, is_other: bool
) -> None:
    """Ranks that did both at a time would take each other's messages."""
    write, began = alone.saver.write_data, threading.Event()

    def slowly(staged: StagedItems) -> list[WriteResult]:
        began.set()
        time.sleep(0.5)
        return write(staged)

    with monkeypatch.context() as patched:
        patched.setattr(alone.saver, "write_data", slowly)
        future = alone.async_save(state_of(1), 1)
        began.wait(WAIT_S)
    if is_other:
        alone.writer = MemoryStorageWriter(alone.saver)
    alone.save(state_of(2), 2)
    assert future.done()
    assert alone.latest() == 2


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Memory is given back by what the code does, and not when the garbage collector comes by."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class OfAPart(DefaultSavePlanner):
    """A plan of less than what was copied, so that the copy cannot become the shard."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=[item for item in plan.items if item.index.fqn != "nested.m"])


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    ("is_async", "planner", "slots"),
    [(False, DefaultSavePlanner, 2), (True, DefaultSavePlanner, 2), (True, OfAPart, 3)],
    ids=["sync", "async", "async, of a part"],
)
def test_saves_that_fail_on_another_rank_take_no_more_memory_each_time(
    alone: Saving, monkeypatch: pytest.MonkeyPatch, is_async: bool, planner: type[DefaultSavePlanner], slots: int
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("rank 1: what DCP has instead of `finish` where another rank has failed")

    def try_to_save(step: int) -> CheckpointException | None:
        try:
            if is_async:
                alone.async_save(state_of(step), step, planner=planner()).result(WAIT_S)
            else:
                alone.save(state_of(step), step, planner=planner())
        except CheckpointException as error:
            return error
        return None

    assert try_to_save(1) is None
    with monkeypatch.context() as patched:
        patched.setattr(alone.writer, "finish", fail)
        errors = [try_to_save(step) for step in range(2, 8)]  # they are kept, with all that was on the stack
    assert all("rank 1" in str(error) for error in errors)
    assert len(alone.inodes()) == slots
    assert try_to_save(8) is None
    assert alone.latest() == 8


def test_a_durable_copy_that_was_due_at_a_save_that_failed_is_made_of_the_next(
    alone: Saving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: StagedItems) -> list[WriteResult]:
        raise CheckpointError("no room")

    store = DurableTier(f"file://{tmp_path}/store", KeepAll(), EverySteps(3))
    objects = CheckpointObjectManager(durable=store)
    writer = MemoryStorageWriter(DefaultCheckpointSaver(ckpt_obj_manager=objects))
    for step in range(2, 6):
        with monkeypatch.context() as patched:
            if step == 3:
                patched.setattr(writer.checkpoint_saver, "write_data", fail)
            quietly(save, state_of(step), checkpoint_id=alone.id(step), storage_writer=writer)
        assert objects.wait_for_durable(WAIT_S)
    assert [entry.name.step for entry in store.inventory()] == [4]


class NothingGoes(DurableTier):
    def prune(self) -> list[SaveId]:
        raise CheckpointError("nothing can be removed here")


def test_a_durable_copy_is_there_where_older_ones_cannot_be_removed(
    alone: Saving, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = NothingGoes(f"file://{tmp_path}/store")
    objects = CheckpointObjectManager(durable=store)
    writer = MemoryStorageWriter(DefaultCheckpointSaver(ckpt_obj_manager=objects))
    quietly(save, state_of(1), checkpoint_id=alone.id(1), storage_writer=writer)
    assert objects.wait_for_durable(WAIT_S)
    assert [entry.is_committed for entry in store.inventory()] == [True]
    assert "nothing can be removed here" in caplog.text
    assert "has no durable copy" not in caplog.text


def change_all(state: State) -> None:
    with torch.no_grad():
        for name in ("sharded", "same", "replicated"):
            (state[name].to_local() if isinstance(state[name], DTensor) else state[name]).fill_(-1)
    state["nested"]["list"].append(0)
    state["nested"]["set"].add(0)


@contextmanager
def saving_beside(root: str, hosts: str, place: Place, port: int) -> Iterator[Saving]:
    """A rank that may have a child, which saves."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    with saving(root, hosts) as one:
        yield one
        one.replication.all_gather("done", None)
    if place == "process":
        from torch.distributed.checkpoint import _async_process_executor as executor

        executor._CHECKPOINT_PROCESS = None


def overlapping(root: str, hosts: str, place: Place, port: int) -> list[Any]:
    with saving_beside(root, hosts, place, port) as one:
        states = {step: sharded(step) for step in range(1, 9)}
        futures = []
        for step, state in states.items():
            futures.append(one.async_save(state, step, **async_save_in(place)))
            change_all(state)
        under_way = sum(not future.done() for future in futures)
        for future in futures:
            future.result(WAIT_S)
        one.replication.all_gather("saved", None)
        target = sharded(0)
        one.load(target, 8)
        return [under_way <= 1, one.latest(), same(whole_of(target), whole_of(sharded(8))), len(one.inodes())]


@pytest.mark.long
@pytest.mark.parametrize(("place", "slots"), [("thread", 7), pytest.param("process", 8, marks=needs_helper_process)])
def test_a_save_is_of_the_values_at_the_call_and_waits_for_the_one_before_it(
    crew: Crew, root: Path, place: Place, slots: int
) -> None:
    answers = succeeded(crew.run(overlapping, str(root), "ab", place, *unused_ports("127.0.0.1"), ranks=2))
    for is_alone, latest, is_same, held in answers:
        assert (is_alone, latest, is_same) == (True, 8, True)
        assert held <= slots
