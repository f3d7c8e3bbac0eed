"""Saves that do not fit into a really small tmpfs are skipped, on all ranks, and training goes on. Root may mount."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.process.forked_ranks import run_ranks, values
from tests.process.log_ears import heard
from tests.process.memory_saves import saving
from tests.process.small_tmpfs import small_tmpfs
from torchelastic import metrics

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


def train(roots: list[Path], sizes_mib: list[int]) -> dict[str, Any]:
    """On each rank: a save of its own tensor per step, then the newest checkpoint is loaded."""
    rank, collect = dist.get_rank() if dist.is_initialized() else 0, Collect()
    metrics.configure(collect)
    with heard() as warnings, saving(roots[rank], "ab") as one:
        for step, size_mib in enumerate(sizes_mib):
            one.save({f"w{rank}": torch.full((size_mib * MIB // 4,), float(step)), "step": step}, step)
        newest = one.latest()
        assert newest is not None
        size = sizes_mib[newest] * MIB // 4
        loaded = one.load({f"w{rank}": torch.zeros(size), "step": -1}, newest)
        assert torch.equal(loaded[f"w{rank}"], torch.full((size,), float(newest)))
        return {"loaded": loaded["step"], "metrics": collect.seen, "warnings": warnings}


def test_a_save_that_does_not_fit_is_skipped_and_the_one_before_stays(small: Path) -> None:
    (told,) = values(run_ranks(train, [small], [2, 20, 20, 20]))
    assert told["loaded"] == 0
    assert told["metrics"]["checkpoint.memory.skipped.tmpfs"] == 3
    skipped = [text for text in told["warnings"] if "was skipped" in text]
    assert len(skipped) == 2, "the first and the second; the next would be the fourth"
    for words in ("step 1 in", "20.", "MiB on the tmpfs", "--shm-size", "prune --dead"):
        assert words in skipped[0]
    assert [path.name for path in small.rglob("step-*_ckpt")] == ["step-0_ckpt"]
    assert sum(path.stat().st_blocks * 512 for path in small.rglob("*") if path.is_file()) <= 3 * MIB


def test_one_rank_without_room_makes_all_ranks_skip(small: Path, tmp_path: Path) -> None:
    first, second = values(run_ranks(train, [tmp_path, small], [1, 20], ranks=2))
    assert (first["loaded"], second["loaded"]) == (0, 0)
    assert [told["metrics"].get("checkpoint.memory.skipped", 0) for told in (first, second)] == [1, 0], "told once"
    assert [path.name for path in tmp_path.rglob("step-*_ckpt")] == ["step-0_ckpt"] * 2, "the tmpfs is in it"
    assert "host 'host-b'" in str(first["warnings"]), "and says who has no room"
