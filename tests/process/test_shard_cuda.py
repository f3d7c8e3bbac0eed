"""Copies beside training. On a GPU: `pytest tests/process/test_shard_cuda.py` on a machine that has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from torchelastic.checkpoint.shards import flatten, load_tree
from torchelastic.checkpoint.shards.cuda import Pending, copy_beside
from torchelastic.checkpoint.shards.header import Header, lay_out
from torchelastic.checkpoint.shards.pool import SlotPool
from torchelastic.checkpoint.shards.stage import Stage

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no GPU here: run `pytest tests/process/test_shard_cuda.py` on a machine that has one",
)


def staged(pool: SlotPool, tree: Any) -> tuple[Stage, Header, list[torch.Tensor]]:
    flat = flatten(tree)
    header = lay_out(flat, {})
    return pool.take(header), header, [named.tensor for named in flat.tensors]


def finish(pool: SlotPool, stage: Stage, header: Header, pending: Pending, path: Path) -> Any:
    pending.wait()
    assert pending.done()
    stage = pool.seal(stage, header)
    pool.publish(stage, path)
    return load_tree(path)


def test_on_the_cpu_the_copy_is_complete_at_once(tmp_path: Path) -> None:
    pool, weight = SlotPool(tmp_path), torch.arange(5.0)
    stage, header, sources = staged(pool, {"w": weight, "n": 3})
    pending = copy_beside(stage, sources)
    assert pending.done()
    weight.zero_()
    assert torch.equal(finish(pool, stage, header, pending, tmp_path / "shard")["w"], torch.arange(5.0))


def test_a_source_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path)
    stage, _, _ = staged(pool, {"w": torch.zeros(5)})
    with pytest.raises(ValueError, match=r"'w' was laid out as a torch\.float32"):
        copy_beside(stage, [torch.zeros(5, dtype=torch.float64)])


@needs_gpu
def test_a_step_after_the_wait_does_not_reach_the_copy(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path, pinned=True)
    weights = [torch.nn.Parameter(torch.full((4 * 2**20,), 1.0, device="cuda")) for _ in range(8)]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    stage, header, sources = staged(pool, {str(number): weight for number, weight in enumerate(weights)})
    for weight in weights:
        weight.grad = torch.full_like(weight, 7.0)
    pending = copy_beside(stage, sources)
    pending.wait()
    optimizer.step()
    loaded = finish(pool, stage, header, pending, tmp_path / "shard")
    assert all(torch.equal(tensor, torch.ones(4 * 2**20)) for tensor in loaded.values())
    assert all(bool((weight == -6).all()) for weight in weights)
    pool.close()


@needs_gpu
def test_a_copy_waits_for_what_the_training_stream_was_given_before(tmp_path: Path) -> None:
    pool, weight = SlotPool(tmp_path, pinned=True), torch.zeros(2**20, device="cuda")
    stage, header, sources = staged(pool, {"w": weight, "cpu": torch.arange(3)})
    torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
    weight.fill_(5.0)
    loaded = finish(pool, stage, header, copy_beside(stage, sources), tmp_path / "shard")
    assert torch.equal(loaded["w"], torch.full((2**20,), 5.0))
    assert torch.equal(loaded["cpu"], torch.arange(3))
    pool.close()


@needs_gpu
def test_sources_that_are_dropped_are_not_reused_before_the_copy_has_read_them(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path, pinned=True)
    tree = {"w": torch.full((2**22,), 3.0, device="cuda")}
    stage, header, sources = staged(pool, tree)
    pending = copy_beside(stage, sources)
    del tree, sources
    for _ in range(20):
        torch.zeros(2**22, device="cuda")
    assert torch.equal(finish(pool, stage, header, pending, tmp_path / "shard")["w"], torch.full((2**22,), 3.0))
    pool.close()
