"""What a server takes from whom: without sockets."""

from __future__ import annotations

import logging
import random

import pytest

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.replication.errors import (
    DamagedFrameError,
    OutdatedRoundError,
    ReplicaBusyError,
    ReplicaRefusedError,
)
from torchelastic.checkpoint.replication.receive import MemoryShelf, Reception, digest_of

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
    assert "abandoned x" in caplog.text
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
