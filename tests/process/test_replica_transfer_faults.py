"""Processes that are killed or stopped, and networks that flip bits, in the middle of a transfer."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.process.replicas import (
    PATIENCE_S,
    PUSHES_SLOWLY,
    SERVES_SLOWLY,
    SIZE_BYTES,
    SMALL_PIECE_BYTES,
    TOKEN,
    RecordingShelf,
    Wire,
    client_of,
    content_of,
    end,
    start,
)
from tests.waiting import pause, wait_until
from torchelastic.checkpoint.engine.group_folders import first_good_copy
from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.checkpoint.replicas.receive import digest_of
from torchelastic.checkpoint.replicas.replica_client import ReplicaClient, Transferred
from torchelastic.checkpoint.replicas.replica_server import ReplicaServer
from torchelastic.checkpoint.replicas.replication_errors import CorruptReplicaError, PeerLostError, PeerStalledError
from torchelastic.checkpoint.replication import ReplicationError
from torchelastic.checkpoint.store.restore_plan import ShardSource


@contextmanager
def running(program: str, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    child = start(program, *arguments)
    try:
        yield child
    finally:
        end(child)


@contextmanager
def holder(content: bytes, digest: str | None = None) -> Iterator[ReplicaServer]:
    shelf = RecordingShelf()
    shelf.put("x", content, digest_of(content) if digest is None else digest)
    with ReplicaServer(shelf, TOKEN, host="127.0.0.1", timeout_s=5.0) as server:
        yield server


def has_begun(shelf: RecordingShelf) -> bool:
    """Whether some pieces have arrived: the destination was all zeros."""
    return "x" in shelf.places and any(shelf.places["x"][2 * SMALL_PIECE_BYTES : 2 * SMALL_PIECE_BYTES + 100])


def port_of(child: subprocess.Popen[bytes]) -> int:
    assert child.stdout is not None
    return int(child.stdout.readline())


# --- killed -----------------------------------------------------------------------------------------------------------


def test_what_a_killed_sender_has_begun_is_given_back_and_may_come_from_another() -> None:
    shelf = RecordingShelf()
    with ReplicaServer(shelf, TOKEN, host="127.0.0.1") as server:
        with running(PUSHES_SLOWLY, server.address[1]) as sender:
            wait_until(lambda: has_begun(shelf), what="some pieces have arrived")
            assert shelf.ids() == []
            sender.send_signal(signal.SIGKILL)
            assert sender.wait(PATIENCE_S) == -signal.SIGKILL
        wait_until(lambda: shelf.abandoned == ["x"], what="the destination is given back")
        assert shelf.ids() == []
        client_of(server).push("x", content_of(1), token_round=2)
        assert shelf.bytes_of("x") == content_of(1)


def from_either(first: ReplicaClient, second: ReplicaClient, back: bytearray) -> Transferred:
    """As whoever restores asks them."""
    clients = [first, second]
    return first_good_copy(
        "x", [ShardSource(0), ShardSource(1)], lambda one: clients[one.rank].pull("x", lambda _: back)
    )


# --- stopped ----------------------------------------------------------------------------------------------------------


def test_a_stopped_receiver_is_named() -> None:
    with running(SERVES_SLOWLY) as receiver:
        port = port_of(receiver)
        client = ReplicaClient(("127.0.0.1", port), TOKEN, timeout_s=0.5)
        pause([receiver.pid])
        with pytest.raises(
            PeerStalledError, match=rf"127.0.0.1:{port} stalled: .* after 0.5 s; its process is stopped"
        ):
            client.push("y", content_of(2), token_round=1)
        receiver.send_signal(signal.SIGCONT)
        assert client.push("y", content_of(2), token_round=1).size_bytes == SIZE_BYTES


def test_nobody_waits_for_a_receiver_of_a_group_that_has_ended() -> None:
    with running(SERVES_SLOWLY) as receiver:
        client = ReplicaClient(("127.0.0.1", port_of(receiver)), TOKEN, timeout_s=600.0, retry_s=600.0)
        pause([receiver.pid])
        began_s = time.monotonic()
        client.end(0.2)
        with pytest.raises(PeerLostError):
            client.push("y", content_of(2), token_round=1)
        assert time.monotonic() - began_s < PATIENCE_S
        with pytest.raises(PeerLostError):
            client.ids()
        receiver.send_signal(signal.SIGCONT)


def test_a_sender_that_stops_blocks_nobody_for_long() -> None:
    shelf = RecordingShelf()
    with (
        ReplicaServer(shelf, TOKEN, host="127.0.0.1", max_transfers=1, timeout_s=1.0) as server,
        running(PUSHES_SLOWLY, server.address[1]) as sender,
    ):
        wait_until(lambda: has_begun(shelf), what="some pieces have arrived")
        pause([sender.pid])
        client_of(server, retry_s=PATIENCE_S).push("y", content_of(2), token_round=1)
        assert shelf.ids() == ["y"]
        client_of(server).push("x", content_of(1), token_round=1)
    assert shelf.bytes_of("x") == content_of(1)


# --- damaged on the way -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [100, 250, 330, 400, 5000, 2_900_000])
def test_one_flipped_bit_on_the_way_there(position: int) -> None:
    """The first positions lie in the greeting and the request; the others in the object."""
    shelf = RecordingShelf()
    with (
        ReplicaServer(shelf, TOKEN, host="127.0.0.1", timeout_s=5.0) as server,
        Wire(server.address, (position,)) as wire,
    ):
        client = client_of(wire)
        try:
            client.push("x", content_of(1), token_round=1)
        except ReplicationError:
            assert position < 450, "a damaged object is sent again"
            assert shelf.ids() == []
            client.push("x", content_of(1), token_round=1)
    assert shelf.bytes_of("x") == content_of(1)


@pytest.mark.parametrize("position", [100, 300, 420, 2_900_000])
def test_one_flipped_bit_on_the_way_back(position: int) -> None:
    back = bytearray(SIZE_BYTES)
    with holder(content_of(1)) as server, Wire(server.address, (position,), direction="down") as wire:
        client = client_of(wire)
        try:
            client.pull("x", lambda _: back)
        except ReplicationError:
            assert position < 450, "a damaged object is fetched again"
            client.pull("x", lambda _: back)
        assert wire.connections == 2
    assert back == content_of(1)


# --- damaged where it lies --------------------------------------------------------------------------------------------


def test_a_replica_that_went_bad_is_replaced_by_the_next() -> None:
    back = bytearray(SIZE_BYTES)
    whole = content_of(1)
    bad = whole[:2_000_000] + bytes([whole[2_000_000] ^ 1]) + whole[2_000_001:]
    with holder(bad, digest_of(whole)) as first, holder(whole) as second:
        with pytest.raises(CorruptReplicaError, match=r"x is not what was received here: take another replica"):
            client_of(first).pull("x", lambda _: back)
        pulled = from_either(client_of(first), client_of(second), back)
        assert back == whole
        assert pulled.digest == digest_of(whole)
        with pytest.raises(CorruptCheckpointError, match=r"no good copy of x is left .*not what was received here"):
            from_either(client_of(first), client_of(first), back)
