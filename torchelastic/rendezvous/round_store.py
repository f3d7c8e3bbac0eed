"""The store of a round: rank 0 serves it, and each member opens a connection of its own to it.

Who becomes rank 0 is known only with the round, so every worker listens before it asks for one. By the time that the
others come, rank 0 may have ended (they are refused), its host may be gone (they wait for each attempt), or it is
stopped: then the kernel takes their connection, and torch waits for the first answer on it without a bound.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torchelastic.processes.sockets import SocketSet
from torchelastic.rendezvous.records import Round
from torchelastic.rendezvous.worker_rules import is_replaced

if TYPE_CHECKING:
    from torchelastic.torch_internals.c10d_types import TCPStore

#: How long rank 0's host may take to be reached once the round is known, and its store to answer later requests.
TIMEOUT_S = 30.0
#: Between two attempts it is asked whether the round is still the current one.
ATTEMPT_S = 1.0
#: Rank 0's store answers on a thread that needs no interpreter: one that is silent for so long is stopped.
SILENT_S = 3.0
#: So many connections may wait to be accepted by it: all members of a round come at the same moment.
BACKLOG = 16384


class StoreSilentError(RuntimeError):
    """Rank 0's host took the connection to the round's store, and nothing was answered on it for `SILENT_S` seconds."""


class RoundStore:
    """This worker's ends of the stores of its rounds: the one that it serves, and its connection to the present one's.

    `connect` and `listen` are called on the training thread; the others from any.
    """

    def __init__(self) -> None:
        self._served: TCPStore | None = None
        self._port = 0
        self._sockets = SocketSet(self._leads_to_the_store)
        self._connecting: Round | None = None

    def listen(self, address: str) -> str:
        """Serve a store at this address of this host, from the first call on; returns HOST:PORT."""
        from torchelastic.torch_internals.c10d_types import TCPStore

        if self._served is None:
            # by itself it would listen on all addresses of this host, and it asks nobody for a password
            family, _, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(where, family=family, backlog=BACKLOG)
            port = listener.getsockname()[1]
            descriptor = listener.detach()  # the store closes it
            how: dict[str, Any] = {"wait_for_workers": False, "master_listen_fd": descriptor}
            try:
                self._served = TCPStore(address, port, None, True, **how)
            except NotImplementedError:  # of torch 2.6, whose default kind of server takes no open socket
                self._served = TCPStore(address, port, None, True, use_libuv=False, **how)
        return f"{address}:{self._served.port}"

    def serves_port(self, port: int) -> bool:
        """Whether the store that this process serves listens there."""
        return self._served is not None and self._served.port == port

    def connect(self, round_: Round, present: Callable[[], Round]) -> TCPStore:
        """Open the connection to the store of a round, in short attempts.

        A connection of its own for each round, also on rank 0: cutting it wakes whoever waits for a key of a dead peer.

        Args:
            round_: the round that this worker has joined.
            present: the newest round that is known.

        Raises:
            StoreSilentError: rank 0 is stopped, as it seems.
            RuntimeError: the round is no more, or the store was not reached in `TIMEOUT_S`.
        """
        self._port = int(round_.store_address.rsplit(":", 1)[1])
        self._connecting, began_s = round_, time.monotonic()
        try:
            while True:
                try:
                    return self._attempt(round_)
                except StoreSilentError:
                    raise
                except RuntimeError as error:
                    now, tried_s = present(), time.monotonic() - began_s
                    if now.number != round_.number or is_replaced(round_, now) or tried_s > TIMEOUT_S:
                        raise RuntimeError(_unreached(round_, tried_s, now.because)) from error
        finally:
            self._connecting = None

    def sees(self, round_: Round) -> None:
        """The newest round is this one: who still connects to the store of one that is no more gives that up."""
        if self._connecting is not None and is_replaced(self._connecting, round_):
            self.interrupt()

    def interrupt(self) -> None:
        """Make whoever connects to the present round's store, or waits for a key of it, fail at once."""
        self._sockets.cut()

    def _attempt(self, round_: Round) -> TCPStore:
        from torchelastic.torch_internals.c10d_types import TCPStore

        host = round_.store_address.rsplit(":", 1)[0]
        self._sockets.clear()
        was_silent = threading.Event()
        try:
            with self._sockets.recording(), self._sockets.cutting_every(SILENT_S, was_silent.set):
                store = TCPStore(host, self._port, None, False, timedelta(seconds=ATTEMPT_S), wait_for_workers=False)
        except RuntimeError as error:
            if not was_silent.is_set():
                raise
            raise StoreSilentError(
                f"the store of round {round_.number} at {round_.store_address} took the connection and was silent for "
                f"{SILENT_S:g} s: rank 0, which serves it, is stopped, or its host is overloaded"
            ) from error
        store.set_timeout(timedelta(seconds=TIMEOUT_S))
        return store

    def _leads_to_the_store(self, connection: socket.socket) -> bool:
        """Whether a connection is one to the present round's store; raises OSError."""
        return int(connection.getpeername()[1]) == self._port


def _unreached(round_: Round, tried_s: float, because: str) -> str:
    """Why there is no connection to rank 0's store; a long try means that it is not rank 0 that has ended."""
    text = f"the store of round {round_.number} at {round_.store_address} was not reached within {tried_s:.1f} s"
    if tried_s < 5 * ATTEMPT_S:
        return f"{text}: {because}"
    return (
        f"{text}: if rank 0's host is up, a firewall is between it and this one, or they meet over the wrong network: "
        f"choose one with `torchelastic run --iface` ({because})"
    )
