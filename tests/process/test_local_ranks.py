"""Local checkpoints of several ranks; each has a folder of its own, as if it had a host of its own."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.process.local_ranks import Crew, Failed, crew_of, succeeded
from tests.process.pairs import survivor_of
from tests.process.test_local_manager import Deadly
from torchelastic.checkpoint.async_ckpt import AsyncCallsQueue
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager, OutOfStepError
from torchelastic.checkpoint.replication.strategies import LazyCliqueReplicationStrategy
from torchelastic.checkpoint.shards import ShardOf
from torchelastic.checkpoint.shards.disk import Disk
from torchelastic.checkpoint.shards.header import PREAMBLE_BYTES, decode_preamble


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with crew_of(4) as started:
        yield started


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


def cliques(jump: int = 1, factor: int = 2) -> LazyCliqueReplicationStrategy:
    return LazyCliqueReplicationStrategy(jump, factor)


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
    return sorted(path.name for path in manager.local_ckpt_dir.iterdir())


def load(root: Path, hosts: list[int] | None = None, strategy: LazyCliqueReplicationStrategy | None = None) -> Any:
    """Loads, and returns what was found, of which rank it is, whether it is right, and the warnings."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torchelastic.checkpoint")
    logger.addHandler(handler)
    manager = manager_at(root, hosts[dist.get_rank()] if hosts else None, repl_strategy=strategy)
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
        logger.removeHandler(handler)


def load_at_once(root: Path) -> None:
    """Loads without looking for what there is."""
    manager = manager_at(root)
    try:
        manager.load()
    finally:
        dist.barrier()
        manager.close()


def iterations_and_parts(answers: list[Any]) -> list[Any]:
    """Of each rank: the iteration that it found, and the part that it loaded; all of it right."""
    assert all(is_right for _, _, is_right, _ in succeeded(answers))
    return [(found, part) for found, part, _, _ in answers]


def parts(iteration: int, ranks: int) -> list[Any]:
    return [(iteration, (iteration, rank, "session")) for rank in range(ranks)]


def shards(root: Path, host: int, iteration: int = 0, of_rank: int | None = None) -> list[Path]:
    rank = "?????" if of_rank is None else f"{of_rank:05d}"
    step = f"{iteration:09d}" if iteration else "*"
    return sorted((root / f"host-{host}").glob(f"session/*/step-{step}.*.shard-{rank}-of-*.shard"))


def flip_a_bit(path: Path) -> None:
    """In the middle of the first tensor."""
    data = bytearray(path.read_bytes())
    data[decode_preamble(bytes(data[:PREAMBLE_BYTES])).data_offset_bytes + 5] ^= 1
    path.write_bytes(data)


def lose(root: Path, host: int) -> None:
    shutil.rmtree(root / f"host-{host}")


# Saving and losing


@pytest.mark.parametrize("is_async", [False, True])
def test_every_rank_gets_its_own_part_back(crew: Crew, tmp_path: Path, is_async: bool) -> None:
    files = succeeded(crew.run(save, tmp_path, [3, 7], 1, is_async, ranks=2))
    assert [len(names) for names in files] == [1, 1], "only the newest is kept, and nothing else is left"
    assert iterations_and_parts(crew.run(load, tmp_path, ranks=2)) == parts(7, 2)


@pytest.mark.parametrize("is_async", [False, True])
def test_the_clique_holds_copies_from_which_a_lost_host_is_restored(crew: Crew, tmp_path: Path, is_async: bool) -> None:
    files = succeeded(crew.run(save, tmp_path, [3, 7], 2, is_async, ranks=4))
    assert [len(names) for names in files] == [2, 2, 2, 2]
    for host in (0, 3):
        lose(tmp_path, host)
    assert iterations_and_parts(crew.run(load, tmp_path, ranks=4)) == parts(7, 4)
    assert [len(shards(tmp_path, host, 7)) for host in range(4)] == [1, 2, 2, 1], "what was fetched is kept"


@pytest.mark.parametrize("shared", [False, True])
def test_a_rank_whose_files_are_removed_under_it_gets_its_part_from_the_clique(
    crew: Crew, tmp_path: Path, shared: bool
) -> None:
    """With folders of their own, and on one host, with one folder for both."""
    assert succeeded(crew.run(lose_and_load, tmp_path, shared, ranks=2)) == [(True, 5), (True, 5)]


