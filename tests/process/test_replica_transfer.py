"""Objects from one shelf to another over real sockets: whole, in order, to a clean end, and by whom, and how much."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
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
from torchelastic.checkpoint.replicas.protocol import (
    PIECE_BYTES,
    PROTOCOL,
    ReplicaConnection,
    encode_header,
    greet_client,
    token_bytes,
)
from torchelastic.checkpoint.replicas.receive import digest_of
from torchelastic.checkpoint.replicas.replica_client import ReplicaClient
from torchelastic.checkpoint.replicas.replica_server import ReplicaServer
from torchelastic.checkpoint.replicas.replication_errors import (
    AuthenticationError,
    CorruptReplicaError,
    OutdatedRoundError,
    PeerLostError,
    PeerStalledError,
    ProtocolError,
    ReplicaRefusedError,
)


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


# --- who may ----------------------------------------------------------------------------------------------------------


def test_a_wrong_token_is_refused_and_nobody_prints_one(
    server: ReplicaServer, shelf: RecordingShelf, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = "a token of quite another run"
    with caplog.at_level(logging.DEBUG), Wire(server.address) as wire:
        client = client_of(wire, wrong)
        with pytest.raises(AuthenticationError, match="authentication failed: the client's token") as caught:
            client.push("x", content_of(1), token_round=1)
        client_of(wire).push("y", b"fine", token_round=1)
        passed = bytes(wire.seen["up"] + wire.seen["down"])
    assert shelf.ids() == ["y"]
    assert "closed a connection of" in caplog.text
    for token in (wrong, TOKEN):
        assert token not in caplog.text
        assert token not in str(caught.value) + repr(client) + repr(server)
        assert token.encode() not in passed


def test_an_impostor_gets_nothing(shelf: RecordingShelf) -> None:
    """Something that listens at a server's old address and says yes to everybody, without knowing the token."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        heard = []

        def impersonate() -> None:
            connection = ReplicaConnection(listener.accept()[0], "client", 5.0)
            connection.send({"protocol": PROTOCOL, "nonce": "0" * 32})
            answer = connection.receive()
            connection.send({"proof": str(answer["proof"])})  # its own proof, sent back
            try:
                heard.append(connection.receive())
            except PeerLostError:
                pass
            connection.close()

        thread = threading.Thread(target=impersonate)
        thread.start()
        client = ReplicaClient(listener.getsockname(), TOKEN, retry_s=0)
        with pytest.raises(AuthenticationError, match="does not know this run's token: it is not one of our servers"):
            client.push("x", b"secret", token_round=1)
        thread.join(10)
    assert heard == []


