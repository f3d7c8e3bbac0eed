"""Takes replicas from other hosts and gives them back: a few threads beside the training loop of a process."""

from __future__ import annotations

import logging
import socket
import threading
import time

import msgspec
import xxhash

from torchelastic.checkpoint.format.regions import Length
from torchelastic.checkpoint.replicas.protocol import (
    MOST_MESSAGE_BYTES,
    Message,
    ReplicaConnection,
    check_timeout,
    error_message,
    greet_client,
    number_in,
    text_in,
    token_bytes,
)
from torchelastic.checkpoint.replicas.receive import Reception, ReplicaStore, check_object_id
from torchelastic.checkpoint.replicas.replication_errors import (
    AuthenticationError,
    CorruptReplicaError,
    NoReplicasAvailableError,
    OutdatedRoundError,
    ProtocolError,
    ReplicaBusyError,
    ReplicaRefusedError,
    ReplicationError,
)

log = logging.getLogger(__name__)

_TICK_S = 0.2
_GREETING_S = 5.0
#: What a member is told; after anything else it is not there to be told.
_ANSWERED = (
    CorruptReplicaError,
    OutdatedRoundError,
    NoReplicasAvailableError,
    ProtocolError,
    ReplicaBusyError,
    ReplicaRefusedError,
)


