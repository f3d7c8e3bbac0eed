"""Where files cannot be locked: one writer at a time, runs that live and runs that have ended, by files that say so."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.process.fork_server import living
from tests.process.forked_ranks import run_ranks, values
from tests.process.tier_saves import RUN, context_of, name_at, sealed
from torchelastic.checkpoint.errors import CheckpointError, FencedError
from torchelastic.checkpoint.format.disk import Disk
from torchelastic.checkpoint.store import DiskTier, Manifest
from torchelastic.checkpoint.store.fence import FENCE_LOCK_NAME, OWNER_LOCK_NAME, Fence, OwnedError
from torchelastic.checkpoint.store.lease import held_alone
from torchelastic.processes.identity import this_place
from torchelastic.testing.file_system_faults import file_system_without, no_folder_rename, no_locks


def claims(root: Path, count: int) -> list[int]:
    with file_system_without(root, no_locks()) as refused:
        epochs = [Fence(root, Disk()).claim(RUN, "rank") for _ in range(count)]
        refused.require_struck()
    return epochs


@pytest.mark.long
def test_claims_of_processes_and_threads_at_the_same_time_take_different_epochs(tmp_path: Path) -> None:
    processes = values(run_ranks(claims, tmp_path, 5, ranks=3))
    epochs = [epoch for one in processes for epoch in one]
    assert sorted(epochs) == list(range(1, 16))
    fences = [Fence(tmp_path, Disk()) for _ in range(8)]
    with file_system_without(tmp_path, no_locks()), ThreadPoolExecutor(len(fences)) as pool:
        assert sorted(pool.map(lambda fence: fence.claim(RUN, "rank"), fences)) == list(range(16, 24))


def holds(root: Path) -> object:
    without = file_system_without(root, no_locks())
    without.__enter__()
    fence = Fence(root, Disk())
    fence.claim("theirs", "node-7")
    return without, fence


@pytest.mark.long
def test_another_run_that_is_alive_is_named_and_one_that_was_killed_is_not_in_the_way(tmp_path: Path) -> None:
    with living(holds, tmp_path) as other, file_system_without(tmp_path, no_locks()):
        fence = Fence(tmp_path, Disk())
        with pytest.raises(OwnedError, match=rf"used by process {other.pid} on .*\(remove .*\.lease if it has ended"):
            fence.claim("ours", "me")
        assert len(list(tmp_path.glob("*.lease"))) == 1, "who was refused leaves none"
        other.kill()
        other.wait(60)
        assert fence.claim("ours", "me") == 2
        assert len(list(tmp_path.glob("*.lease"))) == 1, "that of the dead is gone"
        fence.release()
        assert not list(tmp_path.glob("*.lease"))


def test_a_run_that_starts_again_and_again_elsewhere_leaves_as_many_leases_as_processes(tmp_path: Path) -> None:
    for number in range(3):  # each on a host of which nobody can tell here whether it lives
        lease = tmp_path / f"{OWNER_LOCK_NAME}.{number}-00000000.lease"
        lease.write_text(json.dumps({"host": "mars", "place": {"boot": "of mars"}, "pid": 1, "started_ticks": 5}))
    with file_system_without(tmp_path, no_locks()):
        Fence(tmp_path, Disk()).claim(RUN, "me")
        with pytest.raises(OwnedError, match="process 1 on mars"):
            Fence(tmp_path, Disk()).claim("another", "me")
        fence = Fence(tmp_path, Disk())
        fence.claim(RUN, "me again")
        assert len(list(tmp_path.glob("*.lease"))) == 1
        fence.release()


def stand_still_with_the_lock(root: Path) -> object:

    def wait(holder: str) -> None:
        raise AssertionError(holder)

    held = held_alone(root / FENCE_LOCK_NAME, wait, Disk())
    held.__enter__()
    return held


@pytest.mark.long
def test_who_is_killed_with_the_lock_is_not_waited_for_and_who_lives_is_named(tmp_path: Path) -> None:
    waits: list[float] = []
    with living(stand_still_with_the_lock, tmp_path) as other, file_system_without(tmp_path, no_locks()):
        fence = Fence(tmp_path, Disk(), lock_timeout_s=1.0, sleep=waits.append, monotonic=lambda: sum(waits))
        with pytest.raises(CheckpointError, match=rf"process {other.pid} on .* holds it"):
            fence.claim(RUN, "me")
        assert sum(waits) >= 1.0
        other.kill()
        other.wait(60)
        waits.clear()
        assert fence.claim(RUN, "me") == 1
        assert not waits
    assert not [path for path in tmp_path.iterdir() if "ended" in path.name]


@pytest.mark.parametrize("said", ["another host", "another boot"])
def test_of_a_process_elsewhere_nobody_says_that_it_has_ended(tmp_path: Path, said: str) -> None:
    place = {**this_place(), "boot": "of another host"} if said == "another host" else {"boot": "0", "namespace": ""}
    process = {"host": "mars", "place": place, "pid": 1, "started_ticks": 5, "nonce": ""}
    lease = tmp_path / f"{FENCE_LOCK_NAME}.lease"
    lease.write_text(json.dumps(process))
    waits: list[float] = []
    with file_system_without(tmp_path, no_locks()):
        fence = Fence(tmp_path, Disk(), lock_timeout_s=1.0, sleep=waits.append, monotonic=lambda: sum(waits))
        with pytest.raises(CheckpointError, match=r"process 1 on mars \(remove .*\.fence\.lock\.lease if it has ended"):
            fence.claim(RUN, "me")
        lease.unlink()
        assert fence.claim(RUN, "me") == 1


def test_who_was_killed_before_it_said_who_it_is_is_not_waited_for_long(tmp_path: Path) -> None:
    lease = tmp_path / f"{FENCE_LOCK_NAME}.lease"
    lease.touch()
    waits: list[float] = []
    with file_system_without(tmp_path, no_locks()):
        fence = Fence(tmp_path, Disk(), lock_timeout_s=1.0, sleep=waits.append, monotonic=lambda: sum(waits))
        with pytest.raises(CheckpointError, match="was killed while it wrote it"):
            fence.claim(RUN, "me")
        long_ago_s = time.time() - 10
        os.utime(lease, (long_ago_s, long_ago_s))
        assert fence.claim(RUN, "me") == 1


def test_a_fork_that_goes_on_alone_shows_that_the_run_lives(tmp_path: Path) -> None:
    with file_system_without(tmp_path, no_locks()):
        parent = Fence(tmp_path, Disk())
        epoch = parent.claim(RUN, "parent")
        pid = os.fork()
        if not pid:
            parent.join(epoch, RUN)
            parent.release()
            os._exit(len(list(tmp_path.glob(f"{OWNER_LOCK_NAME}.*.lease"))))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1, "the fork has removed its own alone"
        assert len(list(tmp_path.glob(f"{OWNER_LOCK_NAME}.{os.getpid()}-*.lease"))) == 1
        parent.release()


# Folders that cannot be renamed ---------------------------------------------------------------------------------------


class StandsStill(Disk):
    """A successor takes over before the n-th file of a checkpoint gets its name."""

    def __init__(self, root: Path, at: int) -> None:
        super().__init__()
        self._root, self._left = root, at

    def rename(self, source: Path, target: Path) -> None:
        if target.parent.name == name_at(1).folder_name:
            self._left -= 1
            if self._left == 0:
                Fence(self._root).advance(1, 2)
        super().rename(source, target)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_writer_that_was_replaced_between_its_files_publishes_nothing_and_leaves_nothing(
    tmp_path: Path, at: int
) -> None:
    with file_system_without(tmp_path, no_folder_rename()) as refused:
        tiers = [DiskTier(tmp_path), DiskTier(tmp_path, disk=StandsStill(tmp_path, at))]
        epoch = context_of(tiers[0], 0, 2).epoch
        for rank, tier in enumerate(tiers):
            tier.prepare(context_of(tier, rank, 2, epoch=epoch))
        records = tuple(tier.put(sealed(name_at(1), rank, 2)) for rank, tier in enumerate(tiers))
        with pytest.raises(FencedError):
            tiers[1].commit(Manifest(name_at(1), RUN, 2, records))
        refused.require_struck()
        assert tiers[0].inventory() == []
        Fence(tmp_path).advance(1, 3)
    assert [path.name for path in tmp_path.iterdir() if "step-" in path.name] == []
