"""Contract: what a job leaves in its folder is what `keep` says; `torchelastic checkpoint ls` shows it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.facades import KINDS, Model, Streamed, weights_at
from tests.contracts.faults import in_child
from torchelastic.checkpoint import (
    BCPState,
    DiskTier,
    DurableTier,
    FileSystemCheckpointManager,
    KeepAll,
    KeepEvery,
    KeepLast,
    KeepPolicy,
    MemoryTier,
    TieredCheckpointManager,
)
from torchelastic.checkpoint.api import save
from torchelastic.checkpoint.command.main import main
from torchelastic.checkpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager

SAVES = 6


def on_tier(tier: Callable[[Path, KeepPolicy], DiskTier | MemoryTier | DurableTier]) -> Callable[[Path, Any], None]:
    def saved(folder: Path, keep: KeepPolicy) -> None:
        manager = TieredCheckpointManager([tier(folder, keep)])
        for _ in range(SAVES):
            save(manager, Streamed())
        manager.close()

    return saved


def streams(folder: Path, keep: int) -> None:
    manager = FileSystemCheckpointManager(folder, keep=keep)
    for _ in range(SAVES):
        save(manager, Streamed())


def training(folder: Path, keep: int | KeepPolicy) -> None:
    module = Model(weights_at(0))
    if isinstance(keep, int):
        state = BCPState(module, None, default_ckpt_path=folder, keep=keep)
    else:
        state = BCPState(module, None, tiers=[DiskTier(folder, keep)])
    for _ in range(SAVES):
        state.save()
    state.close()


def local(folder: Path, keep: int | KeepPolicy) -> None:
    manager = LocalCheckpointManager(folder, keep=keep)
    for iteration in range(SAVES):
        manager.save(BasicTensorAwareStateDict({"weights": weights_at(iteration)}), iteration)
    manager.close()


def memory(folder: Path, keep: None) -> None:  # it has no choice: the newest
    for step in range(SAVES):
        KINDS["memory"].save(folder, step)


#: How a job of each kind saves, and what it calls the first of its checkpoints.
JOBS: Mapping[str, tuple[Callable[[Path, Any], None], int]] = {
    "streams": (streams, 0),
    "tiered": (on_tier(DiskTier), 0),
    "private disk": (on_tier(lambda folder, keep: DiskTier(folder, keep, shared=False)), 0),
    "memory tier": (on_tier(MemoryTier), 0),
    "durable": (on_tier(lambda folder, keep: DurableTier(folder.as_uri(), keep)), 0),
    "training": (training, 1),
    "local": (local, 0),
    "memory": (memory, 0),
}
NUMBERS = [(1, [5]), (3, [3, 4, 5])]
POLICIES = [
    (KeepLast(1), [5]),
    (KeepLast(3), [3, 4, 5]),
    (KeepEvery(3) | KeepLast(1), [0, 3, 5]),
    (KeepAll(), [0, 1, 2, 3, 4, 5]),
]
TAKES: Mapping[str, Sequence[tuple[Any, list[int]]]] = {
    **dict.fromkeys(JOBS, POLICIES),
    "streams": NUMBERS,
    "training": [*NUMBERS, (KeepLast(3), [3, 4, 5]), (KeepAll(), [0, 1, 2, 3, 4, 5])],
    "local": [*NUMBERS, *POLICIES],
    "memory": [(None, [5])],
}
CASES = [(name, keep, kept) for name in JOBS for keep, kept in TAKES[name]]


@pytest.mark.parametrize(("name", "keep", "kept"), CASES, ids=lambda value: str(value).replace(" ", "-"))
def test_what_stays_is_what_keep_says(
    name: str, keep: Any, kept: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, first = JOBS[name]
    in_child(lambda: job(tmp_path / "saved", keep))
    assert main(["ls", "--json", str(tmp_path / "saved")]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    complete = [one.get("step", one.get("id")) for one in shown if one["complete"]]
    assert complete == [first + number for number in reversed(kept)], "newest first"
