"""Contract: a byte that has changed, or a file that was cut, is what was saved or is told; never another value.

Where one checkpoint is all there is, who asks for it gets it, an error that names it, or nothing with a warning that
names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contracts.facades import FACADES, Streamed, files_in, outcome, step_of, weights_at
from tests.contracts.faults import in_child
from torchelastic.checkpoint import DiskTier, TieredCheckpointManager
from torchelastic.checkpoint.api import load_latest, save

SAVED = 7
#: So many bytes of each file are changed, one at a time; of every layer of the format some.
POSITIONS = 40


def damaged(data: bytes) -> Iterator[tuple[str, bytes]]:
    """The content with one byte changed, or cut."""
    for position in sorted({*range(0, len(data), max(1, len(data) // POSITIONS)), len(data) - 1}):
        yield f"byte {position}", data[:position] + bytes([data[position] ^ 0x41]) + data[position + 1 :]
    yield "cut", data[: len(data) // 2]


@pytest.mark.parametrize("name", FACADES)
def test_damage_is_told_or_changes_nothing(name: str, tmp_path: Path) -> None:
    facade, folder = FACADES[name], tmp_path / "saved"
    in_child(lambda: facade.save(folder, SAVED))
    told = 0
    files = files_in(folder)
    assert files
    for path in files:
        whole = path.read_bytes()
        for what, data in damaged(whole):
            path.write_bytes(data)
            found = outcome(lambda: facade.resume(folder))
            if found.get("value") != SAVED:
                text = found.get("error") or " ".join(found["warnings"])
                assert path.parent.name in text, (path.name, what, found)
                assert "file:/" not in text.replace("file:///", ""), f"no address: {text}"
                assert "torchelastic-download" not in text, f"of a file that is gone: {text}"
                assert found.get("value", None) is None, "another value"
                assert "error" not in found or "CheckpointError" in found["kinds"], (path.name, what, found)
                told += 1
            path.write_bytes(whole)
    assert told, "no damage was noticed"
    assert facade.resume(folder) == SAVED, "who only looks has removed nothing"


@pytest.mark.parametrize("file", ["manifest.json", "shard-00000-of-00001.shard"])
def test_on_tiers_a_damaged_newest_checkpoint_is_named_and_the_next_older_one_is_loaded(
    tmp_path: Path, file: str
) -> None:
    manager, state = TieredCheckpointManager([DiskTier(tmp_path)]), Streamed()
    try:
        for step in (1, 2):
            state.weights = weights_at(step)
            save(manager, state)
        newer, older = manager.list_checkpoints()
        path = tmp_path / str(newer.name) / file
        path.write_bytes(path.read_bytes()[:-100])
        found = outcome(lambda: load_latest(manager, state))
        assert found["value"].name == older.name, found
        assert step_of(state.weights) == 1
        assert any(str(path.parent) in text for text in found["warnings"]), found
        assert [one.name for one in manager.list_checkpoints()] == [older.name]
        assert [one.name for one in manager.list_candidates()] == [newer.name, older.name]
    finally:
        manager.close()
