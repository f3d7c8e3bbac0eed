"""Contract: on a file system that lacks a call a façade saves and resumes in another way, or refuses before it trains.

Which call, which file system and what to do is in the error, or once in the log.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.facades import FACADES, Facade, files_in, outcome
from tests.contracts.faults import in_child, warm_up
from tests.contracts.test_crash_sweep import place as place
from tests.contracts.test_crash_sweep import sweep
from tests.contracts.test_damage import SAVED, damaged
from tests.few_examples import one_of_each, some_daily
from torchelastic.checkpoint import DiskTier, TieredCheckpointManager
from torchelastic.checkpoint.store import lease
from torchelastic.testing.file_system_faults import (
    FileSystemFault,
    busy_unlink,
    file_system_without,
    no_folder_fsync,
    no_folder_rename,
    no_free_space,
    no_fsync,
    no_links,
    no_locks,
    no_rename_of_open_files,
)

#: A bucket behind FUSE at its worst that can be written to.
POOREST = (no_locks(), no_links(), no_folder_rename(), no_folder_fsync(), no_free_space())
#: What each façade can do without, and in which of its ways of saying so.
DISPENSABLE = {
    "locks-ENOSYS": no_locks(errno.ENOSYS),
    "locks-ENOLCK": no_locks(errno.ENOLCK),
    "locks-EOPNOTSUPP": no_locks(errno.EOPNOTSUPP),
    "locks-524": no_locks(524),
    "locks-EINVAL": no_locks(errno.EINVAL),
    "links-EIO": no_links(errno.EIO),
    "links-EPERM": no_links(errno.EPERM),
    "links-EOPNOTSUPP": no_links(errno.EOPNOTSUPP),
    "links-ENOSYS": no_links(errno.ENOSYS),
    "folder-fsync-ENOSYS": no_folder_fsync(errno.ENOSYS),
    "folder-fsync-EPERM": no_folder_fsync(errno.EPERM),
    "folder-fsync-EINVAL": no_folder_fsync(errno.EINVAL),
    "folder-rename-EXDEV": no_folder_rename(errno.EXDEV),
    "folder-rename-ENOSYS": no_folder_rename(errno.ENOSYS),
    "folder-rename-EMFILE": no_folder_rename(errno.EMFILE),
    "rename-open-EOPNOTSUPP": no_rename_of_open_files(errno.EOPNOTSUPP),
    "rename-open-EBUSY": no_rename_of_open_files(errno.EBUSY),
    "unlink-EBUSY": busy_unlink(),
    "statvfs": no_free_space(),
}
#: fsspec writes where and how it likes.
ON_DISKS = [name for name in FACADES if "durable" not in name]
#: Their files are open as long as they are mapped; without links they have to be renamed so.
IN_MEMORY = ("local", "memory", "memory tier", "training-memory")
CASES = [(name, fault) for name in ON_DISKS for fault in DISPENSABLE]


class On(Facade):
    """A façade on a file system that lacks something."""

    def __init__(self, inner: Facade, *faults: FileSystemFault) -> None:
        self._inner, self._faults, self.words = inner, faults, inner.words

    def save(self, folder: Path, step: int) -> None:
        with file_system_without(folder, *self._faults):
            self._inner.save(folder, step)

    def resume(self, folder: Path) -> int | None:
        with file_system_without(folder, *self._faults):
            return self._inner.resume(folder)


def two_lives(facade: Facade, folder: Path, *faults: FileSystemFault) -> list[Any]:
    """What each of two saves and a resume says, each in a process of its own; and what was refused."""

    def life(action: Callable[[], object]) -> Callable[[], list[object]]:
        def lived() -> list[object]:
            with file_system_without(folder, *faults) as refused:
                return [outcome(action), dict(refused.counts)]

        return lived

    actions = (lambda: facade.save(folder, 1), lambda: facade.save(folder, 2), lambda: facade.resume(folder))
    return [in_child(life(action)).value for action in actions]


@pytest.mark.parametrize("name", ON_DISKS)
def test_on_the_poorest_file_system_a_facade_saves_and_resumes(name: str, tmp_path: Path) -> None:
    facade, folder = FACADES[name], tmp_path / "saved"
    faults = POOREST if name in IN_MEMORY else (no_rename_of_open_files(), *POOREST)
    first, second, resumed = two_lives(facade, folder, *faults)
    if name == "streams":
        assert "no rename of folders" in first[0]["error"]
        return
    assert [one[0].get("value", one) for one in (first, second, resumed)] == [None, None, 2]
    assert sum(first[1].values())
    left = [path.name for path in folder.rglob("*.lease") if path.name.startswith(".fence")]
    assert not left, "who ends in order leaves none"


@pytest.mark.parametrize(("name", "fault"), some_daily(CASES, one_of_each(CASES, [*DISPENSABLE]).__contains__))
def test_without_one_call_a_facade_saves_and_resumes(name: str, fault: str, tmp_path: Path) -> None:
    facade, one = FACADES[name], DISPENSABLE[fault]
    warm_up([lambda: facade.save(tmp_path / "trial", 1), lambda: facade.resume(tmp_path / "trial")])
    first, second, resumed = two_lives(facade, tmp_path / "saved", one)
    if name == "streams" and one.verb == "rename of a folder":
        told, _ = first
        assert "CheckpointError" in told["kinds"], told
        assert "no rename of folders" in told["error"]
        assert "choose a folder on another file system" in told["error"]
        return
    assert "error" not in first[0], first
    assert "error" not in second[0], second
    assert resumed[0].get("value") == 2, resumed
    struck = first[1].get(one.verb, 0) + second[1].get(one.verb, 0)
    needs = {"statvfs": False, "unlink": name != "tiered"}  # only the doctor asks; it keeps three
    needs |= {"flock": name != "streams", "link": name in IN_MEMORY, "rename of an open file": name != "streams"}
    needs["rename of a folder"] = name in ("tiered", "training")
    if needs.get(one.verb, True):
        assert struck, "the fault happened"
    losses = [text for text in first[0]["warnings"] if "has no " in text]
    assert len(losses) <= 1, "said once"
    if one.verb == "flock" and struck:
        assert "flock" in losses[0]
        assert "-o flock" in losses[0]


@pytest.mark.parametrize("name", ON_DISKS)
def test_without_fsync_of_files_nothing_is_trained(name: str, tmp_path: Path) -> None:
    facade = FACADES[name]
    (told, refused), _, _ = two_lives(facade, tmp_path / "saved", no_fsync())
    assert refused["fsync of a file"]
    assert "CheckpointError" in told["kinds"], told
    assert "has no fsync of files" in told["error"]
    assert str(tmp_path) in told["error"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) for name in ON_DISKS if name != "streams"])
def test_a_save_on_the_poorest_file_system_that_is_killed_leaves_the_checkpoint_before_or_the_new_one(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "UNSAID_S", 0.3)  # forks have it; else it is waited for after each kill
    swept = sweep(On(FACADES[name], *POOREST), "kill", place)
    assert (swept[0].found.get("value"), swept[-1].found.get("value")) == (1, 2)
    assert {one.found.get("value") for one in swept} == {1, 2}
    assert [one.then.get("value") for one in swept] == [3] * len(swept)
    assert not [text for one in swept for text in one.found["warnings"] if "damaged" in text]


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) for name in ON_DISKS if name != "streams"])
def test_damage_on_the_poorest_file_system_is_told(name: str, tmp_path: Path) -> None:
    facade, folder = On(FACADES[name], *POOREST), tmp_path / "saved"
    in_child(lambda: facade.save(folder, SAVED))
    told = 0
    for path in files_in(folder):
        whole = path.read_bytes()
        for what, data in [*damaged(whole)][::12]:
            path.write_bytes(data)
            found = in_child(lambda: outcome(lambda: facade.resume(folder))).value
            if found.get("value") != SAVED:
                assert found.get("value") is None, (path.name, what, found)
                told += 1
            path.write_bytes(whole)
    assert told, "no damage was noticed"


def test_folders_that_cannot_be_renamed_leave_as_many_checkpoints_as_are_kept(tmp_path: Path) -> None:
    facade, folder = On(FACADES["training"], *POOREST), tmp_path / "saved"
    for step in range(1, 6):
        assert not in_child(lambda step=step: facade.save(folder, step)).was_killed  # type: ignore[misc]
    shards = [path.parent.name for path in folder.rglob("*.shard")]
    assert len(shards) == 1, shards
    assert not [path for path in folder.iterdir() if path.name.startswith(".tmp-")]
    assert not list(folder.glob("*.lease")), "of whoever has ended in order"


def test_what_is_lacking_is_said_once_and_names_the_file_system(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def saved() -> list[str]:
        with caplog.at_level(logging.WARNING), file_system_without(tmp_path, *POOREST):
            manager = TieredCheckpointManager([DiskTier(tmp_path / "root")])
            manager.close()
            for step in (1, 2):
                FACADES["tiered"].save(tmp_path / "root", step)
        return [record.getMessage() for record in caplog.records if "has no " in record.getMessage()]

    told = in_child(saved).value
    assert len(told) == 3, told  # links cost nothing
    assert all("the file system of " in text and str(tmp_path) in text for text in told)
