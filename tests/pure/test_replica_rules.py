"""Frames, proofs and limits, without sockets."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.replication.errors import (
    CorruptReplicaError,
    DamagedFrameError,
    OutdatedRoundError,
    PeerStalledError,
    ProtocolError,
)
from torchelastic.checkpoint.replication.protocol import (
    HEADER_BYTES,
    MOST_MESSAGE_BYTES,
    check_timeout,
    decode_header,
    decode_message,
    encode_header,
    encode_message,
    number_in,
    proof_of,
    text_in,
    token_bytes,
)
from torchelastic.checkpoint.replication.receive import check_object_id

# --- frames -----------------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.text(max_size=10), st.integers() | st.text(max_size=50) | st.booleans(), max_size=5))
def test_messages_come_back_as_they_were(message: dict[str, object]) -> None:
    frame = encode_message(message)
    length, check = decode_header(frame[:HEADER_BYTES])
    assert length == len(frame) - HEADER_BYTES
    assert decode_message(frame[HEADER_BYTES:], check) == message


def test_no_flipped_bit_passes_in_a_frame() -> None:
    frame = encode_message({"op": "push", "size": 1000})
    for bit in range(len(frame) * 8):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises((DamagedFrameError, ProtocolError)):
            decode_message(damaged[HEADER_BYTES:], decode_header(damaged[:HEADER_BYTES])[1])


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"GET / HTTP/1.1\r\nHost", "does not speak this protocol"),
        (encode_header(MOST_MESSAGE_BYTES + 1, 0), "65537 bytes, 65536 are allowed"),
    ],
)
def test_headers_that_are_none_or_claim_too_much(header: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        decode_header(header[:HEADER_BYTES])


def test_strangers_get_a_lower_limit() -> None:
    with pytest.raises(ProtocolError, match="1025 bytes, 1024 are allowed"):
        decode_header(encode_header(1025, 0), most_bytes=1024)
    with pytest.raises(ValueError, match="65536 are allowed"):
        encode_message({"ids": "x" * MOST_MESSAGE_BYTES})


@pytest.mark.parametrize("content", [b"{", b"[1]", b'"x"', b"\xff\xfe", b"[" * 60_000])
def test_what_is_no_json_object_is_refused(content: bytes) -> None:
    with pytest.raises(ProtocolError, match="no JSON"):
        decode_message(content, xxhash.xxh3_64_intdigest(content))


@pytest.mark.parametrize("value", [None, True, -1, 1 << 63, 1.5, "1", [1]])
def test_numbers_are_whole_and_bounded(value: object) -> None:
    with pytest.raises(ProtocolError, match="no whole number as 'size'"):
        number_in({"size": value}, "size")
    assert number_in({"size": 0}, "size") == 0
    with pytest.raises(ProtocolError, match="no text as 'id'"):
        text_in({"id": 5}, "id")


@pytest.mark.parametrize("good", ["a", "iter_0000010/rank-3.pt", "10:3:session@host", "a/b/c/d/e/f/g/h"])
def test_ids_that_may_travel(good: str) -> None:
    assert check_object_id(good) == good


@pytest.mark.parametrize(
    "bad", ["", "/a", "a/", "a//b", "../a", "a/..", ".", "a b", "a\n", "ä", "a/" * 8 + "a", "x" * 129]
)
def test_ids_that_may_not(bad: str) -> None:
    with pytest.raises(ValueError, match="is no id of an object"):
        check_object_id(bad)


# --- proofs -----------------------------------------------------------------------------------------------------------


def test_a_proof_depends_on_everything_and_does_not_hold_the_token() -> None:
    token = token_bytes("a-secret-of-the-run")
    proofs = {
        proof_of(token, "client", "n1", "n2"),
        proof_of(token, "server", "n1", "n2"),
        proof_of(token, "client", "n3", "n2"),
        proof_of(token, "client", "n1", "n4"),
        proof_of(token_bytes("another-secret-of-it"), "client", "n1", "n2"),
    }
    assert len(proofs) == 5
    assert all("secret" not in proof for proof in proofs)


def test_a_short_token_is_refused_without_printing_it() -> None:
    with pytest.raises(ValueError, match="the token has 5 characters") as caught:
        token_bytes("12ab5")
    assert "12ab5" not in str(caught.value)


def test_errors_are_what_callers_catch() -> None:
    assert issubclass(PeerStalledError, TimeoutError)
    assert issubclass(CorruptReplicaError, CorruptCheckpointError)
    assert issubclass(OutdatedRoundError, CheckpointError)


def test_a_wait_has_a_bound() -> None:
    with pytest.raises(ValueError, match="timeout_s is 0"):
        check_timeout(0)
    assert check_timeout(0.5) == 0.5