def lose_and_load(root: Path, shared: bool) -> tuple[bool, int]:
    rank = dist.get_rank()
    manager = manager_at(root, 0 if shared else rank, repl_strategy=cliques())
    for iteration in (4, 5):
        manager.save(BasicTensorAwareStateDict(state_of(rank, iteration)), iteration)
    if rank == 1:
        shutil.rmtree(manager.local_ckpt_dir)
    dist.barrier()
    found = manager.find_latest()
    state, ckpt_id = manager.load()
    is_right = is_state_of(state.to_tree(), rank, 5) and ckpt_id.rank == rank
    manager.save(BasicTensorAwareStateDict(state_of(rank, 6)), 6)
    dist.barrier()
    manager.close()
    return is_right, found


def test_a_lost_clique_means_an_older_checkpoint_or_none(crew: Crew, tmp_path: Path) -> None:
    succeeded(crew.run(save, tmp_path, [3, 7], 2, False, 2, ranks=4))
    for host in (0, 1):
        for path in shards(tmp_path, host, 7):
            path.unlink()
    answers = crew.run(load, tmp_path, ranks=4)
    assert iterations_and_parts(answers) == parts(3, 4)
    assert all("nobody holds the part(s) of ranks 0, 1" in " ".join(messages) for *_, messages in answers)
    lose(tmp_path, 2)
    lose(tmp_path, 3)
    assert [answer[0] for answer in succeeded(crew.run(load, tmp_path, ranks=4))] == [-1] * 4


def test_a_flipped_bit_is_found_and_a_copy_taken_and_kept(crew: Crew, tmp_path: Path) -> None:
    succeeded(crew.run(save, tmp_path, [5], ranks=2))
    (own,) = shards(tmp_path, 1, of_rank=1)
    flip_a_bit(own)
    answers = crew.run(load, tmp_path, ranks=2)
    assert iterations_and_parts(answers) == parts(5, 2)
    assert "damaged" in " ".join(answers[1][3])
    assert str(own) in " ".join(answers[1][3])
    assert answers[0][3] == []
    lose(tmp_path, 0)  # now the repaired file is the only one of rank 1
    assert own.read_bytes()  # and it is right:
    (replica,) = shards(tmp_path, 1, of_rank=0)
    again = crew.run(load, tmp_path, ranks=2)
    assert iterations_and_parts(again) == parts(5, 2)
    assert again[1][3] == []
    assert replica.exists()


def test_where_every_copy_is_damaged_all_ranks_take_the_older_one(crew: Crew, tmp_path: Path) -> None:
    succeeded(crew.run(save, tmp_path, [5, 6], 2, False, 2, ranks=2))
    for host in (0, 1):
        (path,) = shards(tmp_path, host, 6, of_rank=1)
        flip_a_bit(path)
    answers = succeeded(crew.run(load, tmp_path, ranks=2))
    assert [(found, part, is_right) for found, part, is_right, _ in answers] == [
        (5, (5, 0, "session"), True),
        (5, (5, 1, "session"), True),
    ]
    assert all("looking for an older one" in " ".join(messages) for *_, messages in answers)


def test_a_cut_or_empty_file_does_not_count(crew: Crew, tmp_path: Path) -> None:
    succeeded(crew.run(save, tmp_path, [5, 6], 1, False, 2, ranks=2))
    (newest,) = shards(tmp_path, 1, 6)
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    answers = crew.run(load, tmp_path, ranks=2)
    assert iterations_and_parts(answers) == parts(5, 2)
    newest.write_bytes(b"")
    assert iterations_and_parts(crew.run(load, tmp_path, ranks=2)) == parts(5, 2)


def test_without_any_readable_checkpoint_all_ranks_get_one_clear_error(crew: Crew, tmp_path: Path) -> None:
    succeeded(crew.run(save, tmp_path, [5], 1, ranks=2))
    flip_a_bit(shards(tmp_path, 0)[0])
    found = succeeded(crew.run(load, tmp_path, ranks=2))
    assert [(latest, part) for latest, part, _, _ in found] == [(-1, None)] * 2
    assert all("rank 0: CorruptCheckpointError: no good copy" in " ".join(messages) for *_, messages in found)
    answers = crew.run(load_at_once, tmp_path, ranks=2)
    for answer in answers:
        assert isinstance(answer, Failed)
        assert answer.kind == "CheckpointError"
        assert "rank 0" in answer.text
        assert "no good copy of the shard of rank 0 of iteration 5" in answer.text


# Other ranks, other cliques, other worlds


def test_shards_are_found_wherever_they_lie_when_the_ranks_are_given_out_anew(crew: Crew, tmp_path: Path) -> None:
    succeeded(crew.run(save, tmp_path, [5], 1, ranks=4))
    assert iterations_and_parts(crew.run(load, tmp_path, [2, 0, 3, 1], ranks=4)) == parts(5, 4)


