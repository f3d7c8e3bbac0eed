"""A memory tier without room, or without its folder, costs no checkpoint in other tiers. Real tmpfs: root may mount."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchelastic
from tests.process import tiered_work as work
from tests.process.local_ranks import Crew, succeeded
from tests.process.small_tmpfs import small_tmpfs
from torchelastic.checkpoint import BCPState, DiskTier, DurableTier, KeepLast, MemoryTier, TieredCheckpointManager
from torchelastic.checkpoint.engine import stages
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.format import pool
from torchelastic.checkpoint.format.slot import Slot
from torchelastic.checkpoint.store import Tier, fence
from torchelastic.checkpoint.store.host_memory import spare_memory
from torchelastic.group.peers import Alone

CREW_SIZE = 3
PEERS = Alone()
MIB = 2**20
#: More than the tmpfs has.
STATE_MIB, TMPFS_MIB = 4, 2

Tiers = Callable[[], tuple[MemoryTier, DiskTier, DurableTier]]


@pytest.fixture
def shm(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs that is too small for a state."""
    with small_tmpfs(tmp_path / "shm", TMPFS_MIB * MIB) as folder:
        yield folder


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run is refused at once."""
    monkeypatch.setattr(fence, "ENTER_TIMEOUT_S", 0.1)


@pytest.fixture
def tiers(tmp_path: Path) -> Tiers:
    return lambda: (
        MemoryTier(tmp_path / "shm" / "job"),
        DiskTier(tmp_path / "disk", KeepLast(20)),
        DurableTier(f"file://{tmp_path}/durable", KeepLast(20)),
    )


def make_state(mib: float = STATE_MIB) -> torchelastic.ModelState:
    module = torch.nn.Linear(int(mib * MIB) // 4096, 1024, bias=False)
    return torchelastic.ModelState(module, torch.optim.SGD(module.parameters(), lr=0.1), extra={"losses": []})


def save(manager: TieredCheckpointManager, state: torchelastic.ModelState, step: int) -> None:
    manager.save_step(state, step, PEERS)
    assert manager.wait(30)


def fill(folder: Path) -> Path:
    """All that is left on a file system is another program's."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return filler