class ReplicaServer:
    """Listens on TCP for members of the same run and moves objects to and from a shelf.

    Every connection proves first that it knows the token. One request, one connection: push an object, pull one, or
    list them. Threads are daemons; nothing here needs the main thread.

    Args:
        shelf: where objects go and where they are read; see there from which threads it is called.
        token: the secret that all members of the run share, of 16 characters or more; it never travels.
        host: the address to listen on; the one that the other hosts reach, not "0.0.0.0" if that can be avoided.
        port: the port; 0 for a free one.
        timeout_s: how long a peer may be silent within a transfer.
        max_transfers: how many objects may be on their way in at once, and as many out; more get the answer "busy".
        max_connections: how many connections there may be at once; more are closed at once.

    Raises:
        ValueError: the token is too short, or `timeout_s` not above 0.
        OSError: nobody can listen on that address.
    """

    def __init__(
        self,
        shelf: ReplicaStore,
        token: str,
        *,
        host: str,
        port: int = 0,
        timeout_s: float = 10.0,
        max_transfers: int = 4,
        max_connections: int = 64,
    ) -> None:
        self._shelf, self._token = shelf, token_bytes(token)
        self._timeout_s, self._max_connections = check_timeout(timeout_s), max_connections
        self._reception = Reception(shelf, most_objects=max_transfers)
        self._complaints: set[str] = set()
        self._outgoing = threading.BoundedSemaphore(max_transfers)
        self._lock = threading.Lock()  # guards `_serving`
        self._serving: dict[ReplicaConnection, threading.Thread] = {}
        self._is_closed = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self._listener.settimeout(_TICK_S)
        name = self._listener.getsockname()
        #: host and port, for the clients
        self.address: tuple[str, int] = (name[0], name[1])
        self._acceptor = threading.Thread(target=self._accept, name="replica-server", daemon=True)

    def __enter__(self) -> ReplicaServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def round(self) -> int:
        """The oldest round from which pushes are taken."""
        return self._reception.round

    def start(self) -> None:
        """Begins to serve. To be called once."""
        self._acceptor.start()

    def fence(self, round_number: int) -> None:
        """Refuses pushes of rounds older than this from now on, also those on their way. The fence never falls.

        When it returns, nothing that an older round pushed can become visible any more.
        """
        self._reception.fence(round_number)

    def close(self) -> None:
        """Stops serving, cuts what is on its way, and abandons it; returns within about `timeout_s`."""
        self._is_closed.set()
        with self._lock:
            serving = dict(self._serving)
        for connection in serving:
            connection.cut()
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the acceptor at once, on Linux
        except OSError:
            pass
        deadline_s = time.monotonic() + self._timeout_s
        for thread in (self._acceptor, *serving.values()):
            if thread.is_alive():
                thread.join(max(0.0, deadline_s - time.monotonic()))
        self._listener.close()

    # --- connections --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                accepted, (host, port, *_) = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:  # too many open files, for example: others end meanwhile
                if not self._is_closed.wait(_TICK_S):
                    self._complain(logging.WARNING, "could not accept a connection: %s", error)
                continue
            self._serve_on_a_thread(accepted, f"{host}:{port}")

    def _serve_on_a_thread(self, accepted: socket.socket, peer: str) -> None:
        with self._lock:
            if len(self._serving) >= self._max_connections or self._is_closed.is_set():
                text = "closed a connection of %s: there are %d already"
                self._complain(logging.WARNING, text, peer, len(self._serving))
                accepted.close()
                return
            try:
                connection = ReplicaConnection(accepted, peer, min(_GREETING_S, self._timeout_s))
                thread = threading.Thread(target=self._serve, args=(connection,), name=f"replica-{peer}", daemon=True)
                thread.start()  # it needs the lock to end, so it is entered below before
                self._serving[connection] = thread
            except (OSError, RuntimeError) as error:  # reset already, or no further thread can be had
                self._complain(logging.WARNING, "could not serve %s: %s", peer, error)
                accepted.close()

    def _serve(self, connection: ReplicaConnection) -> None:
        try:
            if self._is_member(connection):
                connection.limit_to(self._timeout_s)
                self._answer(connection)
        except ReplicationError as error:
            log.info("a transfer with %s broke: %s", connection.peer, error)
        except Exception:
            log.exception("could not serve %s", connection.peer)
        finally:
            with self._lock:
                del self._serving[connection]
            connection.close()

    def _is_member(self, connection: ReplicaConnection) -> bool:
        """Greet whoever has connected; False: a stranger, or somebody who is gone."""
        try:
            greet_client(connection, self._token)
        except ReplicationError as error:
            level = logging.WARNING if isinstance(error, (AuthenticationError, ProtocolError)) else logging.INFO
            self._complain(level, "closed a connection of %s: %s", connection.peer, error)
            return False
        return True

    def _answer(self, connection: ReplicaConnection) -> None:
        operations = {"push": self._receive_push, "pull": self._give, "list": self._list}
        try:
            request = connection.receive()
            operation = operations.get(text_in(request, "op"))
            if operation is None:
                raise ReplicaRefusedError("this release knows push, pull and list only")
            operation(connection, request)
        except _ANSWERED as error:
            is_daily = isinstance(error, (NoReplicasAvailableError, ReplicaBusyError))
            log.log(logging.INFO if is_daily else logging.WARNING, "refused %s: %s", connection.peer, error)
            connection.send(error_message(error))
        except ReplicationError:
            raise
        except Exception as error:  # the owner's code; its fault must not end the server
            log.exception("the shelf failed while serving %s", connection.peer)
            connection.send(
                error_message(ReplicaRefusedError(f"the shelf failed: {type(error).__name__}; see its log"))
            )

    def _complain(self, level: int, text: str, *arguments: object) -> None:
        """Logs what strangers do, the first time of each kind: whoever reaches an open port could else fill the log."""
        log.log(logging.DEBUG if text in self._complaints else level, text, *arguments)
        self._complaints.add(text)

    # --- requests -----------------------------------------------------------------------------------------------------

    def _receive_push(self, connection: ReplicaConnection, request: Message) -> None:
        object_id, round_number = _id_in(request), number_in(request, "round")
        size_bytes, digest = number_in(request, "size"), text_in(request, "digest")
        place = self._reception.begin(object_id, size_bytes, digest, round_number)
        if place is None:
            connection.send({"is_here": True})
            return
        try:
            connection.send({"is_here": False})
            with place:  # whoever resizes or unmaps it may do so afterwards
                arrived = connection.receive_bytes(place)
        except BaseException:
            self._reception.abort(object_id)
            raise
        self._reception.complete(object_id, digest, arrived, round_number)
        connection.send({"received": size_bytes})

    def _give(self, connection: ReplicaConnection, request: Message) -> None:
        object_id = _id_in(request)
        if not self._outgoing.acquire(blocking=False):
            raise ReplicaBusyError("as many objects are being fetched from here as may be; try again later")
        try:
            with self._reception.lock:
                content, digest = self._shelf.source(object_id), self._shelf.digest(object_id)
            if content is None:
                raise NoReplicasAvailableError(f"{object_id} is not here")
            content = content.cast("B") if content.nbytes else memoryview(b"")
            if "parts" in request:
                content, digest = _joined(content, request["parts"]), None  # it has no digest of its own
            sent = xxhash.xxh3_64()
            connection.send({"size": content.nbytes})
            connection.send_bytes(content, sent)
            if digest not in (None, sent.hexdigest()):
                raise CorruptReplicaError(f"{object_id} is not what was received here: take another replica")
            connection.send({"digest": sent.hexdigest()})
        finally:
            self._outgoing.release()

    def _list(self, connection: ReplicaConnection, request: Message) -> None:
        after = text_in(request, "after")
        with self._reception.lock:
            ids = sorted(object_id for object_id in self._shelf.ids() if object_id > after)
        page: list[str] = []
        room = MOST_MESSAGE_BYTES - 1024
        for object_id in ids:
            room -= len(object_id) + 3
            if room < 0:
                break
            page.append(object_id)
        connection.send({"ids": page, "more": len(page) < len(ids)})


def _id_in(request: Message) -> str:
    try:
        return check_object_id(text_in(request, "id"))
    except ValueError as error:
        raise ReplicaRefusedError(str(error)) from error


def _joined(content: memoryview, parts: object) -> memoryview:
    """The parts of an object that were asked for. Raises: ProtocolError."""
    try:
        ranges = msgspec.convert(parts, list[tuple[Length, Length]])
    except msgspec.ValidationError as error:
        raise ProtocolError(f"asked for parts that are none: {error}") from error
    if sum(end - begin for begin, end in ranges) > content.nbytes + MOST_MESSAGE_BYTES:
        raise ProtocolError("asked for more than there is")
    return memoryview(b"".join(content[begin:end] for begin, end in ranges))
