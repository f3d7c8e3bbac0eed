from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.checkpoint.store.manifest import (
    ManifestError,
    StreamRecord,
    UnknownManifestVersionError,
    _digest,
    decode_streams,
    encode_streams,
)

RECORDS = st.builds(StreamRecord, st.integers(0, 1 << 50), st.text("0123456789abcdef", min_size=64, max_size=64))
STREAMS = st.dictionaries(st.text(min_size=1, max_size=12), RECORDS, max_size=4)
EXAMPLE = {"default": StreamRecord(12, "0a" * 32), "extra": StreamRecord(0, "ff" * 32)}


@given(STREAMS)
def test_a_decoded_manifest_is_what_was_encoded(streams: dict[str, StreamRecord]) -> None:
    assert decode_streams(encode_streams(streams)) == streams


def test_every_flipped_bit_of_a_manifest_is_noticed_or_changes_nothing() -> None:
    data = encode_streams(EXAMPLE)
    noticed = 0
    for position in range(len(data) * 8):
        changed = bytearray(data)
        changed[position // 8] ^= 1 << position % 8
        try:
            assert decode_streams(bytes(changed)) == EXAMPLE
        except ManifestError:
            noticed += 1
    assert noticed > 0.9 * 8 * len(data)


def test_every_truncated_manifest_is_noticed() -> None:
    data = encode_streams(EXAMPLE).rstrip()
    for length in range(len(data)):
        with pytest.raises(ManifestError):
            decode_streams(data[:length])


@given(st.binary(max_size=64) | st.from_regex(r"[\[{\"0-9nt].*").map(str.encode))
def test_bytes_that_are_no_manifest_are_rejected(data: bytes) -> None:
    with pytest.raises(ManifestError):
        decode_streams(data)


def test_a_manifest_of_a_newer_release_is_not_taken_for_a_damaged_one() -> None:
    document: dict[str, object] = {"version": 2, "parts": ["something new"]}
    document["manifest_sha256"] = _digest(document)
    with pytest.raises(UnknownManifestVersionError, match="manifest version 2"):
        decode_streams(json.dumps(document).encode())
