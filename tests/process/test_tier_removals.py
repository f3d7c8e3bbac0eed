"""Stores and disks that refuse to remove: nothing is lost by it, and what stays is found again."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec  # type: ignore[import-untyped]
import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from tests.process.tier_saves import context_of, name_at, restore, save, sealed
from tests.process.tiered_work import make_state
from torchelastic.checkpoint import TieredCheckpointManager
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.policy import KeepLast
from torchelastic.checkpoint.store import DiskTier, DurableTier
from torchelastic.checkpoint.store.removing import MOST_REFUSED
from torchelastic.group.peers import Alone


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    parent = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=parent if parent.is_dir() else tmp_path) as folder:
        yield Path(folder) / "tier"


def disk_tier(place: Path, kind: str) -> DiskTier:
    tier = DiskTier(place, KeepLast(1), shared=kind == "shared")
    tier.prepare(context_of(tier))
    return tier


class Refusing(MemoryFileSystem):  # type: ignore[misc]
    """An object store in memory that refuses to remove what tests say, in the ways of stores and their packages."""

    protocol = "refusing"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    #: "bulk": requests for many objects (gateways to S3, GCS's and Ceph's); "silently": those, without a word (an
    #: answer that names what was refused, and a package that does not look); "shards": those alone; "all".
    refused = ""
    asked: ClassVar[list[str]] = []

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        self.asked.append("bulk")
        if self.refused == "silently":
            return
        if self.refused:
            raise NotImplementedError("A header you provided implies functionality that is not implemented")
        super().rm(path, recursive, maxdepth)

    def rm_file(self, path: str) -> None:
        self.asked.append(path)
        if self.refused == "all" or (self.refused == "shards" and path.endswith(".shard")):
            raise PermissionError("AccessDenied: it is locked")
        super().rm_file(path)


fsspec.register_implementation("refusing", Refusing, clobber=True)


@pytest.fixture
def refusing() -> Iterator[type[Refusing]]:
    yield Refusing
    Refusing.refused = ""
    Refusing.store.clear()
    Refusing.pseudo_dirs[:] = [""]
    Refusing.asked.clear()


def durable(keep: int = 1) -> DurableTier:
    tier = DurableTier("refusing://bucket/run", KeepLast(keep))
    tier.prepare(context_of(tier))
    return tier


@pytest.mark.parametrize("refused", ["", "bulk", "silently"])
def test_a_store_that_refuses_to_remove_many_objects_at_once_removes_them_one_by_one(
    refusing: type[Refusing], refused: str
) -> None:
    refusing.refused = refused
    tier = durable()
    for step in range(1, 5):
        save([tier], name_at(step))
    assert {Path(path).parent.name for path in refusing.store if "step-" in path} == {name_at(4).folder_name}
    assert "bulk" in refusing.asked
    assert restore(tier) == 4


def test_what_is_removed_from_durable_storage_loses_its_manifest_first_and_its_shards_are_found_again(
    refusing: type[Refusing],
) -> None:
    refusing.refused = "shards"
    tier = durable()
    save([tier], name_at(1))
    with pytest.raises(CheckpointError, match=r"remove a checkpoint at refusing://bucket/run: .*AccessDenied"):
        save([tier], name_at(2))
    assert [entry.name.step for entry in tier.inventory() if entry.is_committed] == [2]
    assert [Path(path).name for path in refusing.store if name_at(1).folder_name in path] == [
        "shard-00000-of-00001.shard"
    ]
    refusing.refused = ""
    save([tier], name_at(3))
    assert {Path(path).parent.name for path in refusing.store if "step-" in path} == {name_at(3).folder_name}


def test_a_save_that_failed_is_removed_by_the_next_one_and_one_that_is_being_written_stays(
    refusing: type[Refusing],
) -> None:
    tier = durable()
    tier.put(sealed(name_at(1)))  # a rank has died then, and nobody could remove it
    tier.put(sealed(name_at(3)))  # another one is to follow
    save([tier], name_at(2))
    assert {Path(path).parent.name for path in refusing.store if "step-" in path} == {
        name_at(2).folder_name,
        name_at(3).folder_name,
    }


def test_where_nothing_may_be_removed_all_checkpoints_stay_whole_and_the_attempts_are_few(
    refusing: type[Refusing],
) -> None:
    refusing.refused = "all"
    tier = durable()
    save([tier], name_at(1))
    for step in range(2, 12):
        before = len(refusing.asked)
        with pytest.raises(CheckpointError, match="AccessDenied"):
            save([tier], name_at(step))
        assert len(refusing.asked) - before <= MOST_REFUSED, "at most so many requests for each save"
    entries = tier.inventory()
    assert len(entries) == 11
    assert all(entry.is_committed and entry.damage is None for entry in entries)
    refusing.refused = ""
    save([tier], name_at(12))
    assert [entry.name.step for entry in tier.inventory()] == [12]


@pytest.mark.parametrize("kind", ["shared", "private"])
def test_a_file_that_somebody_has_open_keeps_nothing_else_and_goes_later(
    kind: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS and SMB: what is open in another process cannot be removed, or its folder cannot."""
    unlink, held = os.unlink, {"shard-00000-of-00001.shard"}
    tier = disk_tier(place, kind)
    save([tier], name_at(1))

    def refuse(path: Any, *where: Any, **more: Any) -> None:
        if Path(path).name in held:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        unlink(path, *where, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refuse)
        with pytest.raises(CheckpointError, match="Device or resource busy"):
            save([tier], name_at(2))
        tier.close()
        following = disk_tier(place, kind)  # a new start is not refused
        assert restore(following) == 2
        assert [path.parent.name for path in place.rglob("manifest.json")] == [name_at(2).folder_name]
        assert len([*place.rglob("*.shard")]) == 2
    save([following], name_at(3, epoch=2))
    assert len([*place.rglob("*.shard")]) == 1
    assert not [path for path in place.iterdir() if "gone" in path.name]
    following.close()


def test_the_folder_of_a_save_that_failed_goes_with_the_next_one(place: Path) -> None:
    tier = disk_tier(place, "shared")
    tier.put(sealed(name_at(1)))
    tier.put(sealed(name_at(3)))
    save([tier], name_at(2))
    assert sorted(path.name for path in place.glob(".tmp-step*")) == [name_at(3).staging_name]
    tier.close()


def test_what_is_refused_at_every_save_is_one_line_of_the_log_and_then_a_count(
    refusing: type[Refusing], caplog: pytest.LogCaptureFixture
) -> None:
    refusing.refused = "all"
    manager = TieredCheckpointManager([DurableTier("refusing://bucket/run", KeepLast(1))], run_id="run")
    peers, state = Alone(), make_state(1, 1)
    manager.enter_group(peers)
    for step in range(1, 13):
        manager.save_step(state, step, peers)
        assert manager.wait(30)
    lines = [line for line in caplog.messages if "removing old checkpoints in the durable tier failed" in line]
    assert len(lines) == 2, caplog.text
    assert "AccessDenied" in lines[0]
    assert "(10 times by now)" in lines[1]
    assert len([one for one in manager.failures if "removing old" in one]) == 11
    refusing.refused = ""
    manager.save_step(state, 13, peers)
    assert manager.wait(30)
    assert {Path(path).parent.name.split(".")[0] for path in refusing.store if "step-" in path} == {"step-000000013"}
    manager.close()
