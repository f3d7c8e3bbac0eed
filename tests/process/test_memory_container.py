"""The folder of a job in memory: what is complete, what replaces what, and who removes whose memory."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError, FencedError
from torchelastic.checkpoint.memory.commit import Commit
from torchelastic.checkpoint.memory.container import Container, read_commit
from torchelastic.checkpoint.memory.ids import COMMIT_FILE
from torchelastic.checkpoint.shards.header import lay_out
from torchelastic.checkpoint.shards.tree import flatten
from torchelastic.checkpoint.store.save_id import SaveId, ShardId, file_name_of
from torchelastic.checkpoint.store.tier import TierEntry
from torchelastic.testing.disk_faults import FaultyDisk, full_at

WRITER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_memory_container import save
from torchelastic.checkpoint.memory.container import Container
container = Container(sys.argv[1])
save(container, 1, rank=1, generation=1, value=1.0)
print("saved", flush=True)
time.sleep(60)
"""

TAKER = """
import os, sys
sys.path.insert(0, sys.argv[2])
from test_memory_container import *
Container(sys.argv[1]).pool.take(lay_out(flatten({"weight": torch.ones(9)}), {}))
os.kill(os.getpid(), signal.SIGKILL)
"""


def save(
    container: Container, step: int, rank: int = 0, generation: int | None = None, value: float = 0.0, epoch: int = 1
) -> ShardId:
    """One rank's share of a save by two ranks."""
    name = ShardId(SaveId(epoch, 0, step if generation is None else generation, step, "00000007"), rank, 2)
    header = lay_out(flatten({"weight": torch.full((1000,), value)}), {"step": step})
    stage = container.pool.take(header)
    checksums = stage.copy_and_hash([torch.full((1000,), value)])
    container.publish(stage, header.with_checksums(checksums), step, file_name_of(name))
    return name


def commit(container: Container, name: ShardId) -> Commit:
    made = Commit(name.name, 2, Metadata({}, storage_data={}), {"common.pt": b"all of it"})
    container.write_commit(made)
    return made


def committed(container: Container) -> list[int]:
    return [one.name.step for one in container.entries() if one.is_committed]


@pytest.fixture
def base(memory_folder: Path) -> Path:
    return memory_folder / "job-7"


def files(base: Path) -> list[str]:
    """All files but free slots and what names the job."""
    found = [path for path in base.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return sorted(str(path.relative_to(base)) for path in found)


def slots(base: Path) -> list[Path]:
    """What is free, or being written."""
    return [path for path in base.iterdir() if path.name.startswith(".tmp-")]


def test_a_step_is_complete_with_its_commit_and_not_before(base: Path) -> None:
    container = Container(base)
    name = save(container, 5)
    assert container.entries() == [TierEntry(name.name, 2, (0,), is_committed=False)]
    made = commit(container, name)
    assert container.entries() == [TierEntry(name.name, 2, (0,))]
    assert read_commit(container.folder_of(5)) == made
    assert (container.folder_of(5) / "common.pt").read_bytes() == b"all of it"


def test_a_commit_replaces_the_older_step_and_its_memory_is_used_again(base: Path) -> None:
    container = Container(base)
    seen = set()
    for step in range(6):
        commit(container, save(container, step))
        seen |= {path.stat().st_ino for path in base.rglob("*.shard-*")}
        assert container.tidy() == ([step - 1] if step else [])
        assert [one.name.step for one in container.entries()] == [step]
    assert len(seen) == 2


def test_a_newer_step_that_is_being_written_stays(base: Path) -> None:
    container = Container(base)
    commit(container, save(container, 1))
    name = save(container, 2)
    assert container.tidy() == []
    assert (container.folder_of(2) / file_name_of(name)).exists()


def test_an_older_step_that_was_never_completed_goes(base: Path) -> None:
    container = Container(base)
    save(container, 9, generation=1)
    save(container, 1, generation=1)
    commit(container, save(container, 2))
    assert container.tidy() == [9, 1]


def test_a_commit_of_an_older_save_that_comes_late_replaces_nothing(base: Path) -> None:
    container = Container(base)
    late = save(container, 1, generation=1)
    again = commit(container, save(container, 1, generation=2))
    commit(container, late)
    assert read_commit(container.folder_of(1)) == again


def test_a_commit_of_an_older_epoch_that_comes_late_replaces_nothing(base: Path) -> None:
    """Its process was stopped, and the step was saved anew meanwhile, with another extra file."""
    container = Container(base)
    late = save(container, 1, generation=1)
    container.join("others", 2)
    again = commit(container, save(container, 1, generation=2, epoch=2))
    with pytest.raises(FencedError, match="was replaced"):
        commit(container, late)
    assert read_commit(container.folder_of(1)) == again


class JoinedBesideDisk(FaultyDisk):
    """Others take over when a commit has been written, and has not got its name."""

    others: Container | None = None

    def rename(self, source: Path, target: Path) -> None:
        if self.others is not None and target.name == COMMIT_FILE:
            self.others.join("others", 2)
        super().rename(source, target)


def test_a_commit_is_not_published_by_who_is_replaced_in_the_moment_before_its_rename(base: Path) -> None:
    disk = JoinedBesideDisk()
    container = Container(base, disk=disk)
    name, disk.others = save(container, 1), Container(base)
    with pytest.raises(FencedError, match="was replaced"):
        commit(container, name)
    assert committed(container) == []
    assert not [path for path in slots(base) if path.is_dir()]


@pytest.mark.parametrize("cut", [0, -1])
def test_a_damaged_commit_is_none(base: Path, cut: int) -> None:
    container = Container(base)
    commit(container, save(container, 1))
    path = container.folder_of(1) / COMMIT_FILE
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CorruptCheckpointError):
        read_commit(container.folder_of(1))
    assert committed(container) == []


