"""What a thread beside the training says over the c10d store of its group, on a connection of its own.

Rank 0 has the store in its process. When that process ends, the kernel closes the connections, and a request fails at
once. When its host loses its power or its network, nothing is closed, and torch waits for an answer without a bound
(the kernel gives up after some fifteen minutes).
"""

from __future__ import annotations

import atexit
import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar

from torchelastic.processes.sockets import SocketSet, connect_to

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

#: A store answers within milliseconds, on a thread that needs no interpreter.
ANSWER_S = 10.0
#: Who is just connecting tries it anew after a cut, until the time-out of the group's store.
_CUT_AGAIN_S = 0.2
#: For so long after a connection has ended no new one is tried: a rank 0 that was killed may still listen as its
#: connections end, and torch, which is refused a moment later, goes on trying for twice the time-out of the store.
_LOST_S = 1.0
#: For how long a process that ends waits for threads that it has just freed.
MAX_EXIT_S = 1.0


class OwnConnection:
    """A connection of one's own to a c10d store: on a shared one, a wait for a key holds all others up.

    Connects at the first use: where the names of addresses are looked up slowly, torch takes seconds for that, and
    forming a group must not. Used by one thread at a time. (No `cached_property` holds the connection: before Python
    3.12 those of all objects of a class share one lock, and one group would wait for another one's store.)

    Args:
        store: of a group.
        answer_s: a request that is not answered within so long fails, and the next one connects anew; None: it waits.
    """

    def __init__(self, store: Store, answer_s: float | None = ANSWER_S) -> None:
        self._of_group, self._answer_s = store, answer_s
        self._own: Store | None = None
        self._again_s = -math.inf
        self._is_over, self._is_idle = threading.Event(), threading.Event()
        self._is_idle.set()
        self._sockets = SocketSet(leads_to(store))
        _connections.add(self)

    def ask(self, what: Callable[[Store], T]) -> T:
        """What `what` returns, given the connection.

        Raises:
            RuntimeError: rank 0 is gone, or does not answer, or the connection was given up.
        """
        self._is_idle.clear()  # before the look at what `abort` sets before it looks at this
        try:
            if self._is_over.is_set():
                raise RuntimeError("its connection was aborted")
            with nullcontext() if self._answer_s is None else self._sockets.cutting_every(self._answer_s):
                if self._own is None:
                    self._own = self._connected()
                return what(self._own)
        except RuntimeError:
            if self._own is not None:
                self._again_s = time.monotonic() + _LOST_S
            self._own = None
            self._sockets.clear()
            raise
        finally:
            self._is_idle.set()

    def abort(self, timeout_s: float = math.inf) -> None:
        """Nothing is asked any more; frees who waits for an answer, and returns then. On a thread that may wait."""
        deadline_s = time.monotonic() + timeout_s
        self._is_over.set()
        while True:
            self._sockets.cut()
            if self._is_idle.wait(_CUT_AGAIN_S) or time.monotonic() > deadline_s:
                return

    def _connected(self) -> Store:
        self._is_over.wait(max(0.0, self._again_s - time.monotonic()))
        host, port = _address_of(self._of_group)
        if host is not None and port is not None:
            try:  # torch tries for 30 s, and nothing interrupts it
                connect_to((host, port), self._answer_s or ANSWER_S, self._is_over.is_set).close()
            except OSError as error:
                raise RuntimeError(f"{host}:{port} cannot be reached: {error.strerror or error}") from error
        clone = getattr(self._of_group, "clone", None)  # torch 2.7 and later
        with self._sockets.recording():
            return self._of_group if clone is None else clone()


def leads_to(store: Store) -> Callable[[socket.socket], bool]:
    """Tells whether a connection is one to this store, which it does not keep; what it returns raises OSError."""
    port = _address_of(store)[1]
    return lambda connection: bool(connection.getpeername()[1] == port)


def _address_of(store: Store) -> tuple[str | None, int | None]:
    """Where a store is; none where it is no TCPStore."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return getattr(store, "host", None), getattr(store, "port", None)


class StoreMailbox:
    """See `Mailbox`; keys of a c10d store under `note/`.

    Args:
        store: of this group alone.
        answer_s: see `OwnConnection`.
    """

    def __init__(self, store: Store, answer_s: float = ANSWER_S) -> None:
        self._store = OwnConnection(store, answer_s)

    def post(self, key: str, words: bytes) -> None:
        """See `Mailbox`."""
        self._store.ask(lambda store: store.set(f"note/{key}", words))  # type: ignore[arg-type]  # bytes are taken too

    def look(self, key: str) -> bytes | None:
        """See `Mailbox`."""
        full = f"note/{key}"
        return self._store.ask(lambda store: store.get(full) if store.check([full]) else None)

    def delete(self, key: str) -> None:
        """See `Mailbox`."""
        self._store.ask(lambda store: store.delete_key(f"note/{key}"))

    def end(self, grace_s: float) -> None:
        """See `Mailbox`."""
        timer = threading.Timer(grace_s, self._store.abort)
        timer.daemon = True
        timer.start()


#: Of this process.
_connections: weakref.WeakSet[OwnConnection] = weakref.WeakSet()


def _leave_no_thread_in_the_store() -> None:
    """At the end of the process: frees the threads that wait for a store, such as that of a host that fell silent.

    Python ends a thread that comes back to it from then on, in the middle of C++, which aborts the process (SIGABRT):
    a worker that has finished training would have failed. So it happens where rank 0 of an earlier group, whose host
    was cut off for a while, ends at the same time.
    """
    deadline_s = time.monotonic() + MAX_EXIT_S
    for connection in list(_connections):
        connection.abort(max(0.0, deadline_s - time.monotonic()))


os.register_at_fork(after_in_child=_connections.clear)  # a child must not cut what its parent uses
atexit.register(_leave_no_thread_in_the_store)
