"""What counts as received, and what a server takes from whom: without sockets."""

from __future__ import annotations

import logging
import random

import pytest
import xxhash

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.replication import (
    CorruptReplicaError,
    DamagedFrameError,
    MemoryShelf,
    OutdatedRoundError,
    ReplicaBusyError,
    ReplicaRefusedError,
)
from torchelastic.checkpoint.replication.receive import IncomingObject, Reception, digest_of

# --- an object on its way ---------------------------------------------------------------------------------------------

CONTENT = random.Random(3).randbytes(1000)


def feed(incoming: IncomingObject, content: bytes, upto: int, step: int = 100) -> None:
    for start in range(incoming.verified_bytes, upto, step):
        place = incoming.place(step)
        place[:] = content[start : start + step]
        incoming.accept(place, xxhash.xxh3_64_intdigest(content[: start + step]))


def announced(content: bytes = CONTENT) -> tuple[IncomingObject, bytearray]:
    buffer = bytearray(len(content))
    incoming = IncomingObject("x", lambda _: buffer)
    incoming.announce(len(content), digest_of(content))
    return incoming, buffer


def test_an_object_arrives_chunk_by_chunk() -> None:
    incoming, buffer = announced()
    feed(incoming, CONTENT, 900)
    assert not incoming.is_complete
    feed(incoming, CONTENT, 1000)
    incoming.finish()
    assert incoming.is_complete
    assert buffer == CONTENT


def test_a_damaged_chunk_counts_for_nothing_and_may_come_again() -> None:
    incoming, buffer = announced()
    feed(incoming, CONTENT, 300)
    place = incoming.place(100)
    place[:] = bytes(100)
    with pytest.raises(DamagedFrameError, match="x: the 100 bytes at 300 of 1000"):
        incoming.accept(place, xxhash.xxh3_64_intdigest(CONTENT[:400]))
    assert incoming.verified_bytes == 300
    feed(incoming, CONTENT, 1000)
    incoming.finish()
    assert buffer == CONTENT


def test_what_was_damaged_at_its_source_is_not_delivered() -> None:
    incoming, _ = announced()
    feed(incoming, CONTENT[:-1] + b"!", 1000)
    with pytest.raises(CorruptReplicaError, match="it is damaged where it came from; take another replica"):
        incoming.finish()


def test_another_content_starts_anew_in_the_same_place() -> None:
    incoming, buffer = announced()
    feed(incoming, CONTENT, 500)
    other = CONTENT[::-1]
    incoming.announce(1000, digest_of(other))
    assert incoming.verified_bytes == 0
    feed(incoming, other, 1000)
    incoming.finish()
    assert buffer == other
    with pytest.raises(ReplicaRefusedError, match="999 bytes here and 1000 elsewhere"):
        incoming.announce(999, digest_of(other))


def test_chunks_stay_within_the_object() -> None:
    incoming, _ = announced()
    feed(incoming, CONTENT, 950, step=50)
    for length in (0, 51):
        with pytest.raises(ReplicaRefusedError, match=f"a chunk of {length} bytes at 950 of 1000"):
            incoming.place(length)


@pytest.mark.parametrize("buffer", [bytearray(9), memoryview(bytes(10)), memoryview(bytearray(20))[::2]])
def test_destinations_that_cannot_be_filled(buffer: bytearray | memoryview) -> None:
    with pytest.raises(ReplicaRefusedError, match="contiguous one of 10 bytes is needed"):
        IncomingObject("x", lambda _: buffer).announce(10, "")


# --- what a server takes ----------------------------------------------------------------------------------------------


class Desk:
    """A reception and its shelf."""

    def __init__(self, capacity_bytes: int = 3000, most_objects: int = 2) -> None:
        self.shelf = MemoryShelf(capacity_bytes)
        self.reception = Reception(self.shelf, most_objects=most_objects)

    def begin(self, object_id: str, content: bytes = CONTENT, round_number: int = 1) -> IncomingObject:
        incoming = self.reception.begin(object_id, len(content), digest_of(content), round_number)
        assert incoming is not None
        return incoming


def test_nothing_is_visible_before_it_is_complete() -> None:
    desk = Desk()
    incoming = desk.begin("x")
    feed(incoming, CONTENT, 1000)
    assert desk.shelf.ids() == []
    desk.reception.complete(incoming, 1)
    assert desk.shelf.ids() == ["x"]
    assert bytes(desk.shelf.source("x") or b"") == CONTENT
    assert desk.reception.begin("x", 1000, digest_of(CONTENT), 1) is None


def test_what_broke_off_is_given_back_at_once() -> None:
    desk = Desk(capacity_bytes=1000)
    incoming = desk.begin("x")
    feed(incoming, CONTENT, 400)
    desk.reception.abandon(incoming)
    assert desk.shelf.ids() == []
    assert desk.begin("y").verified_bytes == 0


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
    incoming = desk.begin("x", round_number=4)
    feed(incoming, CONTENT, 1000)
    desk.reception.fence(5)
    desk.reception.fence(3)
    with pytest.raises(OutdatedRoundError, match="x comes from round 4, and round 5 has begun"):
        desk.reception.complete(incoming, 4)
    with pytest.raises(OutdatedRoundError, match="its sender was replaced and must stop"):
        desk.begin("x", round_number=4)
    assert desk.shelf.ids() == []
    assert desk.begin("x", round_number=5).verified_bytes == 0


def test_a_damaged_object_is_abandoned(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(capacity_bytes=1000)
    incoming = desk.begin("x")
    feed(incoming, CONTENT[:-1] + b"!", 1000)
    with caplog.at_level(logging.INFO), pytest.raises(CorruptReplicaError):
        desk.reception.complete(incoming, 1)
    assert "abandoned x" in caplog.text
    assert desk.begin("y").size_bytes == 1000


def test_a_destination_of_the_wrong_size_is_given_back() -> None:
    class Stingy(MemoryShelf):
        def destination(self, object_id: str, size_bytes: int) -> bytearray:
            return super().destination(object_id, size_bytes - 1)

    shelf = Stingy(1000)
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
        Reception(Full(1000), most_objects=1).begin("x", 1000, digest_of(CONTENT), 1)


def test_a_memory_shelf_replaces_and_removes() -> None:
    shelf = MemoryShelf(100)
    for content in (b"old", b"new!"):
        place = shelf.destination("x", len(content))
        assert place is not None
        place[:] = content
        shelf.received("x", digest_of(content))
    assert bytes(shelf.source("x") or b"") == b"new!"
    assert shelf.digest("x") == digest_of(b"new!")
    shelf.remove("x")
    assert (shelf.ids(), shelf.source("x"), shelf.digest("x")) == ([], None, None)
