"""Copies of a state into a slot; most of them from a GPU: `make test-gpu` on a machine that has one."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchelastic
from torchelastic.checkpoint import TieredCheckpointManager
from torchelastic.checkpoint.format.copying import PendingCopy
from torchelastic.checkpoint.format.header import Header, lay_out
from torchelastic.checkpoint.format.pool import SlotPool
from torchelastic.checkpoint.format.stage import Stage
from torchelastic.checkpoint.shards import flatten, load_tree
from torchelastic.checkpoint.store import MemoryTier
from torchelastic.group.peers import Alone

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no GPU here: on a machine with one, `make test-gpu`",
)


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    """A folder whose memory CUDA can pin."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def staged(pool: SlotPool, tree: Any) -> tuple[Stage, Header, list[torch.Tensor]]:
    flat = flatten(tree)
    header = lay_out(flat, {})
    return pool.take(header), header, [named.tensor for named in flat.tensors]


def finish(pool: SlotPool, stage: Stage, header: Header, pending: PendingCopy, path: Path) -> Any:
    pending.wait()
    stage = pool.seal(stage, header)
    pool.publish(stage, path)
    return load_tree(path)


def test_on_the_cpu_the_copy_is_complete_at_once(tmp_path: Path) -> None:
    pool, weight = SlotPool(tmp_path), torch.arange(5.0)
    stage, header, sources = staged(pool, {"w": weight, "n": 3})
    pending = stage.copy_beside(sources)
    weight.zero_()
    assert torch.equal(finish(pool, stage, header, pending, tmp_path / "shard")["w"], torch.arange(5.0))


def test_a_source_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path)
    stage, _, _ = staged(pool, {"w": torch.zeros(5)})
    with pytest.raises(ValueError, match=r"'w' was laid out as a torch\.float32"):
        stage.copy_beside([torch.zeros(5, dtype=torch.float64)])


@needs_gpu
def test_a_step_after_the_wait_does_not_reach_the_copy(tmpfs: Path) -> None:
    pool = SlotPool(tmpfs)
    weights = [torch.nn.Parameter(torch.full((4 * 2**20,), 1.0, device="cuda")) for _ in range(8)]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    stage, header, sources = staged(pool, {str(number): weight for number, weight in enumerate(weights)})
    for weight in weights:
        weight.grad = torch.full_like(weight, 7.0)
    pending = stage.copy_beside(sources)
    pending.wait()
    optimizer.step()
    loaded = finish(pool, stage, header, pending, tmpfs / "shard")
    assert all(torch.equal(tensor, torch.ones(4 * 2**20)) for tensor in loaded.values())
    assert all(bool((weight == -6).all()) for weight in weights)
    pool.close()


@needs_gpu
def test_a_copy_waits_for_what_the_training_stream_was_given_before(tmpfs: Path) -> None:
    pool, weight = SlotPool(tmpfs), torch.zeros(2**20, device="cuda")
    stage, header, sources = staged(pool, {"w": weight, "cpu": torch.arange(3)})
    torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
    weight.fill_(5.0)
    loaded = finish(pool, stage, header, stage.copy_beside(sources), tmpfs / "shard")
    assert torch.equal(loaded["w"], torch.full((2**20,), 5.0))
    assert torch.equal(loaded["cpu"], torch.arange(3))
    pool.close()


@needs_gpu
def test_sources_that_are_dropped_are_not_reused_before_the_copy_has_read_them(tmpfs: Path) -> None:
    pool = SlotPool(tmpfs)
    tree = {"w": torch.full((2**22,), 3.0, device="cuda")}
    stage, header, sources = staged(pool, tree)
    pending = stage.copy_beside(sources)
    del tree, sources
    for _ in range(20):
        torch.zeros(2**22, device="cuda")
    assert torch.equal(finish(pool, stage, header, pending, tmpfs / "shard")["w"], torch.full((2**22,), 3.0))
    pool.close()


@needs_gpu
def test_where_memory_cannot_be_pinned_the_copy_is_right_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Files on a disk; `tmp_path` is no tmpfs, or this shows nothing."""
    pool = SlotPool(tmp_path)
    with caplog.at_level(logging.WARNING):
        for number in range(2):
            stage, header, sources = staged(pool, {"w": torch.full((2**20,), float(number), device="cuda")})
            stage.copy(sources)
            assert torch.equal(torch.ones(3, device="cuda").cpu(), torch.ones(3)), "a kernel after it was refused"
            loaded = finish(pool, stage, header, PendingCopy(), tmp_path / f"shard-{number}")
            assert torch.equal(loaded["w"], torch.full((2**20,), float(number)))
    assert sum("CUDA cannot pin memory" in line for line in caplog.messages) == 1
    pool.close()


@needs_gpu
def test_what_a_step_changes_after_a_save_in_the_background_is_not_in_it(tmpfs: Path) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(16)), torch.nn.BatchNorm1d(1024)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = torchelastic.ModelState(model, optimizer)
    manager = TieredCheckpointManager([MemoryTier(tmpfs / "memory")])

    def train() -> None:
        model(torch.randn(8, 1024, device="cuda")).square().sum().backward()
        optimizer.step()

    train()
    for step in range(1, 5):
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        manager.save_step(state, step, Alone())
        train()
        assert manager.wait()
        assert not torch.equal(model.state_dict()["0.weight"], expected["0.weight"])
        assert manager.restore(state, Alone()) == step
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, expected[name]), f"step {step}: {name}"
    manager.close()
