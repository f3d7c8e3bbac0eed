"""Objects from one shelf to another over real sockets: whole, in order, and to a clean end."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.process.replicas import (
    SIZE_BYTES,
    TOKEN,
    RecordingShelf,
    Wire,
    between_pieces,
    client_of,
    content_of,
)
from tests.waiting import wait_until
from torchelastic.checkpoint.replication.errors import (
    CorruptReplicaError,
    PeerLostError,
    PeerStalledError,
    ProtocolError,
)
from torchelastic.checkpoint.replication.protocol import PIECE_BYTES
from torchelastic.checkpoint.replication.receive import digest_of
from torchelastic.checkpoint.replication.server import ReplicaServer


@pytest.fixture
def shelf() -> RecordingShelf:
    return RecordingShelf()


@pytest.fixture
def server(shelf: RecordingShelf) -> Iterator[ReplicaServer]:
    with ReplicaServer(shelf, TOKEN, host="127.0.0.1", timeout_s=5.0) as server:
        yield server


# --- there and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, SIZE_BYTES])
def test_an_object_goes_there_and_comes_back(server: ReplicaServer, shelf: RecordingShelf, size_bytes: int) -> None:
    content, client, back = content_of(1, size_bytes), client_of(server), bytearray(size_bytes)
    sent = client.push("iter_7/rank_0", content, token_round=1)
    assert (sent.size_bytes, sent.sent_bytes, sent.digest) == (size_bytes, size_bytes, digest_of(content))
    assert shelf.bytes_of("iter_7/rank_0") == content
    pulled = client.pull("iter_7/rank_0", lambda _: back)
    assert back == content
    assert (pulled.size_bytes, pulled.digest) == (size_bytes, sent.digest)


def test_a_part_of_an_object_can_be_fetched(server: ReplicaServer) -> None:
    content, client = content_of(1), client_of(server)
    client.push("x", content, token_round=1)
    parts = [(0, 64), (SIZE_BYTES // 2, SIZE_BYTES - 1), (SIZE_BYTES - 3, SIZE_BYTES + 9)]
    assert client.read("x", parts) == b"".join(content[begin:end] for begin, end in parts)
    assert client.read("x", [(SIZE_BYTES, SIZE_BYTES + 9)]) == b""
    strange: list[Any] = [[(0, 2**40)], [(0, SIZE_BYTES)] * 2, [(-5, 3)]]
    for wrong in strange:
        with pytest.raises(ProtocolError, match="asked for"):
            client.read("x", wrong)


def test_what_is_there_already_does_not_travel_again(server: ReplicaServer) -> None:
    with Wire(server.address) as wire:
        client = client_of(wire)
        assert client.push("x", content_of(1), token_round=1).sent_bytes == SIZE_BYTES
        assert len(wire.seen["up"]) > SIZE_BYTES
        assert client.push("x", content_of(1), token_round=1).sent_bytes == 0
        assert len(wire.seen["up"]) < SIZE_BYTES + 10_000


def test_new_content_replaces_the_old_one_at_once(server: ReplicaServer, shelf: RecordingShelf) -> None:
    client_of(server).push("x", content_of(1), token_round=1)
    seen = set()
    with between_pieces(lambda: seen.add(shelf.bytes_of("x"))):
        client_of(server).push("x", content_of(2), token_round=1)
    assert seen == {content_of(1)}
    assert shelf.bytes_of("x") == content_of(2)


def test_lists_longer_than_a_message_come_in_pages(server: ReplicaServer, shelf: RecordingShelf) -> None:
    assert client_of(server).ids() == []
    names = [f"{number:04}{'x' * 100}" for number in range(1500)]
    for name in names:
        shelf.put(name, b"", digest_of(b""))
    with Wire(server.address) as wire:
        assert client_of(wire).ids() == names
        assert wire.connections == 3


def test_nothing_but_the_strategies_and_the_manager_loads_torch() -> None:
    code = (
        "import sys, torchelastic.checkpoint.replication as room\n"
        "for name in room.__all__:\n"
        "    if 'Strategy' not in name and name not in ('GroupWrapper', 'ReplicationManager'): getattr(room, name)\n"
        "assert set(room.__all__) <= set(dir(room))\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# --- ends -------------------------------------------------------------------------------------------------------------


def test_nobody_listens(server: ReplicaServer) -> None:
    server.close()
    with pytest.raises(PeerLostError, match=f"127.0.0.1:{server.address[1]} cannot be reached: Connection refused"):
        client_of(server, retry_s=0.2).push("x", b"", token_round=1)


def test_closing_cuts_what_is_on_its_way_and_leaves_no_thread(shelf: RecordingShelf) -> None:
    server = ReplicaServer(shelf, TOKEN, host="127.0.0.1")
    server.start()
    with between_pieces(server.close), pytest.raises((PeerLostError, PeerStalledError)):
        client_of(server, retry_s=0).push("x", content_of(1), token_round=1)
    assert shelf.ids() == []
    assert shelf.abandoned == ["x"]
    wait_until(
        lambda: not [t for t in threading.enumerate() if t.name.startswith("replica-")], what="its threads have ended"
    )


def test_content_that_changes_while_it_is_sent_is_not_published(server: ReplicaServer, shelf: RecordingShelf) -> None:
    content = bytearray(content_of(1))
    words = r"x changed while it was sent to .*; send a copy that nobody writes"
    with between_pieces(lambda: content.__setitem__(-1, 0)), pytest.raises(CorruptReplicaError, match=words):
        client_of(server).push("x", content, token_round=1)
    assert shelf.ids() == []
    wait_until(lambda: shelf.abandoned == ["x"], what="it is given back")
