"""Who may publish: claims, joins, and writers that wake up after they were replaced."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.process.fork_server import living
from tests.process.tier_saves import RUN, context_of, hidden_in, name_at, sealed, staging_folder
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError, FencedError
from torchelastic.checkpoint.format.disk import Disk
from torchelastic.checkpoint.store import DiskTier, Manifest
from torchelastic.checkpoint.store.fence import FENCE_LOCK_NAME, Fence, OwnedError
from torchelastic.checkpoint.store.owner import FENCE_NAME

ROOT = Path(__file__).parents[2]


def test_claims_at_the_same_time_take_different_epochs_and_all_can_join_the_last(tmp_path: Path) -> None:
    fences = [Fence(tmp_path / "root") for _ in range(8)]
    with ThreadPoolExecutor(len(fences)) as pool:
        epochs = [*pool.map(lambda fence: fence.claim(RUN, "rank"), fences)]
        assert sorted(epochs) == list(range(1, 9))
        [*pool.map(lambda fence: fence.join(8, RUN), fences)]
        [*pool.map(lambda fence: fence.advance(8, 1), fences)]
    assert fences[0].read().token == (8, 1)
    assert hidden_in(tmp_path) == []


def claimed_by_others(root: Path) -> Fence:
    fence = Fence(root)
    fence.claim("theirs", "node-7")
    return fence


def test_another_run_that_is_alive_is_named_and_one_that_has_ended_is_not_in_the_way(tmp_path: Path) -> None:
    with living(claimed_by_others, tmp_path) as other:
        fence = Fence(tmp_path)
        for attempt in (lambda: fence.claim("ours", "me"), lambda: fence.join(5, "ours")):
            with pytest.raises(
                OwnedError, match=rf"run 'theirs' \(node-7, process {other.pid} on .*a folder of its own"
            ):
                attempt()
        other.kill()
        other.wait(60)
    assert fence.claim("ours", "me") == 2


def test_a_job_of_the_same_run_replaces_one_that_is_alive(tmp_path: Path) -> None:
    old, new = Fence(tmp_path), Fence(tmp_path)
    assert old.claim(RUN, "old") == 1
    assert new.claim(RUN, "new") == 2
    with pytest.raises(FencedError, match=rf"replaced by run 'run' \(new, process {os.getpid()}.*epoch 2"):
        old.check(1, 0)
    with pytest.raises(FencedError):
        old.advance(1, 5)
    with pytest.raises(FencedError):
        old.join(1, RUN)
    assert new.read().token == (2, 0)


def test_a_folder_without_its_fence_goes_on_above_the_epochs_of_its_checkpoints(tmp_path: Path) -> None:
    staging_folder(tmp_path, name_at(1, epoch=8)).rename(tmp_path / name_at(1, epoch=8).folder_name)
    assert Fence(tmp_path).claim(RUN, "job") == 9
    (tmp_path / FENCE_NAME).write_bytes(b"{")
    with pytest.raises(CorruptCheckpointError, match="start the run anew"):
        Fence(tmp_path).check(9, 0)
    staging_folder(tmp_path, name_at(1, epoch=20))
    assert Fence(tmp_path).claim(RUN, "job") == 21


def test_a_lock_that_is_never_free_is_an_error_that_names_the_holder(tmp_path: Path) -> None:
    program = (
        "import fcntl, os, sys\n"
        "d = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT); fcntl.flock(d, fcntl.LOCK_EX)\n"
        "os.write(d, b'process 1 on mars'); print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path / FENCE_LOCK_NAME)]
    waits: list[float] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        fence = Fence(tmp_path, lock_timeout_s=1.0, sleep=waits.append, monotonic=lambda: sum(waits))
        with pytest.raises(CheckpointError, match=r"process 1 on mars holds it.*end that process"):
            fence.claim(RUN, "job")
        assert sum(waits) >= 1.0
        other.kill()


def test_hidden_folders_of_older_groups_go_and_those_of_this_one_stay(tmp_path: Path) -> None:
    fence = Fence(tmp_path)
    epoch = fence.claim(RUN, "job")
    staging_folder(tmp_path, name_at(1, epoch=epoch, round_number=1))
    mine = staging_folder(tmp_path, name_at(2, epoch=epoch, round_number=2))
    fence.advance(epoch, 2)
    assert hidden_in(tmp_path) == [mine.name]


def test_a_writer_is_told_also_if_its_successor_died_before_it_took_the_hidden_folders_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchelastic.checkpoint.store.fence.remove_left_overs", lambda *_: 0)

    class Overtaken(Disk):
        def sync_folder(self, path: Path) -> None:
            super().sync_folder(path)
            Fence(tmp_path).advance(1, 2)

    tier = DiskTier(tmp_path)
    tier.prepare(context_of(tier))
    shard = sealed(name_at(1))
    manifest = Manifest(shard.name, RUN, 1, (tier.put(shard),))
    with pytest.raises(FencedError):
        DiskTier(tmp_path, disk=Overtaken()).commit(manifest)
    assert tier.inventory() == []
