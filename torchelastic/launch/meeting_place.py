"""The etcd of a run whose command names one of its hosts instead, as torchrun's `c10d` and `static` do.

The launcher of that host starts an etcd there. It ends with that launcher, which first waits until the agents of the
other hosts have left.
"""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress
from types import TracebackType

from torchelastic.launch.own_etcd import OwnEtcd
from torchelastic.rendezvous.records import Keys
from torchelastic.rendezvous.store import StoreError
from torchelastic.rendezvous.url import DEFAULT_PREFIX

log = logging.getLogger(__name__)

#: How often it is looked whether others are still there.
LOOK_S = 0.2
_CONNECT_S = 1.0


class MeetingPlace:
    """Use it with `with`: on the host that is named it starts an etcd, unless somebody serves the port already.

    Args:
        host: name or address of one of the run's hosts.
        port: where its etcd listens.
        run_id: of the run.

    Raises:
        OSError: on entering, the name is not known.
        FileNotFoundError, RuntimeError, TimeoutError: on entering, as `EtcdServer.start`.
    """

    def __init__(self, host: str, port: int, run_id: str) -> None:
        self._host, self._port, self._keys = host, port, Keys(f"{DEFAULT_PREFIX}/{run_id}")
        self._etcd: OwnEtcd | None = None

    def __enter__(self) -> MeetingPlace:
        address = _own_address(self._host)
        if address is not None and not self._is_served():
            etcd = OwnEtcd(address, self._port)
            try:
                self._etcd = etcd.__enter__()
            except RuntimeError:
                if not self._is_served():  # another launcher of this host was faster
                    raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._etcd is None:
            return
        try:
            if error is None:
                self._wait_for_others(self._etcd.endpoint)
        finally:
            self._etcd.__exit__(kind, error, trace)

    def _is_served(self) -> bool:
        with suppress(OSError), socket.create_connection((self._host, self._port), _CONNECT_S):
            return True
        return False

    def _wait_for_others(self, endpoint: str) -> None:
        from torchelastic.rendezvous.etcd import EtcdStore  # gRPC, which most launches import later

        host, _, port = endpoint.rpartition(":")
        store, is_told, pause = EtcdStore([(host, int(port))]), False, threading.Event()
        with suppress(StoreError, KeyboardInterrupt):
            while store.list_prefix(self._keys.agents).items:
                if not is_told:
                    log.warning("other hosts still take part, and meet at the etcd of this launcher: it ends with them")
                    is_told = True
                pause.wait(LOOK_S)
        store.close()


def _own_address(host: str) -> str | None:
    """The address of this host that the name stands for; None: it is another host's. Raises OSError: nobody's."""
    for family, kind, _, _, where in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(where)
            return str(where[0])
    return None
