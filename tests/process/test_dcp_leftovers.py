"""What `torch.distributed.checkpoint` keeps of a group does not reach the next one."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import torchelastic
from tests.waiting import wait_until


def caching() -> DefaultSavePlanner:
    """A planner that keeps its plans, where this torch has those (2.7)."""
    can = "enable_plan_caching" in inspect.signature(DefaultSavePlanner).parameters
    return DefaultSavePlanner(**({"enable_plan_caching": True} if can else {}))


def in_a_group(step: Any) -> None:
    model = torch.nn.Linear(1, 1)
    state = torchelastic.ModelState(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def train_step(state: torchelastic.ModelState) -> None:
        if state.step == 2:
            raise StopIteration
        step(state.step)

    torchelastic.train(torchelastic.CoordinatorP2P(), train_step, state)


def test_a_plan_that_was_kept_for_another_group_is_made_anew(tmp_path: Path) -> None:
    planner = caching()  # in the last group this process was rank 1: it has its own plan, and rank 0 had those of all
    planner.set_up_planner({"a": torch.ones(3), "b": torch.ones(3)}, is_coordinator=False)
    planner.finish_plan(planner.create_local_plan())

    def save_and_read(number: int) -> None:
        state = {"a": torch.full((3,), 4.0 + number), "b": torch.full((3,), 5.0)}
        save(state, checkpoint_id=tmp_path / str(number), planner=caching())
        read = {name: torch.zeros(3) for name in state}
        load(read, checkpoint_id=tmp_path / str(number))
        assert all(torch.equal(read[name], value) for name, value in state.items())

    in_a_group(save_and_read)


def test_the_background_process_of_the_last_group_is_ended_beside_the_training_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[threading.Thread] = []

    class CheckpointProcess:
        def __del__(self) -> None:
            ended.append(threading.current_thread())

    name = "torch.distributed.checkpoint._async_process_executor"  # since torch 2.7
    executor: Any = importlib.import_module(name) if importlib.util.find_spec(name) else types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, executor)
    monkeypatch.setattr(executor, "_CHECKPOINT_PROCESS", CheckpointProcess(), raising=False)
    kept: list[Any] = []
    in_a_group(lambda _: kept.append(executor._CHECKPOINT_PROCESS))
    assert kept == [None, None]
    wait_until(lambda: len(ended) == 1)
    assert ended != [threading.current_thread()], "ending it takes seconds"
