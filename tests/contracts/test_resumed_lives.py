"""Contract: lives of a job in one process, each with a manager of its own, leave nothing behind but checkpoints."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

import torchelastic
from tests.contracts.facades import FACADES, Model, weights_at
from tests.contracts.faults import in_child, warm_up
from tests.waiting import wait_until
from torchelastic.checkpoint import BCPState, MemoryTier, TieredCheckpointManager
from torchelastic.group.peers import Alone

LIVES = 6


def closed(name: str, folder: Path, life: int) -> None:
    FACADES[name].resume(folder)
    FACADES[name].save(folder, life)


def tiered(folder: Path, life: int) -> None:
    manager = TieredCheckpointManager([MemoryTier(folder)])
    model = torch.nn.Linear(4, 4)
    state = torchelastic.ModelState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    manager.save_step(state, life, Alone())
    assert manager.wait(30)


def training(folder: Path, life: int) -> None:
    module = Model(weights_at(life))
    state = BCPState(module, None, tiers=[MemoryTier(folder)])
    state.maybe_resume_from_ckpt()
    state.save()


DROPPED: Mapping[str, Callable[[Path, int], None]] = {"tiered": tiered, "training": training}


@pytest.fixture(scope="module", autouse=True)
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """An optimizer's first step imports torch._dynamo, for two CPU seconds; then no child has to."""
    warm_up([lambda: tiered(tmp_path_factory.mktemp("warm"), 0)])


def held(folder: Path) -> dict[str, int]:
    """What is counted after a life, when its threads have ended."""
    gc.collect()
    wait_until(lambda: threading.active_count() == 1, 30, "the threads of the manager end")
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "files": sum(path.is_file() for path in folder.rglob("*")),
    }


def lives(one: Callable[[Path, int], None], folder: Path) -> list[dict[str, int]]:
    seen = []
    for life in range(LIVES):
        one(folder, life)
        seen.append(held(folder))
    return seen


def require_flat(seen: list[dict[str, int]]) -> None:
    for what in seen[0]:
        numbers = [one[what] for one in seen]
        assert max(numbers[3:]) <= max(numbers[:3]), f"{what} grow: {numbers}"


@pytest.mark.parametrize("name", FACADES)
def test_a_manager_that_is_done_leaves_nothing(name: str, tmp_path: Path) -> None:
    require_flat(in_child(lambda: lives(lambda folder, life: closed(name, folder, life), tmp_path / "saved")).value)


@pytest.mark.parametrize("name", DROPPED)
def test_a_manager_that_is_dropped_without_close_leaves_nothing(name: str, tmp_path: Path) -> None:
    require_flat(in_child(lambda: lives(DROPPED[name], tmp_path / "saved")).value)
