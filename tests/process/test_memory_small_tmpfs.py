"""Saves that do not fit into a really small tmpfs are skipped, on all ranks, and training goes on. Root may mount."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tests.process.forked_ranks import run_ranks, values
from tests.process.small_tmpfs import small_tmpfs
from torchelastic import metrics
from torchelastic.checkpoint.memory import (
    CheckpointContainerId,
    CheckpointObjectManager,
    DefaultCheckpointLoader,
    DefaultCheckpointSaver,
    MemoryStorageReader,
    MemoryStorageWriter,
)
from torchelastic.checkpoint.replication import ReplicationManager

MIB = 2**20
SIZE_BYTES = 12 * MIB


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 12 MiB."""
    with small_tmpfs(tmp_path / "memory", SIZE_BYTES) as folder:
        yield folder


class Collect(metrics.MetricHandler):
    def __init__(self) -> None:
        self.seen: dict[str, float] = {}

    def emit(self, metric_data: Any) -> None:
        self.seen[metric_data.name] = metric_data.value


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def train(base: str, sizes_mib: list[int]) -> dict[str, Any]:
    """On each rank: a save of its own tensor per step, then the newest checkpoint is loaded."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank = dist.get_rank() if dist.is_initialized() else 0
    collect, warned = Collect(), Warnings()
    metrics.configure(collect)
    logging.getLogger("torchelastic.checkpoint.memory").addHandler(warned)
    manager, replication = CheckpointObjectManager(), ReplicationManager()
    replication.initialize(manager)
    of_memory: Any = MemoryStorageWriter  # to mypy it is abstract, since torch's protocol of stagers has empty methods
    writer = of_memory(DefaultCheckpointSaver(ckpt_obj_manager=manager, replication_manager=replication))
    for step, size_mib in enumerate(sizes_mib):
        state = {f"w{rank}": torch.full((size_mib * MIB // 4,), float(step)), "step": step}
        save(state, checkpoint_id=f"{base}/step-{step}_ckpt", storage_writer=writer)
    loader = DefaultCheckpointLoader(manager, replication)
    latest = loader.get_latest_complete_checkpoint(base)
    loaded: dict[str, Any] = {"step": -1}
    if latest is not None:
        newest = CheckpointContainerId.parse_version_container_step(latest.name) or 0
        loaded[f"w{rank}"] = torch.zeros(sizes_mib[newest] * MIB // 4)
        load(loaded, checkpoint_id=str(latest), storage_reader=MemoryStorageReader(latest, loader))
        assert torch.equal(loaded[f"w{rank}"], torch.full((sizes_mib[newest] * MIB // 4,), float(newest)))
    return {"loaded": loaded["step"], "metrics": collect.seen, "warnings": warned.texts}


def test_a_save_that_does_not_fit_is_skipped_and_the_one_before_stays(small: Path) -> None:
    base = small / "7"
    (told,) = values(run_ranks(train, str(base), [2, 20, 20, 20]))
    assert told["loaded"] == 0
    assert told["metrics"]["checkpoint.memory.skipped.tmpfs"] == 3
    skipped = [text for text in told["warnings"] if "was skipped" in text]
    assert len(skipped) == 2, "the first and the second; the next would be the fourth"
    for words in ("step 1 in", "20.", "MiB on the tmpfs", "--shm-size", "prune --dead"):
        assert words in skipped[0]
    assert [path.name for path in base.glob("step-*_ckpt")] == ["step-0_ckpt"]
    assert sum(path.stat().st_blocks * 512 for path in base.rglob("*") if path.is_file()) <= 3 * MIB


def test_one_rank_without_room_makes_all_ranks_skip(small: Path, tmp_path: Path) -> None:
    hosts = [{"TORCHELASTIC_FAILURE_DOMAIN": name} for name in ("a", "b")]
    bases = [str(tmp_path / "7"), str(small / "7")]
    first, second = values(run_ranks(train_at, bases, [1, 20], ranks=2, environments=hosts))
    assert (first["loaded"], second["loaded"]) == (0, 0)
    assert (skips(first), skips(second)) == (1, 0), "it is told once"
    assert [path.name for base in bases for path in Path(base).glob("step-*_ckpt")] == ["step-0_ckpt"] * 2
    assert "host 'b'" in str(first["warnings"]), "and says who has no room"


def skips(told: dict[str, Any]) -> int:
    return int(told["metrics"].get("checkpoint.memory.skipped", 0))


def train_at(bases: list[str], sizes_mib: list[int]) -> dict[str, Any]:
    return train(bases[dist.get_rank()], sizes_mib)