@pytest.mark.parametrize("memory_at", [0, 2])
def test_the_other_tiers_have_each_checkpoint_and_the_log_says_what_the_memory_tier_needed(
    shm: Path, tiers: Tiers, memory_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    memory, disk, durable = tiers()
    given: list[Tier] = [disk, durable]
    given.insert(memory_at, memory)
    manager, state = TieredCheckpointManager(given, run_id="test"), make_state()
    for step in (1, 2, 3):
        save(manager, state, step)
    assert [work.steps_in(tier) for tier in (memory, disk, durable)] == [[], [3, 2, 1], [3, 2, 1]]
    assert len(manager.failures) == 3
    (line,) = [text for text in caplog.messages if "in the memory tier failed" in text]
    for words in ("step-000000001", "4.0", "MiB on the tmpfs", "--shm-size", "remount,size", "sizeLimit", str(shm)):
        assert words in line
    assert list(shm.rglob("*.shard")) == []
    manager.close()


def test_what_grows_out_of_the_memory_tier_goes_on_in_the_others(shm: Path, tiers: Tiers) -> None:
    memory, disk, durable = tiers()
    manager = TieredCheckpointManager([memory, disk, durable], run_id="test")
    save(manager, make_state(mib=1), 1)
    save(manager, make_state(mib=3), 2)
    assert [work.steps_in(tier) for tier in (memory, disk, durable)] == [[1], [2, 1], [2, 1]]
    (failure,) = manager.failures
    assert "step-000000002" in failure
    restored = make_state(mib=3)
    assert manager.restore(restored, PEERS) == 2
    manager.close()


def test_a_header_that_grows_where_memory_is_full_goes_on_beside_it(shm: Path, tiers: Tiers) -> None:
    memory, disk, durable = tiers()
    manager, state = TieredCheckpointManager([memory, disk, durable], run_id="test"), make_state(mib=0.125)
    save(manager, state, 1)
    fill(shm)
    state.extra["losses"] = [0.5] * 100_000
    for step in (2, 3):
        save(manager, state, step)
    assert [work.steps_in(tier) for tier in (memory, disk, durable)] == [[1], [3, 2, 1], [3, 2, 1]]
    fresh = make_state(mib=0.125)
    assert manager.restore(fresh, PEERS) == 3
    assert len(fresh.extra["losses"]) == 100_000
    manager.close()


@pytest.mark.parametrize("is_full_at_start", [False, True])
def test_the_memory_tier_takes_part_again_when_it_has_room(
    tmp_path: Path, tiers: Tiers, is_full_at_start: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with small_tmpfs(tmp_path / "shm", 12 * MIB) as folder:
        memory, disk, durable = tiers()
        fillers = [fill(folder)] if is_full_at_start else []
        manager = TieredCheckpointManager([memory, disk, durable], run_id="test")
        if not is_full_at_start:
            save(manager, make_state(mib=1), 1)
            fillers = [fill(folder)]
        state = make_state()
        for step in (2, 3):
            save(manager, state, step)
        assert 3 not in work.steps_in(memory)
        fillers[0].unlink()
        for step in (4, 5, 6):
            save(manager, state, step)
        assert work.steps_in(memory) == [6]
        assert work.steps_in(disk)[:5] == [6, 5, 4, 3, 2]
        assert "in the memory tier failed" in caplog.text
        again = TieredCheckpointManager([MemoryTier(folder / "job")], run_id="another")
        with pytest.raises(CheckpointError, match="belongs to run 'test'"):
            again.enter_group(PEERS)
        manager.close()


def test_a_folder_that_was_removed_is_made_again_and_is_this_runs(
    tmp_path: Path, tiers: Tiers, caplog: pytest.LogCaptureFixture
) -> None:
    memory, disk, durable = tiers()
    manager, state = TieredCheckpointManager([memory, disk, durable], run_id="test"), make_state(mib=1)
    save(manager, state, 1)
    shutil.rmtree(memory.root)
    save(manager, state, 2)
    assert [work.steps_in(tier) for tier in (memory, disk, durable)] == [[2], [2, 1], [2, 1]]
    assert "removed from outside: it is made again" in caplog.text
    another = TieredCheckpointManager([MemoryTier(memory.root)], run_id="another")
    with pytest.raises(CheckpointError, match="belongs to run 'test'"):
        another.enter_group(PEERS)
    assert not manager.failures
    manager.close()


def test_what_lies_beside_the_memory_tier_is_used_again_and_again(
    shm: Path, tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path | None] = []

    def counted(capacity_bytes: int, path: Path | None, **options: Any) -> Slot:
        made.append(path)
        return Slot(capacity_bytes, path, **options)

    monkeypatch.setattr(pool, "Slot", counted)
    manager, state = TieredCheckpointManager(tiers(), run_id="test"), make_state()
    for step in range(1, 7):
        save(manager, state, step)
    assert made.count(None) <= 3
    assert len(made) - made.count(None) == 1, "what cannot succeed is not tried again"
    manager.close()


def test_where_there_is_no_memory_either_the_error_says_both(
    shm: Path, tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spare_memory.SpareMemory.__init__, "__defaults__", (lambda: 200 * MIB,))
    manager = TieredCheckpointManager(tiers(), run_id="test")
    with pytest.raises(CheckpointError, match=r"(?s)on the tmpfs.*beside the tmpfs there is no memory.*memory limit"):
        manager.save_step(make_state(), 1, PEERS)
    assert manager.wait(30)
    manager.close()


def test_a_slot_that_would_exceed_the_limit_of_the_container_is_not_made(
    tmp_path: Path, tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages.Stages.__init__, "__defaults__", (lambda: 3 * MIB,))
    memory, disk, durable = tiers()
    manager = TieredCheckpointManager([memory, disk, durable], run_id="test")
    save(manager, make_state(), 1)
    state = make_state(mib=1)
    for step in (2, 3):
        save(manager, state, step)
    assert [work.steps_in(tier) for tier in (memory, disk, durable)] == [[3], [3, 2, 1], [3, 2, 1]]
    failure = manager.failures[0]
    assert "there is no memory for a shard: it has to allocate 4.0" in failure
    assert "raise the memory limit of the container" in failure
    manager.close()


def test_with_a_memory_tier_alone_each_save_says_what_it_needs(shm: Path, tiers: Tiers) -> None:
    manager, state = TieredCheckpointManager(tiers()[:1], run_id="test"), make_state()
    for step in (1, 2):
        with pytest.raises(CheckpointError, match=r"has to allocate 4.*MiB on the tmpfs.*--shm-size"):
            manager.save_step(state, step, PEERS)
    save(manager, make_state(mib=0.25), 3)
    assert work.steps_of(manager) == [3]
    manager.close()


def test_bcp_state_raises_nothing_as_long_as_another_tier_has_the_checkpoint(shm: Path, tiers: Tiers) -> None:
    module = torch.nn.Linear(STATE_MIB * 256, 1024, bias=False)
    state = BCPState(module, None, tiers=tiers())
    state.save()
    state.save(sync=False)
    state.wait()
    state.close()
    with torch.no_grad():
        (saved := module.weight.detach().clone(), module.weight.zero_())
    again = BCPState(module, None, tiers=tiers())
    assert again.maybe_resume_from_ckpt() == {}
    assert torch.equal(module.weight, saved)
    again.close()
    alone = BCPState(module, None, tiers=tiers()[:1])
    with pytest.raises(CheckpointError, match="--shm-size"):
        alone.save()
    alone.close()


@pytest.mark.parametrize("full_rank", [0, 1])
def test_one_rank_without_room_costs_the_others_their_memory_tier_alone(
    crew: Crew, tmp_path: Path, full_rank: int
) -> None:
    with small_tmpfs(tmp_path / f"host-{full_rank}", MIB // 32):
        answers = succeeded(crew.run(work.save_where_one_rank_has_no_memory, str(tmp_path), ranks=3))
    for rank, answer in enumerate(answers):
        assert answer["waits"] == [False] * 3
        assert answer["steps"] == {"hosts": [], "disk": [3, 2, 1]}
        assert answer["restored"] == 3
        assert len(answer["failures"]) == 3
        assert all("no room for a shard in memory" in failure for failure in answer["failures"]), rank
        assert (f"rank {full_rank} could not store its shard" in answer["failures"][0]) == (rank != full_rank)
