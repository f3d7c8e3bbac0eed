"""Which TCP connections belong to a process group, and how to cut exactly those.

No official call frees a rank that waits for a stopped or cut-off peer in a gloo collective (seen with torch 2.13: it
waits for the whole time-out). Shutting down the group's connected sockets does. Listening sockets must be left alone:
gloo ends the process when one of its is shut. A connection is identified by descriptor and inode, so that a
descriptor that was closed and given to somebody else meanwhile is never touched. Linux only (/proc).
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

#: One attempt to connect; the kernel too asks again after a second.
_CONNECT_S = 1.0


@dataclass(frozen=True)
class SocketId:
    """One open socket of this process."""

    descriptor: int
    inode: int


def open_sockets() -> frozenset[SocketId]:
    """All sockets that this process has open."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            link = str(entry.readlink())
        except OSError:
            continue  # closed since the folder was read
        if link.startswith("socket:["):
            found.add(SocketId(int(entry.name), int(link[8:-1])))
    return frozenset(found)


class SocketSet:
    """The connections that were opened while a recording ran. Thread-safe.

    Args:
        is_ours: tells a connection of the set from one that another thread of this process happened to open at the same
            moment, which is left alone; may raise OSError.
    """

    def __init__(self, is_ours: Callable[[socket.socket], bool] = lambda _connection: True) -> None:
        self._is_ours = is_ours
        self._lock = threading.Lock()
        self._recorded: set[SocketId] = set()
        self._pictures: list[frozenset[SocketId]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Count every connection that is opened inside as one of the set. `cut` meanwhile cuts what is open so far."""
        before = open_sockets()
        with self._lock:
            self._pictures.append(before)
        try:
            yield
        finally:
            new = open_sockets() - before
            with self._lock:
                self._pictures.remove(before)
                self._recorded |= new

    def clear(self) -> None:
        """Forget all: the connections are closed, or nobody's business any more."""
        with self._lock:
            self._recorded.clear()

    def cut(self) -> int:
        """Shut both directions of every connection of the set; returns how many there were. From any thread."""
        with self._lock:
            targets = set(self._recorded)
            pictures = list(self._pictures)
        for before in pictures:
            targets |= open_sockets() - before
        return sum(_do(target, self._shut) for target in targets)

    def cut_all(self) -> int:
        """The same for all connections of the process that are the set's kind, whoever has opened them, and when."""
        return sum(_do(target, self._shut) for target in open_sockets())

    @contextmanager
    def cutting_every(self, interval_s: float, on_cut: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Cut whatever is open after so long inside, again and again: who connects tries it anew for a while.

        Args:
            interval_s: how long what is done inside may take.
            on_cut: is told, on another thread, when there was something to cut.
        """
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(interval_s):
                if self.cut():
                    on_cut()

        threading.Thread(target=watch, name="torchelastic-store-watch", daemon=True).start()
        try:
            yield
        finally:
            is_over.set()

    def __len__(self) -> int:
        """How many connections of ended recordings are open."""
        with self._lock:
            recorded = set(self._recorded)
        return sum(_do(target, self._is_ours) for target in recorded)

    def _shut(self, connection: socket.socket) -> bool:
        if not self._is_ours(connection):
            return False
        connection.shutdown(socket.SHUT_RDWR)
        return True


def _do(target: SocketId, what: Callable[[socket.socket], bool]) -> bool:
    """Do something with a connection; returns what comes of it. False: it is not what it was, or is none.

    It is given a duplicate, so that nobody can swap the connection meanwhile.
    """
    try:
        descriptor = os.dup(target.descriptor)
    except OSError:
        return False
    found = os.fstat(descriptor)
    if not stat.S_ISSOCK(found.st_mode) or found.st_ino != target.inode:
        os.close(descriptor)  # another thread has been given its number meanwhile, for a file perhaps
        return False
    with socket.socket(fileno=descriptor) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            return False
        try:
            connection.getpeername()  # raises for a listening socket, which must not be shut
            return what(connection)
        except OSError:
            return False


def connect_to(address: tuple[str, int], timeout_s: float, is_over: Callable[[], bool]) -> socket.socket:
    """A new TCP connection. A host without power or network does not refuse one: it says nothing.

    Args:
        address: host and port.
        timeout_s: how long to try.
        is_over: asked every second; when it says so, it is not tried any longer.

    Raises:
        TimeoutError: there was no answer for so long.
        ConnectionAbortedError: it was over before.
        OSError: it cannot be reached, or refuses.
    """
    left_s = timeout_s
    while not is_over():
        try:
            return socket.create_connection(address, min(left_s, _CONNECT_S))
        except TimeoutError as error:
            left_s -= _CONNECT_S
            if left_s <= 0:
                raise TimeoutError(f"no answer for {timeout_s:g} s") from error
    raise ConnectionAbortedError("it is not waited for any longer")


def waits_are_bounded(connection: socket.socket) -> bool:
    """Whether the kernel bounds each wait for it, in both directions.

    gloo has it do so for all of its connections, with the time-out of their group, and hardly anybody else does: Python
    and gRPC wait without blocking, torch's TCPStore without a bound.
    """
    sides = (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO)
    return all(any(connection.getsockopt(socket.SOL_SOCKET, side, 2 * struct.calcsize("l"))) for side in sides)
