"""Names and manifests of checkpoints: pure, and exact to the byte."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.checkpoint.store import Manifest, SaveId, ShardRecord
from torchelastic.checkpoint.store.manifest import decode_manifest, encode_manifest
from torchelastic.checkpoint.store.owner import FenceState, decode_fence, encode_fence
from torchelastic.checkpoint.store.save_id import shard_file_name

numbers = st.integers(min_value=0, max_value=10**15)
names = st.builds(SaveId, epoch=numbers, round=numbers, generation=numbers, step=numbers)


def record(rank: int, world_size: int = 2) -> ShardRecord:
    return ShardRecord(rank, shard_file_name(rank, world_size), 4096 + rank, f"{rank:032x}")


def manifest() -> Manifest:
    metrics = {"loss": 0.25, "worst": math.inf, "unknown": math.nan}
    return Manifest(SaveId(1, 5, 7, 123), "run", 2, (record(1), record(0)), metrics, 1.5e9)


@given(names)
def test_a_name_is_found_in_its_folder(name: SaveId) -> None:
    assert SaveId.parse(name.folder_name) == name
    assert SaveId.find_staged(name.staging_name) == name
    assert SaveId.find(name.staging_name) is None
    assert SaveId.find_staged(name.folder_name) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "step-1.e1.r1.g1",
        "step-0000000123.e1.r5.g7",
        "step-000000123.e01.r5.g7",
        "step-000000123.e1.r5",
        "step-000000123.e1.r5.g7.old",
        "step-000000123.e1.r5.g7\n",
        "step-00000012³.e1.r5.g7",
        "step--00000123.e1.r5.g7",
    ],
)
def test_what_is_no_name_is_refused(text: str) -> None:
    assert SaveId.find(text) is None
    with pytest.raises(ValueError, match="no name of a checkpoint"):
        SaveId.parse(text)


def test_a_name_has_no_negative_numbers() -> None:
    with pytest.raises(ValueError, match="negative"):
        SaveId(1, -1, 0, 0)


@given(names, names)
def test_epoch_round_and_generation_decide_what_is_newer_and_not_the_step(a: SaveId, b: SaveId) -> None:
    age_a, age_b = (a.epoch, a.round, a.generation), (b.epoch, b.round, b.generation)
    assert age_a == age_b or (a < b) == (age_a < age_b)


def test_a_save_after_going_back_is_newer_than_the_step_that_was_given_up() -> None:
    assert SaveId(1, 6, 1, step=50) > SaveId(1, 5, 9, step=100)


def test_a_manifest_is_read_as_it_was_written() -> None:
    read = decode_manifest(encode_manifest(manifest()))
    assert read.shards == (record(0), record(1))
    assert read.size_bytes == 8193
    assert read.metrics["loss"] == 0.25
    assert read.metrics["worst"] == math.inf
    assert math.isnan(read.metrics["unknown"])
    assert replace(read, metrics={}) == replace(manifest(), metrics={})
    json.loads(encode_manifest(manifest()), parse_constant=pytest.fail)  # other languages can read it too


def test_every_flipped_byte_of_a_manifest_is_noticed() -> None:
    data = encode_manifest(manifest())
    for place in range(len(data)):
        for flip in (0x01, 0x20, 0x80):
            damaged = bytearray(data)
            damaged[place] ^= flip
            with pytest.raises(CorruptCheckpointError):
                decode_manifest(bytes(damaged))


def test_every_torn_manifest_is_noticed() -> None:
    data = encode_manifest(manifest())
    for length in range(len(data)):
        with pytest.raises(CorruptCheckpointError, match="the manifest is damaged"):
            decode_manifest(data[:length])
    with pytest.raises(CorruptCheckpointError):
        decode_manifest(data + b"\n")


@given(
    st.binary(max_size=200) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(repr).map(str.encode)
)
def test_anything_else_is_no_manifest(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        decode_manifest(data)


def test_a_manifest_of_another_version_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchelastic.checkpoint.store.manifest.MANIFEST_VERSION", 2)
    data = encode_manifest(manifest())
    monkeypatch.undo()
    with pytest.raises(CorruptCheckpointError, match=r"version 2.*knows version 1"):
        decode_manifest(data)


@pytest.mark.parametrize("ranks", [(), (0,), (0, 0), (0, 2), (0, 1, 1)])
def test_a_manifest_has_one_shard_of_each_rank(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="one of each rank"):
        Manifest(SaveId(1, 1, 1, 1), "run", 2, tuple(record(rank) for rank in ranks))


@pytest.mark.parametrize("file", ["../shard", "a/b", "/etc/passwd", ".hidden", "..", ""])
def test_a_manifest_names_only_files_in_its_folder(file: str) -> None:
    with pytest.raises(ValueError, match="no name of a file"):
        replace(record(0), file=file)


@given(numbers, numbers, st.text(max_size=20), st.text(max_size=20))
def test_a_fence_is_read_as_it_was_written(epoch: int, round_number: int, run_id: str, owner: str) -> None:
    state = FenceState(epoch, round_number, run_id, owner, "host", 7)
    assert decode_fence(encode_fence(state)) == state


def test_every_flipped_byte_of_a_fence_is_noticed() -> None:
    data = encode_fence(FenceState(3, 4, "run", "me", "host", 12))
    for place in range(len(data)):
        for flip in (0x01, 0x20, 0x80):
            damaged = bytearray(data)
            damaged[place] ^= flip
            with pytest.raises(CorruptCheckpointError):
                decode_fence(bytes(damaged))
