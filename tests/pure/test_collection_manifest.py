"""Names, manifests and fences of checkpoints: pure, and exact to the byte."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.checkpoint.store import Manifest, SaveId, ShardRecord
from torchelastic.checkpoint.store.manifest import (
    ManifestError,
    StreamRecord,
    UnknownManifestVersionError,
    _digest,
    decode_manifest,
    decode_streams,
    encode_manifest,
    encode_streams,
)
from torchelastic.checkpoint.store.owner import FenceState, decode_fence, encode_fence
from torchelastic.checkpoint.store.save_id import shard_file_name

numbers = st.integers(min_value=0, max_value=10**15)
names = st.builds(SaveId, epoch=numbers, round=numbers, generation=numbers, step=numbers)


def record(rank: int, world_size: int = 2) -> ShardRecord:
    return ShardRecord(rank, shard_file_name(rank, world_size), 4096 + rank, f"{rank:032x}")


def manifest() -> Manifest:
    metrics = {"loss": 0.25, "worst": math.inf, "unknown": math.nan}
    return Manifest(SaveId(1, 5, 7, 123), "run", 2, (record(1), record(0)), metrics, 1.5e9)


STREAMS = {"default": StreamRecord(12, "0a" * 32), "extra": StreamRecord(0, "ff" * 32)}


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


def test_a_manifest_is_read_as_it_was_written() -> None:
    read = decode_manifest(encode_manifest(manifest()))
    assert read.shards == (record(0), record(1))
    assert read.size_bytes == 8193
    assert read.metrics["loss"] == 0.25
    assert read.metrics["worst"] == math.inf
    assert math.isnan(read.metrics["unknown"])
    assert replace(read, metrics={}) == replace(manifest(), metrics={})
    json.loads(encode_manifest(manifest()), parse_constant=pytest.fail)  # other languages can read it too


#: Each document: how it is written, how it is read, and whether each single bit of it counts.
DOCUMENTS: dict[str, tuple[bytes, Callable[[bytes], object], bool]] = {
    "manifest": (encode_manifest(manifest()), decode_manifest, True),
    "streams": (encode_streams(STREAMS), decode_streams, False),
    "fence": (encode_fence(FenceState(3, 4, "run", "me", "host", 12)), decode_fence, True),
}
DAMAGE = (CorruptCheckpointError, ManifestError)
each_document = pytest.mark.parametrize(("data", "decode", "each_bit_counts"), DOCUMENTS.values(), ids=DOCUMENTS)


@each_document
def test_every_flipped_bit_is_noticed_or_changes_nothing(
    data: bytes, decode: Callable[[bytes], object], each_bit_counts: bool
) -> None:
    noticed = 0
    for position in range(len(data) * 8):
        changed = bytearray(data)
        changed[position // 8] ^= 1 << position % 8
        try:
            assert decode(bytes(changed)) == decode(data)
        except DAMAGE:
            noticed += 1
    assert noticed == len(data) * 8 if each_bit_counts else noticed > 0.9 * 8 * len(data)


@each_document
def test_every_torn_document_is_noticed(data: bytes, decode: Callable[[bytes], object], each_bit_counts: bool) -> None:
    for length in range(len(data.rstrip())):
        with pytest.raises(DAMAGE):
            decode(data[:length])
    if each_bit_counts:
        with pytest.raises(DAMAGE):
            decode(data + b"\n")


def test_a_manifest_of_another_version_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchelastic.checkpoint.store.manifest.MANIFEST_VERSION", 2)
    data = encode_manifest(manifest())
    monkeypatch.undo()
    with pytest.raises(CorruptCheckpointError, match=r"version 2.*knows version 1"):
        decode_manifest(data)


def test_a_manifest_of_streams_of_a_newer_release_is_not_taken_for_a_damaged_one() -> None:
    document: dict[str, object] = {"version": 2, "parts": ["something new"]}
    document["manifest_sha256"] = _digest(document)
    with pytest.raises(UnknownManifestVersionError, match="manifest version 2"):
        decode_streams(json.dumps(document).encode())


@pytest.mark.parametrize("ranks", [(), (0,), (0, 0), (0, 2), (0, 1, 1)])
def test_a_manifest_has_one_shard_of_each_rank(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="one of each rank"):
        Manifest(SaveId(1, 1, 1, 1), "run", 2, tuple(record(rank) for rank in ranks))


@pytest.mark.parametrize("file", ["../shard", "a/b", "/etc/passwd", ".hidden", "..", ""])
def test_a_manifest_names_only_files_in_its_folder(file: str) -> None:
    with pytest.raises(ValueError, match="no name of a file"):
        replace(record(0), file=file)


records = st.builds(StreamRecord, st.integers(0, 1 << 50), st.text("0123456789abcdef", min_size=64, max_size=64))


@given(st.dictionaries(st.text(min_size=1, max_size=12), records, max_size=4))
def test_a_manifest_of_streams_is_read_as_it_was_written(streams: dict[str, StreamRecord]) -> None:
    assert decode_streams(encode_streams(streams)) == streams


def test_what_is_there_is_whole_or_cut() -> None:
    of = manifest()
    first, second = of.shards
    assert of.found_in({first.file: first.size_bytes, second.file: second.size_bytes - 1}) == ([first], [second])
    assert of.found_in({first.file: None}) == ([], [first])
