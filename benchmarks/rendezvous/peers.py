"""Members of torch.distributed.elastic: one handler and one thread each, many in one process."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.rendezvous.crowd import Answer

RUN_ID = "rendezvous-benchmark"


def serve(pipe: Connection, _number: int, backend: str, port: int, own: range, members: int, limit_s: float) -> None:
    """Be the nodes `own` of a run of so many, and do what the parent says: "start", "round", "counts"."""
    logging.disable(logging.CRITICAL)  # they log every error that they get over
    _Nodes(backend, port, own, members, limit_s).obey(pipe)


class _Nodes:
    def __init__(self, backend: str, port: int, own: range, members: int, limit_s: float) -> None:
        self._backend, self._port, self._own, self._members = backend, port, own, members
        self._limit_s = limit_s
        self._handlers: dict[int, Any] = {}
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def obey(self, pipe: Connection) -> None:
        while True:
            command = pipe.recv()
            if command == "load":
                self._count_calls()
                pipe.send({})
            elif command == "host":  # node 0 alone: a c10d store has to be there before anybody connects to it
                pipe.send(self._all_at_once(self._make, self._own[:1]))
            elif command == "start":
                pipe.send(self._all_at_once(self._make, [index for index in self._own if index > 0]))
            elif command == "counts":
                with self._lock:
                    counts, self._counts = self._counts, Counter()
                pipe.send(dict(counts))
            else:
                pipe.send(self._all_at_once(self._join, self._own))

    def _make(self, index: int) -> None:
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

        special = {"is_host": str(index == 0).lower()} if self._backend == "c10d" else {"protocol": "http"}
        parameters = RendezvousParameters(
            self._backend,
            f"127.0.0.1:{self._port}",
            RUN_ID,
            self._members,
            self._members,
            local_addr="127.0.0.1",
            join_timeout=int(self._limit_s) + 60,
            **special,
        )
        self._handlers[index] = get_rendezvous_handler(parameters)

    def _join(self, index: int) -> None:
        self._handlers[index].next_rendezvous()

    def _all_at_once(self, work: Callable[[int], None], indices: Any) -> Answer:
        """Do it for each node on a thread of its own; from the release of all threads to the last one's end."""
        release = threading.Event()
        ended_s: list[float] = []
        errors: list[str] = []

        def run(index: int) -> None:
            release.wait()
            try:
                work(index)
            except Exception as error:  # noqa: BLE001 - told to the parent
                errors.append(f"{type(error).__name__}: {error}"[:200])
            ended_s.append(time.monotonic())

        threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in indices]
        for thread in threads:
            thread.start()
        released_s = time.monotonic()
        release.set()
        for thread in threads:
            thread.join()
        return {"released_s": released_s, "ended_s": max(ended_s, default=released_s), "errors": errors}

    def _count_calls(self) -> None:
        """Count what passes between the handlers and their store, in their backends' two methods."""
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

        backends: list[Any] = [C10dRendezvousBackend]
        if self._backend == "etcd-v2":
            from torch.distributed.elastic.rendezvous.etcd_rendezvous_backend import EtcdRendezvousBackend

            backends.append(EtcdRendezvousBackend)
        for backend in backends:
            for name in ("get_state", "set_state"):
                setattr(backend, name, self._counted(getattr(backend, name), name))

    def _counted(self, method: Any, name: str) -> Any:
        def call(backend: Any, *arguments: Any) -> Any:
            sent = arguments[0] if arguments else b""
            answer = method(backend, *arguments)
            received = answer[0] if answer is not None else b""
            with self._lock:
                self._counts.update({"requests": 1, f"{name}_calls": 1})
                self._counts.update({"put_bytes": len(sent), "delivered_bytes": len(received)})
            return answer

        return call
