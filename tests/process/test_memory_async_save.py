"""Saving into memory with `dcp.async_save`: values are those at the call, and no copy is made twice."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.process.local_ranks import Crew, succeeded
from tests.process.memory_jobs import EMPTY
from tests.process.memory_saves import Saving, State, blank, same, saving
from tests.process.test_memory_save import all_kinds, state_of
from torchelastic.checkpoint.memory.room import Free
from torchelastic.network.ports import unused_ports

WAIT_S = 60
THREAD, PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS


CREW_SIZE = 2


@pytest.fixture
def alone(root: Path) -> Iterator[Saving]:
    with saving(root) as one:
        assert one.container
        yield one


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


# --- beside the training, in a thread ---------------------------------------------------------------------------------


def test_tensors_of_all_kinds_are_copied_as_they_are(alone: Saving) -> None:
    torch.manual_seed(0)
    state = all_kinds()
    expected = {key: value.detach().clone() for key, value in state.items()}
    future = alone.async_save(state, 1)
    change(state)
    future.result(WAIT_S)
    assert same(alone.load(blank(expected), 1), expected)


def test_a_copy_for_which_there_is_no_memory_leaves_the_save_out(
    alone: Saving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    alone.async_save(state_of(1), 1).result(WAIT_S)
    monkeypatch.setattr("torchelastic.checkpoint.memory.container.measure", lambda _: Free(0, 2**40))
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


# --- several ranks, in threads and in processes -----------------------------------------------------------------------


def sharded(step: int) -> State:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5) + step
    return {
        "sharded": distribute_tensor(whole, mesh, [Shard(0)]),
        "same": distribute_tensor(whole * 2, mesh, [Replicate()]),
        "nested": {"step": step, "list": [step]},
        "own": torch.full((11,), float(step)),
    }


def change_all(state: State) -> None:
    with torch.no_grad():
        for name in ("sharded", "same", "own"):
            (state[name].to_local() if isinstance(state[name], DTensor) else state[name]).fill_(-1)
    state["nested"]["list"].append(0)


def whole_of(state: State) -> State:
    return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}


def save_async(root: str, hosts: str, kind: AsyncCheckpointerType, steps: int, port: int) -> dict[str, Any]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # it may have children
    with saving(root, hosts) as one:
        equal, slots = [], []
        for step in range(1, steps + 1):
            state = sharded(step)
            future = one.async_save(state, step, async_checkpointer_type=kind)
            change_all(state)
            future.result(WAIT_S)
            one.replication.all_gather("saved", None)
            target = sharded(0)
            one.load(target, step)
            equal.append(same(whole_of(target), whole_of(sharded(step))))
            slots.append(sorted(one.inodes()))
        answer = {"latest": one.latest(), "equal": equal, "slots": slots}
        one.replication.all_gather("done", None)
    if kind is PROCESS:
        executor._CHECKPOINT_PROCESS = None
    return answer


@pytest.mark.long
@pytest.mark.parametrize("kind", [THREAD, PROCESS], ids=["thread", "process"])
@pytest.mark.parametrize("hosts", ["a", "ab"])
def test_ranks_save_beside_the_training(crew: Crew, root: Path, hosts: str, kind: AsyncCheckpointerType) -> None:
    answers = succeeded(crew.run(save_async, str(root), hosts, kind, 4, *unused_ports("127.0.0.1"), ranks=len(hosts)))
    for answer in answers:
        assert (answer["latest"], answer["equal"]) == (4, [True] * 4)
        assert len(answer["slots"][-1]) == len(answer["slots"][-2])
        if hosts == "a":
            assert answer["slots"][-1] == answer["slots"][-2]


def overlapping(root: str, hosts: str, kind: AsyncCheckpointerType, port: int) -> list[Any]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # it may have children
    with saving(root, hosts) as one:
        states = {step: sharded(step) for step in range(1, 9)}
        futures = [one.async_save(state, step, async_checkpointer_type=kind) for step, state in states.items()]
        under_way = sum(not future.done() for future in futures)
        for future in futures:
            future.result(WAIT_S)
        one.replication.all_gather("saved", None)
        answer = [under_way <= 1, one.latest(), len(one.inodes())]
        one.replication.all_gather("done", None)
    if kind is PROCESS:
        executor._CHECKPOINT_PROCESS = None
    return answer


@pytest.mark.long
@pytest.mark.parametrize(("kind", "slots"), [(THREAD, 7), (PROCESS, 8)], ids=["thread", "process"])
def test_a_save_waits_for_the_one_before_it(crew: Crew, root: Path, kind: AsyncCheckpointerType, slots: int) -> None:
    answers = succeeded(crew.run(overlapping, str(root), "ab", kind, *unused_ports("127.0.0.1"), ranks=2))
    for is_alone, latest, held in answers:
        assert (is_alone, latest) == (True, 8)
        assert held <= slots


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