@pytest.mark.parametrize(
    "answers",
    [
        [{"is_here": 4}],
        [{"size": -3}],
        [{"size": 0}, {"digest": 3}],
        [{"ids": [1], "more": True}],
        [{"ids": "x"}],
    ],
)
def test_a_server_that_answers_nonsense_is_not_followed(answers: list[dict[str, object]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_once() -> None:
            connection = ReplicaConnection(listener.accept()[0], "client", 5.0)
            greet_client(connection, token_bytes(TOKEN))
            connection.receive()
            for answer in answers:
                connection.send(answer)
            connection.close()

        thread = threading.Thread(target=answer_once)
        thread.start()
        client = ReplicaClient(listener.getsockname(), TOKEN, retry_s=0)
        operations: dict[str, Callable[[], object]] = {
            "is_here": lambda: client.push("x", b"abc", token_round=1),
            "size": lambda: client.pull("x", bytearray),
            "ids": client.ids,
        }
        words = "no truth value as 'is_here'|no whole number as 'size'|no text as 'digest'|no list of ids"
        with pytest.raises(ProtocolError, match=words):
            next(operations[key] for key in operations if key in answers[0])()
        thread.join(10)


def test_an_older_round_is_refused(server: ReplicaServer, shelf: RecordingShelf) -> None:
    server.fence(5)
    server.fence(4)
    assert server.round == 5
    with pytest.raises(OutdatedRoundError, match="x comes from round 4, and round 5 has begun"):
        client_of(server).push("x", content_of(1), token_round=4)
    client_of(server).push("x", content_of(2), token_round=5)
    assert shelf.bytes_of("x") == content_of(2)


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_ids_are_checked_at_both_ends(server: ReplicaServer) -> None:
    with pytest.raises(ValueError, match="is no id of an object"):
        client_of(server).push("../etc/passwd", b"", token_round=1)
    with pytest.raises(ValueError, match="is no id of an object"):
        client_of(server).pull("", bytearray)


GARBAGE = {
    "noise": content_of(9, 5000),
    "a web browser": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + bytes(100),
    "a large claim": encode_header(60_000, 0),
    "nothing": b"",
}


@pytest.mark.parametrize("sent", GARBAGE.values(), ids=GARBAGE.keys())
def test_strangers_are_dropped(sent: bytes, shelf: RecordingShelf, caplog: pytest.LogCaptureFixture) -> None:
    with ReplicaServer(shelf, TOKEN, host="127.0.0.1", timeout_s=0.3) as server:
        with caplog.at_level(logging.INFO), socket.create_connection(server.address, 10) as stranger:
            stranger.sendall(sent)
            received = b""
            try:
                while data := stranger.recv(4096):
                    received += data
            except ConnectionResetError:
                pass  # what it sent was not even read
        assert len(received) < 200, "the greeting, and nothing else"
        client_of(server).push("x", b"fine", token_round=1)
    assert "closed a connection" in caplog.text or "stalled" in caplog.text


def test_strangers_cannot_fill_the_log(shelf: RecordingShelf, caplog: pytest.LogCaptureFixture) -> None:
    def come(address: tuple[str, int]) -> None:
        with socket.create_connection(address, 10) as stranger:
            stranger.sendall(GARBAGE["a web browser"])
            with suppress(ConnectionResetError):
                while stranger.recv(4096):
                    pass

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]

    with caplog.at_level(logging.INFO), ReplicaServer(shelf, TOKEN, host="127.0.0.1") as server:
        for _ in range(30):
            come(server.address)
        client_of(server).push("x", b"fine", token_round=1)
    assert [line.startswith("closed a connection of 127.0.0.1:") for line in lines()] == [True]
    assert shelf.ids() == ["x"]


@pytest.mark.parametrize("answer", [{"nonce": "\ud800", "proof": ""}, {"nonce": "0" * 32}, {"proof": 1}, {}])
def test_broken_greetings_are_dropped(
    answer: dict[str, object], server: ReplicaServer, caplog: pytest.LogCaptureFixture
) -> None:
    connection = ReplicaConnection(socket.create_connection(server.address, 10), "server", 10.0)
    assert connection.receive()["protocol"] == PROTOCOL
    connection.send(answer)
    with pytest.raises(PeerLostError):
        connection.receive()
    connection.close()
    assert "closed a connection of" in caplog.text
    assert "Traceback" not in caplog.text


def test_who_sends_drop_by_drop_is_dropped_too(shelf: RecordingShelf) -> None:
    with ReplicaServer(shelf, TOKEN, host="127.0.0.1", timeout_s=0.3) as server:
        with socket.create_connection(server.address, 10) as stranger:

            def send_drops() -> None:
                for byte in encode_header(1000, 0) + bytes(1000):
                    stranger.sendall(bytes([byte]))
                    threading.Event().wait(0.02)  # it is slow, that is what it does

            with pytest.raises(OSError, match=r"reset|Broken pipe"):
                send_drops()
        client_of(server).push("x", b"fine", token_round=1)


def test_too_many_connections_are_closed_at_once(shelf: RecordingShelf) -> None:
    with ReplicaServer(shelf, TOKEN, host="127.0.0.1", max_connections=2) as server:
        idle = [socket.create_connection(server.address, 10) for _ in range(2)]
        assert all(one.recv(1) for one in idle)  # both are greeted
        with socket.create_connection(server.address, 10) as third:
            assert third.recv(1) == b""
        for one in idle:
            one.close()
        client_of(server).push("x", b"fine", token_round=1)
        assert shelf.ids() == ["x"]


def test_a_member_that_asks_nonsense_is_told(server: ReplicaServer) -> None:
    client = client_of(server)
    requests: list[dict[str, object]] = [
        {"op": "format the disk"},
        {"op": "push", "id": "../x", "size": 1, "digest": "", "round": 1},
    ]
    for request in requests:
        with client._connected() as connection:
            connection.send(request)
            with pytest.raises(ReplicaRefusedError, match=r"knows push, pull and list only|no id of an object"):
                connection.receive()
    with client._connected() as connection:
        connection.send({"op": "push", "id": "x", "size": -1, "digest": "", "round": 1})
        with pytest.raises(ProtocolError, match="sent no whole number as 'size'"):
            connection.receive()
