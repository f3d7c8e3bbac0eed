"""What etcd itself takes on this machine for the smallest things that a round is made of."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

PUTS = 200
WARM_UP = 20


def serve(pipe: Connection, _number: int, endpoint: str) -> None:
    """Answer "measure": milliseconds of single puts, and of single puts until a watch has told of them."""
    os.environ["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = "python"  # etcd3 asks for it, before its import
    from torchelastic.rendezvous.etcd import EtcdStore

    host, port = endpoint.rsplit(":", 1)
    store = EtcdStore([(host, int(port))])
    told = threading.Event()

    def put_until_told() -> None:
        told.clear()
        store.put("/floor/watched", b"x" * 200)
        told.wait()

    pipe.recv()
    puts_ms = _times_ms(lambda: store.put("/floor/put", b"x" * 200))
    revision = store.put("/floor/put", b"")
    store.watch("/floor/watched", revision + 1, lambda _events: told.set(), lambda _error: None)
    pipe.send({"put_ms": puts_ms, "put_to_watch_ms": _times_ms(put_until_told)})
    pipe.recv()


def _times_ms(work: Callable[[], object]) -> list[float]:
    times_ms = []
    for _ in range(WARM_UP + PUTS):
        began_s = time.perf_counter()
        work()
        times_ms.append(1000 * (time.perf_counter() - began_s))
    return times_ms[WARM_UP:]
