"""Who may publish: claims, joins, and writers that wake up after they were replaced."""

from __future__ import annotations

import os
import re
import signal
import socket
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
from torchelastic.checkpoint.store.fence import ENTER_TIMEOUT_S, FENCE_LOCK_NAME, Fence, OwnedError
from torchelastic.checkpoint.store.owner import FENCE_NAME
from torchelastic.processes.identity import Process

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
    naps: list[float] = []
    with living(claimed_by_others, tmp_path) as other:
        fence = Fence(tmp_path, sleep=lambda _: naps.append(1.0), monotonic=lambda: sum(naps))
        whose = rf"run 'theirs' \(node-7, process {other.pid} on .*"
        holds = rf"is alive: process {other.pid} \(.+\) holds it: .*`kill {other.pid}`.*a folder of its own"
        for attempt in (
            lambda: fence.claim("ours", "me"),
            lambda: fence.join(5, "ours"),
            lambda: fence.require_free("ours"),
        ):
            naps.clear()
            with pytest.raises(OwnedError, match=whose + holds):
                attempt()
            assert sum(naps) >= ENTER_TIMEOUT_S, "a run that ends may need a moment"
        fence.require_free("theirs")
        other.kill()
        other.wait(60)
    fence.require_free("ours")
    assert fence.read().run_id == "theirs", "it was taken for nobody"
    assert fence.claim("ours", "me") == 2


@pytest.mark.parametrize("call", ["claim", "enter", "join", "require_free"])
def test_a_run_that_ends_meanwhile_is_waited_for(tmp_path: Path, call: str) -> None:
    with living(claimed_by_others, tmp_path) as other:
        ends = iter([lambda: None, other.kill])

        def nap(_seconds: float) -> None:
            next(ends, other.wait)()

        fence = Fence(tmp_path, sleep=nap)
        if call == "claim":
            assert fence.claim("ours", "me") == 2
        elif call == "join":
            fence.join(2, "ours")
        elif call == "enter":
            assert fence.enter("ours") == "ours"
        else:
            fence.require_free("ours")
    assert not [*ends], "the other one was alive at first"


def test_who_holds_it_on_another_host_is_named_as_the_fence_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchelastic.checkpoint.store.owner.holders_of", lambda _path: [])
    naps: list[float] = []
    with living(claimed_by_others, tmp_path) as other:
        fence = Fence(tmp_path, sleep=lambda _: naps.append(1.0), monotonic=lambda: sum(naps))
        host = re.escape(socket.gethostname())
        with pytest.raises(OwnedError, match=rf"process {other.pid} on {host}\), .*, or stop it on {host}, or give"):
            fence.claim("ours", "me")


def test_what_a_dead_run_has_forked_does_not_hold_its_folder(tmp_path: Path) -> None:
    lines = (
        "import os, signal, sys, time; from pathlib import Path",
        "from torchelastic.checkpoint.store.fence import Fence",
        "fence = Fence(Path(sys.argv[1])); fence.claim('theirs', 'node-7')",
        "child = os.fork()",
        "if child == 0: time.sleep(600)",  # a sample that takes long, on a worker of a data loader
        "print(child, flush=True); os.kill(os.getpid(), signal.SIGKILL)",
    )
    command = [sys.executable, "-c", "\n".join(lines), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        orphan = Process.of(int(killed.stdout.readline()))
        killed.wait(60)
        try:
            assert killed.returncode == -9
            naps: list[float] = []
            assert Fence(tmp_path, sleep=naps.append).claim("ours", "me") == 2
            assert not orphan.has_ended
            assert not naps
        finally:
            orphan.signal(signal.SIGKILL)


def test_a_fork_that_uses_the_folder_holds_it_for_itself(tmp_path: Path) -> None:
    fence, (reading, writing) = Fence(tmp_path), os.pipe()
    (told, tell) = os.pipe()
    epoch = fence.claim("theirs", "me")
    child = os.fork()
    if child == 0:
        try:
            os.close(writing)
            fence.join(epoch, "theirs")
            os.write(tell, b"!")
            os.read(reading, 1)
        finally:
            os._exit(0)
    assert os.read(told, 1) == b"!"
    fence.release()
    naps: list[float] = []
    other = Fence(tmp_path, sleep=lambda _: naps.append(1.0), monotonic=lambda: sum(naps))
    with pytest.raises(OwnedError, match=rf"is alive: process {child} \("):
        other.claim("ours", "me")
    os.write(writing, b"!")
    os.waitpid(child, 0)
    assert other.claim("ours", "me") == 2
    for descriptor in (reading, writing, told, tell):
        os.close(descriptor)


def test_a_job_of_the_same_run_replaces_one_that_is_alive(tmp_path: Path) -> None:
    old, new = Fence(tmp_path), Fence(tmp_path)
    assert old.claim(RUN, "old") == 1
    assert new.claim(RUN, "new") == 2
    with pytest.raises(
        FencedError, match=rf"replaced by run .run. \(new, process {os.getpid()}.*epoch 2.*begun to save there twice"
    ):
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


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_lock_that_is_never_free_is_an_error_that_names_the_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_seen: bool
) -> None:
    if not is_seen:  # it is on another host
        monkeypatch.setattr("torchelastic.checkpoint.store.owner.holders_of", lambda _path: [])
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
        who = rf"process {other.pid} \(.+\)" if is_seen else "process 1 on mars"
        with pytest.raises(CheckpointError, match=rf"for 1 s: {who} holds it.*end that process"):
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
