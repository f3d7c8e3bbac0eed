"""A watch on its own stream of etcd's Watch service.

Not by `etcd3.watch.Watcher` (0.12), which carries all watches of a client on one stream: it reopens a broken stream in
a loop without a pause, does not tell when the server cancels a watch (permission denied), takes a late answer to a
creation that timed out for that of the next one, and ends with a traceback when its channel is closed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from torchelastic.rendezvous.delivery import WatchCallbacks, compacted_error
from torchelastic.rendezvous.etcd_connection import Connection
from torchelastic.rendezvous.etcd_wire import etcdrpc, grpc, prefix_range, to_event, to_store_error
from torchelastic.rendezvous.store import StoreAccessError, StoreError, StoreUnavailableError, Watch

OnEnd = Callable[["WatchStream", StoreError | None], None]


class WatchStream(Watch):
    """Opens the stream at once; reads it on a thread of its own after `start`.

    Args:
        connection: Where to watch. The stream ends with it.
        prefix: Of the keys to watch.
        start_revision: The first revision of interest.
        callbacks: What to call.
        on_end: Called with this watch and what ended it (None: nothing did, it was cancelled), before the error
            callback, so that a call from there meets a store that knows.
    """

    def __init__(
        self, connection: Connection, prefix: str, start_revision: int, callbacks: WatchCallbacks, on_end: OnEnd
    ) -> None:
        self.connection = connection
        self._prefix = prefix
        self._start_revision = start_revision
        self._callbacks = callbacks
        self._on_end = on_end
        self._hang_up: SimpleQueue[None] = SimpleQueue()
        # hasleader: a member that is cut off from its cluster ends the stream instead of staying silent
        metadata = (*(connection.client.metadata or ()), ("hasleader", "true"))
        self._call = etcdrpc.WatchStub(connection.client.channel).Watch(self._requests(), metadata=metadata)

    def _requests(self) -> Iterator[etcdrpc.WatchRequest]:
        key, range_end = prefix_range(self._prefix)
        create = etcdrpc.WatchCreateRequest(key=key, range_end=range_end, start_revision=self._start_revision)
        yield etcdrpc.WatchRequest(create_request=create)
        self._hang_up.get()  # a proxy may end a stream whose client has nothing more to say

    def start(self) -> None:
        """Begin to call back."""
        threading.Thread(target=self._run, name=f"etcd-watch-{self._prefix}", daemon=True).start()

    def cancel(self) -> None:
        """Stop it; see `Watch.cancel`."""
        self._callbacks.end()
        self._close_stream()

    def _close_stream(self) -> None:
        self._hang_up.put(None)
        self._call.cancel()

    def _run(self) -> None:
        error: StoreError | None
        try:
            error = self._read()
        except grpc.RpcError as rpc_error:
            error = to_store_error(rpc_error, self.connection.endpoint)
            error.__cause__ = rpc_error
        if self._callbacks.ended:  # what the stream says about our own cancellation is no news
            error = None
        self._close_stream()
        self._on_end(self, error)
        if error is not None:
            self._callbacks.fail(error)

    def _read(self) -> StoreError | None:
        for response in self._call:
            if response.compact_revision:
                return compacted_error(self._start_revision, response.compact_revision)
            if response.canceled:
                text = (
                    f"etcd at {self.connection.endpoint} ended the watch of {self._prefix!r}: {response.cancel_reason}"
                )
                return StoreAccessError(text) if "permission denied" in text else StoreUnavailableError(text)
            if response.events and not self._callbacks.deliver([to_event(event) for event in response.events]):
                return None
        return StoreUnavailableError(f"etcd at {self.connection.endpoint} ended the watch of {self._prefix!r}")
