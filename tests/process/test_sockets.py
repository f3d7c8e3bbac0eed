"""Cutting the connections of a group: exactly those, at once, and never somebody else's."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from torchelastic.processes.sockets import SocketSet, connect_to


def connected_pair() -> tuple[socket.socket, socket.socket, socket.socket]:
    """A listening socket, and both ends of a TCP connection through it."""
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    return listener, client, server


def is_cut(connection: socket.socket) -> bool:
    connection.settimeout(1.0)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def test_what_was_opened_while_recording_is_cut_and_the_peer_sees_it() -> None:
    group = SocketSet()
    with group.recording():
        listener, client, server = connected_pair()
    assert group.cut() == 2
    assert is_cut(client)
    assert is_cut(server)
    for end in (listener, client, server):
        end.close()


def test_a_listening_socket_is_left_alone() -> None:
    group = SocketSet()
    with group.recording():
        listener = socket.create_server(("127.0.0.1", 0))
    assert group.cut() == 0
    with socket.create_connection(listener.getsockname()) as client:
        listener.accept()[0].close()
        assert client.fileno() >= 0
    listener.close()


def test_clients_of_a_server_in_this_process_are_left_alone() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    group = SocketSet(is_ours=lambda connection: connection.getsockname()[1] != port)
    with group.recording():
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    assert group.cut() == 1, "the client's end is a connection of the group, the server's is not"
    for end in (listener, client, server):
        end.close()


def test_what_another_thread_opened_meanwhile_is_left_alone_also_after_the_groups_own_were_closed() -> None:
    group = SocketSet(is_ours=lambda connection: bool(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
    with group.recording():
        ours, others = connected_pair(), connected_pair()
        for end in ours[1:]:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    assert len(group) == 2
    assert group.cut() == 2
    assert is_cut(ours[1])
    for end in ours:
        end.close()
    assert group.cut() == 0
    others[1].sendall(b"x")
    assert others[2].recv(1) == b"x"
    for end in others:
        end.close()


def test_cutting_while_the_group_is_being_made_cuts_what_is_there_so_far() -> None:
    group = SocketSet()
    with group.recording():
        listener, client, server = connected_pair()
        assert group.cut() == 2
    assert is_cut(client)
    for end in (listener, client, server):
        end.close()


def test_a_descriptor_that_is_a_file_by_now_is_left_alone_and_nothing_stays_open(tmp_path: Path) -> None:
    group = SocketSet()
    with group.recording():
        listener, client, server = connected_pair()
    path = tmp_path / "file"
    path.write_bytes(b"x")
    number = client.detach()
    with path.open("rb") as file:
        os.dup2(file.fileno(), number)
    before = set(Path("/proc/self/fd").iterdir())  # other threads of this process may close some meanwhile
    assert group.cut() == 1, "the other end"
    assert set(Path("/proc/self/fd").iterdir()) <= before
    assert os.pread(number, 1, 0) == b"x"
    os.close(number)
    server.close()
    listener.close()


@contextmanager
def silent_host() -> Iterator[tuple[str, int]]:
    """An address that does not answer whoever connects: the kernel drops what a full queue has no room for."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        while True:
            waiting = stack.enter_context(socket.socket())
            waiting.settimeout(0.2)
            try:
                waiting.connect(listener.getsockname())
            except TimeoutError:
                break
        yield listener.getsockname()


def test_a_host_that_says_nothing_is_given_up_after_the_time() -> None:
    with silent_host() as address:
        began_s = time.monotonic()
        with pytest.raises(TimeoutError, match=r"no answer for 1.5 s"):
            connect_to(address, 1.5, lambda: False)
        assert 1.4 < time.monotonic() - began_s < 10.0


def test_a_host_that_says_nothing_is_given_up_soon_after_nobody_needs_it() -> None:
    with silent_host() as address:
        began_s = time.monotonic()
        with pytest.raises(ConnectionAbortedError):
            connect_to(address, 600.0, lambda: time.monotonic() > began_s + 0.2)
        assert time.monotonic() - began_s < 10.0


def test_a_host_that_answers_is_connected_to_and_one_that_refuses_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with connect_to(address, 5.0, lambda: False) as connection:
            assert connection.getpeername() == address
    with pytest.raises(ConnectionRefusedError):
        connect_to(address, 5.0, lambda: False)
