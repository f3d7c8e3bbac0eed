"""Frames, proofs and limits, and what a server takes from whom: without sockets."""

from __future__ import annotations

import logging
import random

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.replicas.protocol import (
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
from torchelastic.checkpoint.replicas.receive import MemoryShelf, Reception, check_object_id, digest_of
from torchelastic.checkpoint.replicas.replication_errors import (
    CorruptReplicaError,
    DamagedFrameError,
    OutdatedRoundError,
    PeerStalledError,
    ProtocolError,
    ReplicaBusyError,
    ReplicaRefusedError,
)

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


# --- what a server takes from whom ------------------------------------------------------------------------------------


CONTENT = random.Random(3).randbytes(1000)


class BoundedShelf(MemoryShelf):
    """One with room for so much."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__()
        self._capacity_bytes = capacity_bytes

    def destination(self, object_id: str, size_bytes: int) -> bytearray:
        if size_bytes > self._capacity_bytes:
            raise ValueError(f"this shelf holds {self._capacity_bytes} in all")
        if size_bytes + sum(map(len, self._incoming.values())) > self._capacity_bytes:
            raise CheckpointError(f"there is no room for {object_id} ({size_bytes} bytes) now")
        return super().destination(object_id, size_bytes)


class Desk:
    """A reception and its shelf."""

    def __init__(self, capacity_bytes: int = 3000, most_objects: int = 2) -> None:
        self.shelf = BoundedShelf(capacity_bytes)
        self.reception = Reception(self.shelf, most_objects=most_objects)

    def begin(self, object_id: str, content: bytes = CONTENT, round_number: int = 1) -> memoryview:
        place = self.reception.begin(object_id, len(content), digest_of(content), round_number)
        assert place is not None
        return place

    def complete(self, object_id: str, arrived: bytes = CONTENT, round_number: int = 1) -> None:
        self.reception.complete(object_id, digest_of(CONTENT), digest_of(arrived), round_number)


def test_nothing_is_visible_before_it_is_complete() -> None:
    desk = Desk()
    desk.begin("x")[:] = CONTENT
    assert desk.shelf.ids() == []
    desk.complete("x")
    assert desk.shelf.ids() == ["x"]
    assert bytes(desk.shelf.source("x") or b"") == CONTENT
    assert desk.reception.begin("x", 1000, digest_of(CONTENT), 1) is None


def test_bounds_of_what_is_on_its_way() -> None:
    desk = Desk(capacity_bytes=2500)
    desk.begin("a")
    with pytest.raises(ReplicaBusyError, match="somebody is sending a already"):
        desk.begin("a")
    with pytest.raises(ReplicaBusyError, match=r"no room for c \(2000 bytes\)"):
        desk.begin("c", bytes(2000))
    desk.begin("b")
    with pytest.raises(ReplicaBusyError, match="2 objects are on their way already"):
        desk.begin("d", b"small")
    with pytest.raises(ReplicaRefusedError, match="this shelf holds 10 in all"):
        Desk(capacity_bytes=10).begin("x")


def test_the_fence_holds_at_the_beginning_and_at_the_end() -> None:
    desk = Desk()
    desk.begin("x", round_number=4)[:] = CONTENT
    desk.reception.fence(5)
    desk.reception.fence(3)
    with pytest.raises(OutdatedRoundError, match="x comes from round 4, and round 5 has begun"):
        desk.complete("x", round_number=4)
    with pytest.raises(OutdatedRoundError, match="its sender was replaced and must stop"):
        desk.begin("x", round_number=4)
    assert desk.shelf.ids() == []
    assert desk.begin("x", round_number=5).nbytes == 1000


def test_a_damaged_object_is_abandoned(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(capacity_bytes=1000)
    desk.begin("x")
    with caplog.at_level(logging.INFO), pytest.raises(DamagedFrameError, match="x was changed on its way"):
        desk.complete("x", CONTENT[:-1] + b"!")
    assert "aborted x" in caplog.text
    assert desk.shelf.ids() == []
    assert desk.begin("y").nbytes == 1000


def test_a_destination_of_the_wrong_size_is_given_back() -> None:
    class Stingy(MemoryShelf):
        def destination(self, object_id: str, size_bytes: int) -> bytearray:
            return super().destination(object_id, size_bytes - 1)

    shelf = Stingy()
    reception = Reception(shelf, most_objects=1)
    for _ in range(2):
        with pytest.raises(ReplicaRefusedError, match="the destination of x has 999 bytes"):
            reception.begin("x", 1000, digest_of(CONTENT), 1)


@pytest.mark.parametrize(
    ("raised", "told"),
    [(CheckpointError("the tmpfs is full"), ReplicaBusyError), (ReplicaRefusedError("not today"), ReplicaRefusedError)],
)
def test_what_a_shelf_says_about_its_room_reaches_the_sender(raised: CheckpointError, told: type[Exception]) -> None:
    class Full(MemoryShelf):
        def destination(self, object_id: str, size_bytes: int) -> bytearray:
            raise raised

    with pytest.raises(told, match=str(raised)):
        Reception(Full(), most_objects=1).begin("x", 1000, digest_of(CONTENT), 1)


def test_a_memory_shelf_replaces() -> None:
    shelf = MemoryShelf()
    for content in (b"old", b"new!"):
        place = shelf.destination("x", len(content))
        assert place is not None
        place[:] = content
        shelf.received("x", digest_of(content))
    assert bytes(shelf.source("x") or b"") == b"new!"
    assert shelf.digest("x") == digest_of(b"new!")
    assert (shelf.ids(), shelf.source("y"), shelf.digest("y")) == (["x"], None, None)