def test_a_commit_in_the_folder_of_another_step_is_damage(base: Path) -> None:
    container = Container(base)
    commit(container, save(container, 1))
    container.folder_of(1).rename(container.folder_of(9))
    with pytest.raises(CorruptCheckpointError, match="is the commit of step 1"):
        read_commit(container.folder_of(9))


def test_another_living_process_keeps_its_shards_and_a_dead_one_loses_them(base: Path) -> None:
    arguments = [sys.executable, "-c", WRITER, str(base), str(Path(__file__).parent)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "saved\n"
        container = Container(base)
        theirs = ShardId(SaveId(1, 0, 1, 1, "00000007"), 1, 2)
        save(container, 1)
        commit(container, theirs)
        commit(container, save(container, 2))
        assert container.tidy() == []
        assert committed(container) == [2]
        assert [path.name for path in container.folder_of(1).glob("*.shard-*")] == [file_name_of(theirs)]
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        assert container.tidy() == [1]


def test_slots_of_a_dead_process_are_removed_when_the_folder_is_opened(base: Path) -> None:
    arguments = [sys.executable, "-c", TAKER, str(base), str(Path(__file__).parent)]
    ended = subprocess.run(arguments, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert slots(base)
    Container(base)
    assert not slots(base)


@pytest.mark.parametrize("call", ["create", "write_some", "rename"])
def test_a_full_memory_leaves_the_older_commit(base: Path, call: str) -> None:
    container = Container(base)
    commit(container, save(container, 1))
    name = save(container, 2)
    container.disk = disk = FaultyDisk(full_at(call))
    with pytest.raises(CheckpointError, match="full"):
        commit(container, name)
    disk.require_struck()
    assert committed(container) == [1]
    assert not [path for path in files(base) if path.endswith(".new")]


def test_a_shard_that_cannot_be_published_gives_its_slot_back(base: Path) -> None:
    container = Container(base)
    save(container, 1)
    with pytest.raises(CheckpointError, match="exists"):
        save(container, 1)
    (free,) = slots(base)
    inode = free.stat().st_ino
    name = save(container, 2)
    assert (container.folder_of(2) / file_name_of(name)).stat().st_ino == inode
    assert not slots(base)


class RemovedBesideDisk(FaultyDisk):
    """Another rank removes the folder of the step just before something is published there; three times."""

    times = 3

    def publish(self, source: Path, target: Path) -> None:
        if self.times and target.suffix == ".shard":
            self.times -= 1
            target.parent.rmdir()
        super().publish(source, target)


def test_a_folder_that_another_rank_has_just_tidied_away_is_made_again(base: Path) -> None:
    disk = RemovedBesideDisk()
    container = Container(base, disk=disk)
    name = save(container, 1)
    assert disk.times == 0
    assert (container.folder_of(1) / file_name_of(name)).exists()


def test_an_attempt_of_the_same_generation_that_failed_goes(base: Path) -> None:
    """A job that died in the middle of a save counts from the same checkpoint again."""
    container = Container(base)
    left = file_name_of(ShardId(SaveId(1, 0, 1, 4, "00000099"), 1, 2))
    name = save(container, 4, generation=1)
    (container.folder_of(4) / file_name_of(name)).rename(container.folder_of(4) / left)
    container.close()
    container = Container(base)
    commit(container, save(container, 4, generation=1))
    container.tidy()
    assert not (container.folder_of(4) / left).exists()


@pytest.mark.parametrize("name", ["a b", "x" * 129, "ä"])
def test_a_folder_that_cannot_be_named_to_other_hosts_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="names the job to the other hosts"):
        Container(tmp_path / name)
