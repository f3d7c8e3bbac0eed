"""What is left of checkpoints in memory when hosts are lost, or the number of ranks changes."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.process import memory_ranks as ranks
from tests.process.local_ranks import Crew, Failed, succeeded
from tests.waiting import wait_until
from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.checkpoint.format.disk import REAL_DISK
from torchelastic.checkpoint.store.manifest import MANIFEST_NAME
from torchelastic.testing.disk_faults import FaultyDisk, full_at

CREW_SIZE = 3


# --- what ranks do ----------------------------------------------------------------------------------------------------


def save_steps(root: str, hosts: str, steps: list[int], replicate: bool = True, spread_last: bool = True) -> None:
    """Saves some steps; the generation of each is its place."""
    rank = dist.get_rank()
    with ranks.member(root, hosts, rank) as each:
        for generation, step in enumerate(steps):
            spread = spread_last or step != steps[-1]
            ranks.save(each, step, generation, replicate=replicate, spread=spread)


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def read_a_step(root: str, hosts: str, step: int) -> list[Any]:
    """What rank 1 reads of a step that it knows, without choosing one; and why it cannot read another one."""
    rank = dist.get_rank()
    with ranks.member(root, hosts, rank) as each:
        if rank == 0:
            each.meet()
            return []
        values = ranks.read_back(each, step)
        with pytest.raises(CorruptCheckpointError) as caught:
            each.loader.read_metadata(each.container.folder_of(step + 1))
        each.meet()
        return [values, str(caught.value)]


def test_a_replaced_host_that_knows_the_step_gets_all_of_it_from_the_others(crew: Crew, root: Path) -> None:
    succeeded(crew.run(save_steps, str(root), "ab", [5], ranks=2))
    shutil.rmtree(ranks.base_of(root, "b"))
    _, (values, error) = succeeded(crew.run(read_a_step, str(root), "ab", 5, ranks=2))
    assert values == [True, True]
    assert "step-6_ckpt has no commit" in error
    assert ranks.files_of(root, "a", 5).keys() == ranks.files_of(root, "b", 5).keys()
    assert (ranks.folder_of(root, "b", 5) / "common.pt").read_bytes() == b"common"


def recover_without_room(root: str, hosts: str) -> list[Any]:
    rank = dist.get_rank()
    with ranks.member(root, hosts, rank, disk=FaultyDisk(full_at("allocate")) if rank == 1 else REAL_DISK) as each:
        latest = each.loader.get_latest_complete_checkpoint(each.container.root)
        again = each.loader.get_latest_complete_checkpoint(each.container.root)  # the fault strikes once
        each.meet()
        return [latest, None if again is None else again.name]


def test_without_room_for_what_is_missing_all_ranks_agree_that_there_is_no_checkpoint(crew: Crew, root: Path) -> None:
    succeeded(crew.run(save_steps, str(root), "ab", [5], ranks=2))
    shutil.rmtree(ranks.base_of(root, "b"))
    assert succeeded(crew.run(recover_without_room, str(root), "ab", ranks=2)) == [[None, "step-5_ckpt"]] * 2


# --- commits ----------------------------------------------------------------------------------------------------------


def save_after_stepping_down(root: str, hosts: str) -> list[str]:
    rank = dist.get_rank()
    with ranks.member(root, hosts, rank) as each:
        latest = each.loader.get_latest_complete_checkpoint(each.container.root)
        assert latest is not None
        each.container.tidy()
        kept = files_in(each.container.root)
        each.meet()
        ranks.save(each, 7, 5)

        def is_gone() -> bool:
            each.container.tidy()
            old = ("step-000000005.", "step-5_", "step-000000009.", "step-9_")
            return not any(name.startswith(old) for name in files_in(each.container.root))

        wait_until(is_gone, 20, "steps 5 and 9 are gone, which a thread may still read")
        each.meet()
        return [latest.name, *kept, "then", *files_in(each.container.root)]


def test_a_newer_checkpoint_that_is_of_no_use_does_not_replace_the_older_one_that_is_used(
    crew: Crew, root: Path
) -> None:
    succeeded(crew.run(save_steps, str(root), "ab", [5, 9], True, False, ranks=2))
    for host in "ab":
        ranks.damage(ranks.base_of(root, host) / str(ranks.shard(0, 2, 9, 1)))
    for first, *rest in succeeded(crew.run(save_after_stepping_down, str(root), "ab", ranks=2)):
        assert first == "step-5_ckpt"
        before, after = rest[: rest.index("then")], rest[rest.index("then") + 1 :]
        assert "step-5_ckpt" in before
        assert [name for name in after if name.startswith("step-")] == [str(ranks.save_of(7, 5)), "step-7_ckpt"]


# --- ranks that do not take part --------------------------------------------------------------------------------------


def recover_without(root: str, hosts: str) -> float:
    rank = dist.get_rank()
    with ranks.member(root, hosts, rank, timeout_s=1.0) as each:
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            store.wait(["enough"])
            return 0.0
        began_s = time.monotonic()
        try:
            each.loader.get_latest_complete_checkpoint(each.container.root)
        finally:
            store.set("enough", "1")
            assert time.monotonic() - began_s < 15
        return 1.0


def test_a_rank_that_never_calls_is_named_and_nobody_hangs(crew: Crew, root: Path) -> None:
    answers = crew.run(recover_without, str(root), "ab", ranks=2)
    assert isinstance(answers[0], Failed)
    assert answers[0].kind == "OutOfStepError"
    assert "rank 1 did not come to get_latest_complete_checkpoint(.../job7), looking within 1 s" in answers[0].text


# --- what lies where --------------------------------------------------------------------------------------------------


def look_around(root: str, hosts: str) -> list[Any]:
    rank = dist.get_rank()
    with ranks.member(root, hosts, rank) as each:
        found = each.loader.get_candidate_checkpoints(each.container.root)
        by_rank = each.loader.get_checkpoint_objects_by_rank(found[0])
        paths = {
            rank: [str(Path(one).relative_to(each.container.root)) for one in ids] for rank, ids in by_rank.items()
        }
        retrieved = [each.loader.retrieve_checkpoint(each.container.folder_of(step)) for step in (9, 7)]
        return [[one.name for one in found], paths, retrieved]


def test_candidates_and_their_objects_are_told_by_rank_and_any_one_may_be_retrieved(crew: Crew, root: Path) -> None:
    succeeded(crew.run(save_steps, str(root), "ab", [5, 9], True, False, ranks=2))
    first, second, commit = (str(ranks.shard(rank, 2, 9, 1)) for rank in range(3))
    for names, by_rank, retrieved in succeeded(crew.run(look_around, str(root), "ab", ranks=2)):
        assert names == ["step-9_ckpt", "step-5_ckpt"]
        assert by_rank == {0: [first, second, commit], 1: [first, second]}
        assert retrieved == [True, False]
    assert MANIFEST_NAME in ranks.files_of(root, "b", 9)
