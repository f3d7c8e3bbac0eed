"""Local checkpoints of several ranks; each has a folder of its own, as if it had a host of its own."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.process.local_ranks import Crew, Failed, succeeded
from tests.process.log_ears import heard
from tests.process.replicas import counting_pulls
from torchelastic.checkpoint.async_ckpt import AsyncCallsQueue
from torchelastic.checkpoint.compat.nvrx.local.strategies import LazyCliqueReplicationStrategy
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.format.disk import Disk
from torchelastic.checkpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager
from torchelastic.checkpoint.shards import ShardOf

CREW_SIZE = 4
#: Columns of a tensor of which each rank has rows.
WIDE = 100_000


# What the ranks do


def state_of(rank: int, iteration: int) -> dict[str, Any]:
    """Another state for every rank, with dtypes that gloo does not know."""
    generator = torch.Generator().manual_seed(1000 * iteration + rank)
    noise = torch.randn(50 + 10 * rank, generator=generator)
    return {
        "weight": noise,
        "pair": (noise.to(torch.float8_e4m3fn), (noise * 100).to(torch.int16)),
        "of_rank": rank,
        "iteration": iteration,
    }


def is_state_of(state: Any, rank: int, iteration: int) -> bool:
    expected = state_of(rank, iteration)
    return (
        torch.equal(state["weight"], expected["weight"])
        and all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(state["pair"], expected["pair"], strict=True)
        )
        and (state["of_rank"], state["iteration"]) == (rank, iteration)
    )


def manager_at(root: Path, host: int | None = None, **options: Any) -> LocalCheckpointManager:
    """A manager on the host of this rank, or on another one."""
    options.setdefault("timeout_s", 20)
    return LocalCheckpointManager(root / f"host-{dist.get_rank() if host is None else host}", "session", **options)


def cliques(factor: int = 2) -> LazyCliqueReplicationStrategy:
    return LazyCliqueReplicationStrategy(1, factor)


def save(root: Path, iterations: list[int], factor: int = 2, is_async: bool = False, keep: int = 1) -> list[str]:
    """Saves, and returns the files that are left."""
    manager = manager_at(root, repl_strategy=cliques(factor=factor) if factor > 1 else None, keep=keep)
    with AsyncCallsQueue(worker="thread", timeout_s=20) as queue:
        for iteration in iterations:
            state = BasicTensorAwareStateDict(state_of(dist.get_rank(), iteration))
            request = manager.save(state, iteration, is_async=is_async)
            assert (request is not None) == is_async
            if request is not None:
                queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
    dist.barrier()
    manager.close()
    return sorted(path.name for path in manager.local_ckpt_dir.iterdir() if not path.name.startswith("."))


def load(root: Path) -> Any:
    """Loads, and returns what was found, of which rank it is, whether it is right, and the warnings."""
    with heard() as messages:
        manager = manager_at(root)
        try:
            found = manager.find_latest()
            if found == -1:
                return -1, None, False, messages
            state, ckpt_id = manager.load()
            is_right = is_state_of(state.to_tree(), ckpt_id.rank, ckpt_id.iteration)
            return found, tuple(ckpt_id), is_right, messages
        finally:
            dist.barrier()
            manager.close()


# Other ranks, other cliques, other worlds


def test_another_number_of_ranks_is_told_so_and_can_read_all_parts(crew: Crew, tmp_path: Path) -> None:
    before, after = 2, 4
    succeeded(crew.run(save, tmp_path, [5], before, ranks=before))
    for answer in crew.run(load, tmp_path, ranks=after):
        assert isinstance(answer, Failed)
        assert f"was saved by {before} rank(s), and there are {after} now" in answer.text
    answers = succeeded(crew.run(load_otherwise, tmp_path, ranks=after))
    assert [found for found, _, _ in answers] == [(5, before)] * after
    assert [all_right for _, all_right, _ in answers] == [list(range(before))] * after
    assert [part for *_, part in answers] == [rank % before for rank in range(after)]


def load_otherwise(root: Path) -> tuple[tuple[int, int], list[int], int]:
    manager = manager_at(root)
    found = manager.find_latest(), manager.latest_world_size
    every = manager.load_all()
    right = [part.rank for state, part in every if is_state_of(state.to_tree(), part.rank, part.iteration)]
    _, chosen = manager.load(shard=dist.get_rank() % manager.latest_world_size)
    dist.barrier()
    manager.close()
    return found, right, chosen.rank


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_split_tensors_are_put_together_by_any_number_of_ranks(
    crew: Crew, tmp_path: Path, before: int, after: int
) -> None:
    succeeded(crew.run(save_split, tmp_path, ranks=before))
    assert succeeded(crew.run(load_split, tmp_path, ranks=after)) == [True] * after


def split_state(fill: bool, wide: int = 4) -> dict[str, Any]:
    whole = torch.arange(8 * wide, dtype=torch.float32).view(8, wide)
    rows = 8 // dist.get_world_size()
    begin = rows * dist.get_rank()
    part = whole[begin : begin + rows].clone() if fill else torch.zeros(rows, wide)
    bias = torch.full((3,), 7.0) if fill else torch.zeros(3)
    return {"split": ShardOf(part, (8, wide), (begin, 0)), "whole": bias, "step": 5 if fill else 0}


def save_split(root: Path, wide: int = 4, factor: int | None = None) -> None:
    manager = manager_at(root, repl_strategy=cliques(factor=factor or dist.get_world_size()))
    manager.save(BasicTensorAwareStateDict(split_state(True, wide)), 5)
    dist.barrier()
    manager.close()


def load_split(root: Path) -> bool:
    manager = manager_at(root)
    template = split_state(fill=False)
    state, ckpt_id = manager.load_resharded(template)
    dist.barrier()
    manager.close()
    expected = split_state(fill=True)
    return (
        torch.equal(template["split"].tensor, expected["split"].tensor)
        and torch.equal(state["whole"], expected["whole"])
        and (state["step"], ckpt_id.iteration) == (5, 5)
    )


def test_of_the_parts_on_other_hosts_only_that_is_fetched_which_the_template_has(crew: Crew, tmp_path: Path) -> None:
    succeeded(crew.run(save_split, tmp_path, WIDE, 1, ranks=2))
    for is_right, fetched_bytes in succeeded(crew.run(load_own_part, tmp_path, ranks=2)):
        assert is_right
        assert 0 < fetched_bytes < 2**17 < 4 * WIDE  # the header of the other part


def load_own_part(root: Path) -> tuple[bool, int]:
    manager, template = manager_at(root), split_state(False, WIDE)
    with counting_pulls() as came:
        manager.load_resharded(template)
    dist.barrier()
    manager.close()
    return torch.equal(template["split"].tensor, split_state(True, WIDE)["split"].tensor), sum(came)


def test_one_manager_serves_group_after_group_with_other_ranks(crew: Crew, tmp_path: Path) -> None:
    """As in an elastic job: the processes live on, the group is formed anew, and the ranks are given out anew."""
    assert succeeded(crew.run(swap_ranks, tmp_path, ranks=2)) == [[1, 7, True, 8, True], [0, 7, True, 8, True]]


def swap_ranks(root: Path) -> list[Any]:
    rank = dist.get_rank()
    manager = manager_at(root, repl_strategy=cliques(), keep=2)
    manager.save(BasicTensorAwareStateDict(state_of(rank, 7)), 7)
    dist.destroy_process_group()
    store = f"file://{root / 'another-store'}"
    dist.init_process_group("gloo", init_method=store, rank=1 - rank, world_size=2)
    state, ckpt_id = manager.load()
    found: list[Any] = [manager.rank, ckpt_id.iteration, is_state_of(state.to_tree(), 1 - rank, 7)]
    manager.save(BasicTensorAwareStateDict(state_of(1 - rank, 8)), 8)
    state, ckpt_id = manager.load()
    found += [ckpt_id.iteration, is_state_of(state.to_tree(), 1 - rank, 8)]
    dist.barrier()
    manager.close()
    return found


# Rollbacks and what is kept


class BrokenDisk(Disk):
    is_broken = False

    def sync(self, descriptor: int, path: Path) -> None:
        if self.is_broken:
            raise CheckpointError(errno.EIO, os.strerror(errno.EIO), str(path))
        super().sync(descriptor, path)


def test_a_write_that_fails_on_one_rank_leaves_nothing_on_any(crew: Crew, tmp_path: Path) -> None:
    answers = succeeded(crew.run(save_broken, tmp_path, ranks=2))
    assert [left for left, _ in answers] == [["step-000000003"], ["step-000000003"]]
    assert all("Input/output error" in text for _, text in answers)
    assert "failed on rank 1" in answers[0][1]


def save_broken(root: Path) -> tuple[list[str], str]:
    rank, disk, text = dist.get_rank(), BrokenDisk(), ""
    manager = manager_at(root, disk=disk)
    manager.save(BasicTensorAwareStateDict(state_of(rank, 3)), 3)
    disk.is_broken = rank == 1
    try:
        manager.save(BasicTensorAwareStateDict(state_of(rank, 4)), 4)
    except CheckpointError as error:
        text = str(error)
    manager.close()
    return sorted(path.name[:14] for path in manager.local_ckpt_dir.glob("[!.]*")), text


class SlowDisk(Disk):
    """Nothing is written before it is said so."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def sync(self, descriptor: int, path: Path) -> None:
        assert self.goes_on.wait(30)
        super().sync(descriptor, path)


