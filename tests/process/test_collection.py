"""Checkpoints of several shards on a real file system: seen when complete, checked when read, removed as a whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.process.tier_saves import hidden_in, name_at, require_whole, sealed, state_at
from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.checkpoint.policy import KeepLast
from torchelastic.checkpoint.store import MANIFEST_NAME, DiskTier, Manifest, list_checkpoints, open_checkpoint


def saved(root: Path, step: int) -> Path:
    tier, name = DiskTier(root), name_at(step)
    records = [tier.put(sealed(name, rank, 2)) for rank in range(2)]
    tier.commit(Manifest(name, "run", 2, tuple(records), {"loss": 0.5}))
    return root / name.folder_name


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


def test_pruning_keeps_the_newest_complete_ones_and_leaves_damaged_ones_alone(tmp_path: Path) -> None:
    folders = [saved(tmp_path, step) for step in range(1, 6)]
    for damaged in (folders[0], folders[4]):
        (damaged / MANIFEST_NAME).unlink()
    with open_checkpoint(folders[1]) as reading:
        assert DiskTier(tmp_path, KeepLast(1)).prune() == [name_at(2), name_at(3)]
        assert require_whole(reading.read_tree()) == 2  # whoever reads can go on
    assert [info.step for info in list_checkpoints(tmp_path)] == [5, 4, 1]
    assert hidden_in(tmp_path) == []
