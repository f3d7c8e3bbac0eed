"""Checkpoints of several shards on a real file system: seen when complete, checked when read, removed as a whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.process.tier_saves import hidden_in, name_at, require_whole, sealed, state_at
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.policy import KeepLast
from torchelastic.checkpoint.store import MANIFEST_NAME, Manifest, SaveId, list_checkpoints, open_checkpoint
from torchelastic.checkpoint.store.pruning import abandon, prune, remove_checkpoint, remove_left_overs
from torchelastic.checkpoint.store.writing import begin, commit, write_shard


def staged(root: Path, name: SaveId, world_size: int = 2, saved_s: float = 0.0) -> Manifest:
    folder = begin(root, name)
    shards = [sealed(name, rank, world_size) for rank in range(world_size)]
    records = [write_shard(folder, shard.rank, world_size, shard.data) for shard in shards]
    return Manifest(name, "run", world_size, tuple(records), {"loss": 0.5}, saved_s)


def saved(root: Path, step: int, *, epoch: int = 1, round_number: int = 1, saved_s: float = 0.0) -> Path:
    return commit(root, staged(root, name_at(step, epoch=epoch, round_number=round_number), saved_s=saved_s))


def test_what_two_ranks_have_written_is_one_state(tmp_path: Path) -> None:
    folder = saved(tmp_path / "root", 7)
    with open_checkpoint(folder) as checkpoint:
        checkpoint.verify()
        assert require_whole(checkpoint.read_tree()) == 7
        template = {**state_at(0), "weights": torch.zeros(5000, dtype=torch.float64)}
        loaded = checkpoint.read_into(template)
        assert require_whole(loaded) == 7
        assert loaded["weights"].data_ptr() == template["weights"].data_ptr()
        assert len(checkpoint.shards) == 2
    (info,) = list_checkpoints(tmp_path / "root")
    assert (info.step, info.damage, info.metrics) == (7, None, {"loss": 0.5})
    assert info.size_bytes == sum(path.stat().st_size for path in folder.glob("*.shard"))
    with open_checkpoint(folder, ranks=[1]) as part:
        assert [shard.path.name for shard in part.shards] == ["shard-00001-of-00002.shard"]
    with pytest.raises(ValueError, match="none of \\[2\\]"):
        open_checkpoint(folder, ranks=[2])


def test_nothing_is_seen_before_the_commit(tmp_path: Path) -> None:
    manifest = staged(tmp_path, name_at(1))
    assert list_checkpoints(tmp_path) == []
    commit(tmp_path, manifest)
    assert [info.name for info in list_checkpoints(tmp_path)] == [manifest.name]
    assert hidden_in(tmp_path) == []


@pytest.mark.parametrize("fault", ["missing", "cut", "another", "nothing"])
def test_a_commit_is_refused_if_a_shard_is_not_what_its_rank_has_written(fault: str, tmp_path: Path) -> None:
    manifest = staged(tmp_path, name_at(1))
    path = tmp_path / name_at(1).staging_name / manifest.shards[1].file
    if fault == "missing":
        path.unlink()
    elif fault == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif fault == "another":
        path.write_bytes(sealed(name_at(2), 1, 2).data)
    else:
        path.write_bytes(b"")
    with pytest.raises(CorruptCheckpointError, match=r"rank 1"):
        commit(tmp_path, manifest)
    assert list_checkpoints(tmp_path) == []
    write_shard(begin(tmp_path, manifest.name), 1, 2, sealed(name_at(1), 1, 2).data)
    commit(tmp_path, manifest)
    assert [info.damage for info in list_checkpoints(tmp_path)] == [None]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"exists already, and nothing is overwritten"):
        saved(tmp_path, 1)


def test_a_shard_that_is_none_is_refused_before_it_is_written(tmp_path: Path) -> None:
    data = sealed(name_at(1)).data
    for torn in (memoryview(b""), memoryview(bytes(5000)), data[:-1]):
        with pytest.raises(CorruptCheckpointError):
            write_shard(begin(tmp_path, name_at(1)), 0, 1, torn)
    assert [*begin(tmp_path, name_at(1)).iterdir()] == []


def test_the_newest_is_of_the_latest_round_whatever_its_step(tmp_path: Path) -> None:
    saved(tmp_path, 100, round_number=1)
    saved(tmp_path, 50, round_number=2)
    saved(tmp_path, 10, epoch=0, round_number=9)
    assert [info.step for info in list_checkpoints(tmp_path)] == [50, 100, 10]


def test_what_is_damaged_is_listed_with_the_reason(tmp_path: Path) -> None:
    cut, no_manifest, bad_manifest, no_shard, exchanged = (saved(tmp_path, step) for step in range(1, 6))
    shard = cut / "shard-00001-of-00002.shard"
    shard.write_bytes(shard.read_bytes()[:5000])
    (no_manifest / MANIFEST_NAME).unlink()
    text = (bad_manifest / MANIFEST_NAME).read_text()
    (bad_manifest / MANIFEST_NAME).write_text(text.replace('"run_id": "run"', '"run_id": "ran"'))
    (no_shard / "shard-00000-of-00002.shard").unlink()
    shutil.copy(cut / MANIFEST_NAME, exchanged)
    damage = {info.folder: info.damage or "" for info in list_checkpoints(tmp_path)}
    assert "has 5000 bytes of" in damage[cut]
    assert "has no manifest" in damage[no_manifest]
    assert "its own digest does not match" in damage[bad_manifest]
    assert "the shard of rank 0, is missing" in damage[no_shard]
    assert "has the manifest of step-000000001" in damage[exchanged]
    for folder in damage:
        with pytest.raises(CorruptCheckpointError):
            open_checkpoint(folder)


def test_a_shard_of_another_checkpoint_is_not_taken_for_one_of_this(tmp_path: Path) -> None:
    folder, other = saved(tmp_path, 1), saved(tmp_path, 2)
    shutil.copy(other / "shard-00001-of-00002.shard", folder)
    assert list_checkpoints(tmp_path)[1].damage is None  # of the same size
    with pytest.raises(CorruptCheckpointError, match="is not what rank 1 has written"):
        open_checkpoint(folder)


def test_a_flipped_byte_of_a_tensor_is_found_by_verify_and_by_reading(tmp_path: Path) -> None:
    path = saved(tmp_path, 1) / "shard-00001-of-00002.shard"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with open_checkpoint(path.parent) as checkpoint:
        for read in (checkpoint.verify, checkpoint.read_tree, lambda: checkpoint.read_into(state_at(0))):
            with pytest.raises(CorruptCheckpointError, match=r"shard-00001.*the checksum of its tensor"):
                read()


def test_pruning_keeps_the_newest_complete_ones_and_leaves_damaged_ones_alone(tmp_path: Path) -> None:
    folders = [saved(tmp_path, step) for step in range(1, 6)]
    for damaged in (folders[0], folders[4]):
        (damaged / MANIFEST_NAME).unlink()
    with open_checkpoint(folders[1]) as reading:
        assert prune(tmp_path, KeepLast(1)) == [name_at(2), name_at(3)]
        assert require_whole(reading.read_tree()) == 2  # whoever reads can go on
    assert [info.step for info in list_checkpoints(tmp_path)] == [5, 4, 1]
    assert hidden_in(tmp_path) == []


def test_a_clock_that_was_set_back_removes_nothing_that_is_newer(tmp_path: Path) -> None:
    for round_number, (step, saved_s) in enumerate([(300, 3e9), (200, 2e9), (100, 1e9)]):
        saved(tmp_path, step, round_number=round_number, saved_s=saved_s)
    assert [name.step for name in prune(tmp_path, KeepLast(1))] == [300, 200]
    assert [info.saved_s for info in list_checkpoints(tmp_path)] == [1e9]


def test_an_abandoned_checkpoint_is_gone_and_its_late_writers_are_told(tmp_path: Path) -> None:
    folder = begin(tmp_path, name_at(1))
    manifest = staged(tmp_path, name_at(1))
    abandon(tmp_path, name_at(1))
    abandon(tmp_path, name_at(1))
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(CheckpointError, match="No such file"):
        write_shard(folder, 0, 2, sealed(name_at(1), 0, 2).data)
    with pytest.raises(CheckpointError, match="missing"):
        commit(tmp_path, manifest)


def test_left_overs_go_and_what_may_still_be_published_stays(tmp_path: Path) -> None:
    begin(tmp_path, name_at(1, epoch=1, round_number=9))
    current = begin(tmp_path, name_at(1, epoch=2, round_number=0))
    (tmp_path / ".tmp-gone-0123").mkdir()
    (tmp_path / ".tmp-12-abcd").write_bytes(b"of a dead writer")
    (tmp_path / "notes.txt").write_text("of somebody else")
    assert remove_left_overs(tmp_path) == 2
    assert remove_left_overs(tmp_path, older_than=(2, 0)) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [current.name, "notes.txt"]


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "none") == []
    assert remove_left_overs(tmp_path / "none") == 0
    assert prune(tmp_path / "none", KeepLast(1)) == []
    remove_checkpoint(tmp_path / "none", name_at(1))
