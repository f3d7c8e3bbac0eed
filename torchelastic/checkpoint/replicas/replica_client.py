"""Sends objects to another host's `ReplicaServer` and fetches them from there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tenacity import RetryCallState, Retrying, retry_if_exception_type, wait_random_exponential

from torchelastic.checkpoint.replicas.protocol import (
    Message,
    ReplicaConnection,
    check_timeout,
    greet_server,
    number_in,
    text_in,
    token_bytes,
)
from torchelastic.checkpoint.replicas.receive import (
    Destination,
    ReplicaStore,
    check_object_id,
    digest_of,
    writable,
)
from torchelastic.checkpoint.replicas.replication_errors import (
    CorruptReplicaError,
    DamagedFrameError,
    PeerLostError,
    PeerStalledError,
    ProtocolError,
    ReplicaBusyError,
    ReplicaRefusedError,
)
from torchelastic.processes.sockets import connect_to


@dataclass(frozen=True)
class Transferred:
    """What a push or a pull did.

    Attributes:
        size_bytes: how large the object is.
        digest: its digest.
        sent_bytes: its size, or 0 if it was there already.
    """

    size_bytes: int
    digest: str
    sent_bytes: int


class ReplicaClient:
    """One peer's server, seen from here. It holds no connection between calls; calls may come from any thread.

    After broken connections, damage on the way and "busy" the object is sent again, until `retry_s` after the first
    failure. A peer that accepts a connection and is silent is not tried again.

    Args:
        address: host and port of the server.
        token: the secret that all members of the run share.
        timeout_s: how long the peer may be silent.
        retry_s: for how long after a first failure attempts are repeated; 0 for one attempt.
        most_retries: how many further attempts there may be for each call besides; None for no limit. An answer "busy"
            does not count.

    Raises:
        ValueError: the token is too short, or `timeout_s` not above 0.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: str,
        *,
        timeout_s: float = 10.0,
        retry_s: float = 5.0,
        most_retries: int | None = None,
    ) -> None:
        self.address = address
        self.peer = f"{address[0]}:{address[1]}"
        self._token = token_bytes(token)
        self._timeout_s, self._retry_s, self._most_retries = check_timeout(timeout_s), retry_s, most_retries
        self._lock = threading.Lock()
        self._open: set[ReplicaConnection] = set()
        self._has_ended = False

    def end(self, grace_s: float) -> None:
        """Nobody needs the peer any more: in so many seconds whoever waits for it is freed. From any thread.

        Calls then raise PeerLostError.
        """
        timer = threading.Timer(grace_s, self._end)
        timer.daemon = True
        timer.start()

    def _end(self) -> None:
        with self._lock:
            self._has_ended = True
            for connection in self._open:
                connection.cut()

    def push(self, object_id: str, content: memoryview | bytearray | bytes, *, token_round: int) -> Transferred:
        """Sends an object; when this returns, the peer has verified and published it.

        Args:
            object_id: its name: parts of letters, digits and ``_.:=@+,-`` with slashes between.
            content: its bytes, contiguous. They must not change before this returns; if they do, the peer notices.
            token_round: the number of the sender's round: the fencing token (see `ReplicaServer.fence`).

        Raises:
            OutdatedRoundError: the peer has seen a newer round: this process was replaced.
            CorruptReplicaError: the content was changed meanwhile.
            ReplicaRefusedError, ReplicaBusyError, PeerLostError, PeerStalledError, AuthenticationError: as they say.
            ValueError: this is no id.
        """
        check_object_id(object_id)
        view = memoryview(content)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        digest = digest_of(view)
        request: Message = {"op": "push", "id": object_id, "size": view.nbytes, "digest": digest, "round": token_round}
        for attempt in self._attempts():
            with attempt, self._connected() as connection:
                connection.send(request)
                is_here = connection.receive().get("is_here")
                if not isinstance(is_here, bool):
                    raise ProtocolError(f"{self.peer} sent no truth value as 'is_here'")
                if not is_here:
                    try:
                        connection.send_bytes(view)
                        number_in(connection.receive(), "received")
                    except DamagedFrameError as error:
                        if digest_of(view) != digest:
                            raise CorruptReplicaError(
                                f"{object_id} changed while it was sent to {self.peer}; send a copy that nobody "
                                f"writes to"
                            ) from error
                        raise
        return Transferred(view.nbytes, digest, 0 if is_here else view.nbytes)

    def read(self, object_id: str, parts: Sequence[tuple[int, int]]) -> bytearray:
        """Fetches parts of an object, joined.

        Args:
            object_id: its name.
            parts: where each begins and ends, in bytes; what lies behind the object's end is left out.

        Raises:
            As `pull`.
        """
        came, most_bytes = bytearray(), sum(end - begin for begin, end in parts)

        def destination(size_bytes: int) -> bytearray:
            nonlocal came
            if size_bytes > most_bytes:
                raise ProtocolError(f"{self.peer} sends {size_bytes} bytes where {most_bytes} were asked for")
            came = bytearray(size_bytes)
            return came

        self.pull(object_id, destination, parts=parts)
        return came

    def pull(
        self, object_id: str, destination: Destination, *, parts: Sequence[tuple[int, int]] | None = None
    ) -> Transferred:
        """Fetches an object.

        Args:
            object_id: its name.
            parts: see `read`; None: all of it.
            destination: called once with the size in bytes; returns the writable, contiguous buffer to receive into.
                If this raises, anything may be in it.

        Returns:
            What was fetched, complete and verified.

        Raises:
            NoReplicasAvailableError: the peer does not have it.
            CorruptReplicaError: the peer's copy is damaged.
            ReplicaRefusedError: the destination cannot hold it, or it became another object meanwhile.
            ReplicaBusyError, PeerLostError, PeerStalledError, AuthenticationError: as they say.
            ValueError: this is no id.
        """
        check_object_id(object_id)
        request: Message = {"op": "pull", "id": object_id}
        if parts is not None:
            request["parts"] = parts
        place: memoryview | None = None
        for attempt in self._attempts():
            with attempt, self._connected() as connection:
                connection.send(request)
                size_bytes = number_in(connection.receive(), "size")
                if place is None:
                    place = writable(destination(size_bytes), size_bytes, object_id)
                elif place.nbytes != size_bytes:
                    raise ReplicaRefusedError(
                        f"{object_id} had {place.nbytes} bytes and has {size_bytes}: fetch it anew"
                    )
                arrived, digest = connection.receive_bytes(place), text_in(connection.receive(), "digest")
                if arrived != digest:
                    raise DamagedFrameError(f"{object_id} was changed on its way from {self.peer}")
        return Transferred(size_bytes, digest, size_bytes)

    def ids(self) -> list[str]:
        """What the peer has, sorted; raises as `pull` does."""
        found: list[str] = []
        while True:
            for attempt in self._attempts():
                with attempt, self._connected() as connection:
                    connection.send({"op": "list", "after": found[-1] if found else ""})
                    answer = connection.receive()
            page = answer.get("ids")
            if not isinstance(page, list) or not all(isinstance(object_id, str) for object_id in page):
                raise ProtocolError(f"{self.peer} sent no list of ids")
            found += page
            if not page or not answer.get("more"):
                return found

    def _attempts(self) -> Retrying:
        failed_s: list[float] = []
        failures = 0

        def is_over(state: RetryCallState) -> bool:
            nonlocal failures
            error = state.outcome.exception() if state.outcome is not None else None
            failures += not isinstance(error, ReplicaBusyError)
            failed_s.append(time.monotonic())
            is_late = failed_s[-1] - failed_s[0] >= self._retry_s
            return self._has_ended or is_late or (self._most_retries is not None and failures > self._most_retries)

        return Retrying(
            retry=retry_if_exception_type((PeerLostError, ReplicaBusyError, DamagedFrameError)),
            stop=is_over,
            wait=wait_random_exponential(multiplier=0.05, max=1.0),
            reraise=True,
        )

    @contextmanager
    def _connected(self) -> Iterator[ReplicaConnection]:
        try:
            connected = connect_to(self.address, self._timeout_s, lambda: self._has_ended)
        except TimeoutError as error:
            raise PeerStalledError(
                f"{self.peer} did not accept a connection in {self._timeout_s:g} s; its host is off or the network "
                f"to it is cut"
            ) from error
        except OSError as error:
            raise PeerLostError(f"{self.peer} cannot be reached: {error.strerror or error}") from error
        connection = ReplicaConnection(connected, self.peer, self._timeout_s)
        try:
            with self._lock:
                self._open.add(connection)
                if self._has_ended:
                    connection.cut()
            greet_server(connection, self._token)
            yield connection
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()


def pull_into(
    shelf: ReplicaStore,
    object_id: str,
    pull: Callable[[Destination], Transferred],
    check: Callable[[memoryview], None] | None = None,
) -> int:
    """Fetches an object onto a shelf of this process, on which it is seen when all of it is good.

    Args:
        shelf: where it goes.
        object_id: its name.
        pull: fetches it from who has it: `ReplicaClient.pull`, for example.
        check: raises CheckpointError if this is not what was wanted.

    Returns:
        How long it is, in bytes.

    Raises:
        CheckpointError: there is no room for it, or what `check`, the shelf and `pull` raise.
    """
    views: list[memoryview] = []

    def destination(size_bytes: int) -> memoryview:
        views.append(memoryview(shelf.destination(object_id, size_bytes)))
        return views[-1]

    try:
        pulled = pull(destination)
        if check is not None:
            check(views[-1])
        shelf.received(object_id, pulled.digest)
    except BaseException:
        shelf.abort(object_id)
        raise
    return pulled.size_bytes
