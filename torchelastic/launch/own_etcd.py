"""An etcd of the launcher: starts and ends with it, and is started again whenever it ends before.

For `--standalone`, and for a run whose command names one of its hosts instead, as torchrun's `c10d` and `static` do:
the launcher of that host starts an etcd there, and waits at its end until the agents of the other hosts have left.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from tenacity import (
    RetryCallState,
    RetryError,
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_after_delay,
    stop_when_event_set,
    wait_exponential,
)

from torchelastic.agent.supervisor import restart_delay_s
from torchelastic.processes.exit_codes import describe_exit
from torchelastic.rendezvous.records import Keys
from torchelastic.rendezvous.server import EtcdServer
from torchelastic.rendezvous.store import StoreError
from torchelastic.rendezvous.url import DEFAULT_PREFIX

log = logging.getLogger(__name__)

#: One that lasted so long did not end because of its start.
GOOD_LIFE_S = 60.0
#: A start may take so long; a normal one takes 0.4 s.
START_TIMEOUT_S = 10.0
#: Between two samples whether other hosts still take part.
SAMPLE_S = 0.2
_CONNECT_S = 1.0


class OwnEtcd:
    """Starts it on entering, watches it on a thread of its own, ends both on leaving.

    It comes back on the same port, with its data where that can be had: without, the agent registers all anew. Training
    goes on meanwhile. Log lines say that it ended, and if it cannot be started again.

    Args:
        address: of this host, to listen at.
        port: to listen at; None: any.

    Raises:
        FileNotFoundError, RuntimeError, TimeoutError: on entering, as `EtcdServer.start`.
    """

    def __init__(self, address: str = "127.0.0.1", port: int | None = None) -> None:
        self._address = address
        self._server = EtcdServer(host=address, port=port)
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # of the server: one thread at a time
        self._thread = threading.Thread(target=self._watch, name="own-etcd", daemon=True)

    def __enter__(self) -> OwnEtcd:
        self._server.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        with self._lock:
            self._server.stop()
        self._thread.join()

    @property
    def endpoint(self) -> str:
        """Where clients connect, as "host:port"; it stays the same."""
        return self._server.endpoint

    def _watch(self) -> None:
        restarts = 0
        while not self._stopping.is_set():
            began_s = time.monotonic()
            status = self._server.wait_for_end()
            restarts = 1 if time.monotonic() - began_s > GOOD_LIFE_S else restarts + 1
            if status is None or self._stopping.wait(restart_delay_s(restarts)):
                return
            with self._lock:
                if not self._stopping.is_set():
                    self._start_again(status)

    def _start_again(self, status: int) -> None:
        """Say that it ended, and try until it runs, or is not wanted any more."""
        how = describe_exit(status)
        if status >= 0:
            how = f"{how}; its log ends with\n{self._server.log_tail}"
        log.warning("this launcher's etcd is started again, training goes on; it ended: %s", how)
        retrying = Retrying(
            retry=retry_if_exception_type((OSError, RuntimeError)),
            wait=wait_exponential(max=30.0),
            sleep=sleep_using_event(self._stopping),
            stop=stop_when_event_set(self._stopping),
            after=_say_first,
        )
        with suppress(RetryError):  # the run is over
            retrying(self._restart)

    def _restart(self) -> None:
        port = self._server.port
        try:
            self._server.restart(START_TIMEOUT_S)
        except (OSError, RuntimeError):
            # what is left of that one is removed, in case that it is its data that cannot be used
            self._server = EtcdServer(host=self._address, port=port)
            self._server.start(START_TIMEOUT_S)


def _say_first(state: RetryCallState) -> None:
    if state.attempt_number == 1 and state.outcome is not None:
        log.error(
            "this launcher's etcd cannot be started again: %s; training goes on, but a worker that is lost now is "
            "not replaced before it runs; more attempts follow",
            state.outcome.exception(),
        )


@contextmanager
def meeting_place(host: str, port: int, run_id: str, patience_s: float) -> Iterator[None]:
    """On the host that is named there is an etcd inside, started here unless somebody serves the port already.

    If the block ends without an error, it is kept until the agents of the other hosts have left.

    Args:
        host: name or address of one of the run's hosts.
        port: where its etcd listens.
        run_id: of the run.
        patience_s: the name may become known so late: that of a pod, or of a cloud's machine, once it has started.

    Raises:
        OSError: on entering, the name is still not known.
        FileNotFoundError, RuntimeError, TimeoutError: on entering, as `EtcdServer.start`.
    """
    address, etcd = _own_address_in_time(host, patience_s), None
    with ExitStack() as stack:
        if address is not None and not _is_served(host, port):
            try:
                etcd = stack.enter_context(OwnEtcd(address, port))
            except RuntimeError:
                if not _is_served(host, port):  # another launcher of this host was faster
                    raise
        yield
        if etcd is not None:
            _wait_for_others(etcd.endpoint, Keys(f"{DEFAULT_PREFIX}/{run_id}"))


def _is_served(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), _CONNECT_S):
        return True
    return False


def _wait_for_others(endpoint: str, keys: Keys) -> None:
    from torchelastic.rendezvous.etcd import EtcdStore  # gRPC, which most launches import later

    host, _, port = endpoint.rpartition(":")
    store, is_told, pause = EtcdStore([(host, int(port))]), False, threading.Event()
    with suppress(StoreError, KeyboardInterrupt):
        while store.list_prefix(keys.agents).items:
            if not is_told:
                log.warning("other hosts still take part, and meet at the etcd of this launcher: it ends with them")
                is_told = True
            pause.wait(SAMPLE_S)
    store.close()


def _own_address_in_time(host: str, patience_s: float) -> str | None:
    def say_first(state: RetryCallState) -> None:
        if state.attempt_number == 1:
            log.warning("waiting for the name %s, which is not known yet, up to %g s", host, patience_s)

    retrying = Retrying(
        retry=retry_if_exception_type(socket.gaierror),
        wait=wait_exponential(multiplier=0.1, max=2.0),
        stop=stop_after_delay(patience_s),
        before_sleep=say_first,
        reraise=True,
    )
    return retrying(_own_address, host)


def _own_address(host: str) -> str | None:
    """The address of this host that the name resolves to; None: it is another host's. Raises OSError: nobody's."""
    for family, kind, _, _, where in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(where)
            return str(where[0])
    return None