def test_ranks_that_share_a_host_find_what_other_ranks_of_it_left(crew: Crew, tmp_path: Path) -> None:
    """Before: ranks 0, 1 on host 0 and 2, 3 on host 1; now the hosts are swapped."""
    succeeded(crew.run(save_on_two_hosts, tmp_path, 0, ranks=4))
    assert succeeded(crew.run(load_on_two_hosts, tmp_path, 1, ranks=4)) == [True] * 4
    left = succeeded(crew.run(save_on_two_hosts, tmp_path, 1, ranks=4))
    assert left == [[1, 0], [1, 0], [1, 0], [1, 0]], "the folders of former ranks are cleaned up too"


def host_of_two(rank: int, shift: int) -> int:
    return (rank // 2 + shift) % 2


def save_on_two_hosts(root: Path, shift: int) -> list[int]:
    """Returns how many files the own folder has, and the one of the rank that was here before."""
    rank = dist.get_rank()
    manager = manager_at(root, host_of_two(rank, shift))
    manager.save(BasicTensorAwareStateDict(state_of(rank, 5)), 5)
    dist.barrier()
    manager.close()
    other = manager.local_ckpt_dir.parent / str((rank + 2) % 4)
    return [len(list(manager.local_ckpt_dir.iterdir())), len(list(other.iterdir())) if other.exists() else 0]


def load_on_two_hosts(root: Path, shift: int) -> bool:
    manager = manager_at(root, host_of_two(dist.get_rank(), shift))
    state, ckpt_id = manager.load()
    dist.barrier()
    manager.close()
    return is_state_of(state.to_tree(), dist.get_rank(), 5) and ckpt_id.rank == dist.get_rank()


@pytest.mark.parametrize("strategy", [None, cliques(2, 2), cliques(1, 4)])
def test_copies_are_used_with_other_cliques_than_at_the_save_or_none(
    crew: Crew, tmp_path: Path, strategy: LazyCliqueReplicationStrategy | None
) -> None:
    succeeded(crew.run(save, tmp_path, [5], ranks=4))
    for host in (1, 2):
        lose(tmp_path, host)
    assert iterations_and_parts(crew.run(load, tmp_path, None, strategy, ranks=4)) == parts(5, 4)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (4, 1)])
def test_another_number_of_ranks_is_told_so_and_can_read_all_parts(
    crew: Crew, tmp_path: Path, before: int, after: int
) -> None:
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


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (4, 1)])
def test_split_tensors_are_put_together_by_any_number_of_ranks(
    crew: Crew, tmp_path: Path, before: int, after: int
) -> None:
    succeeded(crew.run(save_split, tmp_path, ranks=before))
    assert succeeded(crew.run(load_split, tmp_path, ranks=after)) == [True] * after


def split_state(fill: bool) -> dict[str, Any]:
    whole = torch.arange(32, dtype=torch.float32).view(8, 4)
    rows = 8 // dist.get_world_size()
    begin = rows * dist.get_rank()
    part = whole[begin : begin + rows].clone() if fill else torch.zeros(rows, 4)
    bias = torch.full((3,), 7.0) if fill else torch.zeros(3)
    return {"split": ShardOf(part, (8, 4), (begin, 0)), "whole": bias, "step": 5 if fill else 0}


def save_split(root: Path) -> None:
    manager = manager_at(root, repl_strategy=cliques(factor=dist.get_world_size()))
    manager.save(BasicTensorAwareStateDict(split_state(fill=True)), 5)
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


def test_after_a_rollback_the_new_save_wins_over_a_stale_later_iteration(crew: Crew, tmp_path: Path) -> None:
    succeeded(crew.run(save, tmp_path, [4, 10], 2, False, 2, ranks=2))
    succeeded(crew.run(save, tmp_path, [5], 2, False, 3, ranks=2))  # a new process group, so a new manager
    assert {path.name[:14] for path in shards(tmp_path, 0)} == {"step-000000004", "step-000000005", "step-000000010"}
    assert iterations_and_parts(crew.run(load, tmp_path, ranks=2)) == parts(5, 2)


def test_a_save_that_one_rank_cannot_make_is_made_by_none(crew: Crew, tmp_path: Path) -> None:
    succeeded(crew.run(save, tmp_path, [3], ranks=2))
    unable, other = crew.run(save_unable, tmp_path, ranks=2)
    assert (unable.kind, other.kind) == ("CheckpointError", "TypeError")
    assert "failed on rank 1: TypeError" in unable.text
    assert iterations_and_parts(crew.run(load, tmp_path, ranks=2)) == parts(3, 2)