def test_a_rank_that_finalizes_alone_waits_for_no_other_and_the_next_save_commits_what_all_have_done(
    crew: Crew, tmp_path: Path
) -> None:
    (quick, slow) = succeeded(crew.run(finalize_alone, tmp_path, ranks=2))
    assert quick == [[1], [], 6, ["6"]]
    assert slow == [[], [1], 6, ["6"]]


def finalize_alone(root: Path) -> list[Any]:
    """What rank 0 finalises at once, rank 1 much later; then both save again, in step."""
    rank, disk = dist.get_rank(), SlowDisk()
    manager = manager_at(root, disk=disk, repl_strategy=None)
    disk.goes_on.set()
    manager.save(BasicTensorAwareStateDict(state_of(rank, 4)), 4)
    if rank == 1:
        disk.goes_on.clear()
    with AsyncCallsQueue(worker="thread", timeout_s=20) as queue:
        begin(queue, manager, 5)
        before_s = time.monotonic()
        early = queue.maybe_finalize_async_calls(blocking=rank == 0, no_dist=True)
        assert time.monotonic() - before_s < 10, "it has waited for the other rank"
        dist.barrier()
        disk.goes_on.set()
        late = queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
        assert committed(root, rank) == ["4"], "nobody has asked the others"
        dist.barrier()
        begin(queue, manager, 6)
        assert committed(root, rank) == ["5"], "as `keep` says"
        queue.maybe_finalize_async_calls(blocking=True)
    dist.barrier()
    assert is_state_of(manager.load()[0].to_tree(), rank, 6)
    manager.close()
    return [early, late, manager.latest_iteration, committed(root, rank)]


def begin(queue: AsyncCallsQueue, manager: LocalCheckpointManager, iteration: int) -> None:
    request = manager.save(BasicTensorAwareStateDict(state_of(dist.get_rank(), iteration)), iteration, is_async=True)
    assert request is not None
    queue.schedule_async_request(request)


def committed(root: Path, host: int) -> list[str]:
    paths = sorted((root / f"host-{host}").glob("session/step-*/manifest.json"))
    return [path.parent.name.split(".")[0].removeprefix("step-").lstrip("0") for path in paths]


# Out of step


def test_a_rank_that_saves_another_iteration_is_named_on_all_ranks(crew: Crew, tmp_path: Path) -> None:
    for answer in crew.run(save_out_of_step, tmp_path, ranks=4):
        assert isinstance(answer, Failed)
        assert answer.kind == "OutOfStepError"
        assert "rank 2 calls save(iteration=9" in answer.text
        assert "ranks 0, 1, 3 call save(iteration=8" in answer.text


def save_out_of_step(root: Path) -> None:
    manager, rank = manager_at(root), dist.get_rank()
    manager.save(BasicTensorAwareStateDict(state_of(rank, 8)), 9 if rank == 2 else 8)
