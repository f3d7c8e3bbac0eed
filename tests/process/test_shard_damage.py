"""A shard with any byte changed, cut at any length: it gives the very value that was saved, or an error."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.format.header import PAGE_BYTES
from torchelastic.checkpoint.shards import ShardReader, load_tree, save_tree

STATE = {"w": torch.arange(7.0), "half": torch.ones(3, dtype=torch.bfloat16), "e": torch.empty(0), "n": [1, "é", 2.5]}


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    save_tree(tmp_path / "shard", STATE, meta={"iteration": 1})
    return tmp_path / "shard"


def is_the_state(tree: Any) -> bool:
    if tree.keys() != STATE.keys() or tree["n"] != STATE["n"]:
        return False
    pairs = [(tree[name], tensor) for name, tensor in STATE.items() if isinstance(tensor, torch.Tensor)]
    return all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)


def outcome(path: Path) -> str:
    """ "whole" or "corrupt"; fails the test where a load gives anything else."""
    try:
        loaded = load_tree(path)
    except CorruptCheckpointError as error:
        return "corrupt" if str(path) in str(error) else "corrupt, but nobody says which file"
    return "whole" if is_the_state(loaded) else "loaded, but not what was saved"


@pytest.mark.parametrize("change", [0x01, 0xFF])
def test_every_changed_byte_is_noticed_or_changes_nothing(shard: Path, change: int) -> None:
    data = shard.read_bytes()
    whole = []
    with shard.open("r+b", buffering=0) as file:
        for position, byte in enumerate(data):
            os.pwrite(file.fileno(), bytes([byte ^ change]), position)
            found = outcome(shard)
            assert found in ("whole", "corrupt"), position
            if found == "whole":
                whole.append(position)
            os.pwrite(file.fileno(), bytes([byte]), position)
    assert outcome(shard) == "whole"
    assert set(whole) == padding_of(shard), "bytes that are read by somebody, or padding that is read"


def padding_of(path: Path) -> set[int]:
    with ShardReader(path) as shard:
        used = set(range(64)) | set(range(64, 64 + header_bytes(path)))
        for entry in shard.header.entries:
            begin = shard.size_bytes - shard.header.data_bytes + entry.offset_bytes
            used |= set(range(begin, begin + entry.size_bytes))
        return set(range(shard.size_bytes)) - used


def header_bytes(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[16:24], "little")


def test_every_cut_is_noticed(shard: Path) -> None:
    for length in reversed(range(shard.stat().st_size)):
        os.truncate(shard, length)
        assert outcome(shard) == "corrupt", length


@pytest.mark.parametrize("garbage", [b"\0", b"\xff" * 5000])
def test_what_is_appended_is_not_read(shard: Path, garbage: bytes) -> None:
    with shard.open("ab") as file:
        file.write(garbage)
    assert outcome(shard) == "whole"


def test_a_cut_while_it_is_read_is_noticed(shard: Path) -> None:
    with ShardReader(shard) as reader:
        os.truncate(shard, PAGE_BYTES + 8)
        for read in (reader.read, reader.verify, lambda: reader.read_one("w")):
            with pytest.raises(CorruptCheckpointError, match="was cut while it was read"):
                read()


def other_files() -> list[bytes]:
    pickled = io.BytesIO()
    torch.save({"w": torch.zeros(2)}, pickled)
    return [b"", b"\0" * 63, b"\0" * 64, b"\0" * 9000, pickled.getvalue(), b"TESHARD\0" + b"\xff" * 9000]


@pytest.mark.parametrize("number", range(6))
def test_what_is_no_shard_is_corrupt(number: int, tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(other_files()[number])
    assert outcome(path) == "corrupt"


def test_what_is_no_file_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, expected in ((tmp_path / "pipe", "is not a file"), (tmp_path, "is not a file")):
        with pytest.raises(CorruptCheckpointError, match=expected):
            load_tree(path)
    with pytest.raises(CheckpointError, match="could not read the checkpoint"):
        load_tree(tmp_path / "absent")