def save_unable(root: Path) -> None:
    state = {"what": object()} if dist.get_rank() == 1 else state_of(0, 4)
    manager_at(root, repl_strategy=cliques()).save(BasicTensorAwareStateDict(state), 4)


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
    return sorted(path.name[:14] for path in manager.local_ckpt_dir.iterdir()), text


def test_a_rank_that_is_killed_in_the_middle_of_a_save_is_missed_and_the_older_checkpoint_loads(
    crew: Crew, tmp_path: Path
) -> None:
    reason = survivor_of(tmp_path, save_beside_a_victim, save_and_die)
    assert "save(iteration=4, is_async=False), writing" in reason
    assert "a rank was lost" in reason
    assert iterations_and_parts(crew.run(load, tmp_path, ranks=2)) == parts(3, 2)


def save_beside_a_victim(root: Path) -> str:
    manager = manager_at(root, repl_strategy=cliques())
    manager.save(BasicTensorAwareStateDict(state_of(0, 3)), 3)
    try:
        manager.save(BasicTensorAwareStateDict(state_of(0, 4)), 4)
    except CheckpointError as error:
        return str(error) if isinstance(error, OutOfStepError) else f"not the right error: {error!r}"
    finally:
        manager.close()
    return "the victim was not missed"


def save_and_die(root: Path) -> None:
    manager = manager_at(root, repl_strategy=cliques(), disk=Deadly("sync", 2))
    for iteration in (3, 4):
        manager.save(BasicTensorAwareStateDict(state_of(1, iteration)), iteration)


# Out of step


@pytest.mark.parametrize("what", ["another method", "another iteration"])
def test_a_rank_that_calls_something_else_is_named_on_all_ranks(crew: Crew, tmp_path: Path, what: str) -> None:
    answers = crew.run(call_out_of_step, tmp_path, what, ranks=4)
    wrong = {"another method": "rank 2 calls find_latest", "another iteration": "rank 2 calls save(iteration=9"}[what]
    for answer in answers:
        assert isinstance(answer, Failed)
        assert answer.kind == "OutOfStepError"
        assert wrong in answer.text
        assert "ranks 0, 1, 3 call save(iteration=8" in answer.text


def call_out_of_step(root: Path, what: str) -> None:
    manager = manager_at(root)
    rank = dist.get_rank()
    manager.save(BasicTensorAwareStateDict(state_of(rank, 7)), 7)
    if rank == 2 and what == "another method":
        manager.find_latest()
    manager.save(BasicTensorAwareStateDict(state_of(rank, 8)), 9 if rank == 2 else 8)


@pytest.mark.parametrize("at", ["the first call", "a later call"])
def test_a_rank_that_does_not_come_is_named_in_time(crew: Crew, tmp_path: Path, at: str) -> None:
    answers = crew.run(stay_away, tmp_path, at, ranks=2)
    assert isinstance(answers[0], Failed)
    assert answers[0].kind == "OutOfStepError"
    assert "rank 1 did not come to find_latest()" in answers[0].text
    assert answers[1] == "stayed away"


def stay_away(root: Path, at: str) -> str:
    manager = manager_at(root, timeout_s=1.5)
    if at == "a later call":
        manager.save(BasicTensorAwareStateDict(state_of(dist.get_rank(), 7)), 7)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["rank 0 has given up"])
        return "stayed away"
    start_s = time.monotonic()
    try:
        manager.find_latest()
    finally:
        assert time.monotonic() - start_s < 15
        store.set("rank 0 has given up", "1")
    return "nobody was missed"


# The live state


def test_training_goes_on_after_replicated_saves_as_without_them(crew: Crew, tmp_path: Path) -> None:
    """With NVRx the moments of the live Adam are placeholders after it."""
    assert succeeded(crew.run(train, tmp_path, ranks=2)) == [True, True]


def train(root: Path) -> bool:
    manager = manager_at(root, repl_strategy=cliques())
    models, optimizers = [], []
    for _ in range(2):
        torch.manual_seed(dist.get_rank())
        models.append(torch.nn.Linear(4, 4))
        optimizers.append(torch.optim.Adam(models[-1].parameters()))
    with AsyncCallsQueue(worker="thread", timeout_s=20) as queue:
        for step in range(4):
            for saved, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).square().sum().backward()
                optimizer.step()
                if saved:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    request = manager.save(BasicTensorAwareStateDict(state), step, is_async=bool(step % 2))
                    if request is not None:
                        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
    plain, saved_one = (list(model.parameters()) for model in models)
    same = all(torch.equal(a, b) for a, b in zip(plain, saved_one, strict=True))
    state_dict = manager.load()[0].to_tree()
    loaded = all(torch.equal(state_dict["model"][name], value) for name, value in models[1].state_dict().items())
    dist.barrier()
    manager.close()
    return same and loaded
