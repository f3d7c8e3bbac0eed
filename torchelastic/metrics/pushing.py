"""For jobs that end before anybody scrapes them: the agent's metrics, pushed to a Prometheus Pushgateway.

https://github.com/prometheus/pushgateway. One group per run and host, with the labels `job="torchelastic"`, `run_id`,
and `instance`: HOST@RUN, since groups of several runs of a host stand side by side. Each push replaces the one before.
The group is kept when the run ends: what a batch job has come to is what a push gateway is there for, and workers that
are down in it say that it is over.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, push_to_gateway

log = logging.getLogger(__name__)

#: Between two pushes.
PUSH_EVERY_S = 15.0
#: For a gateway that does not answer.
PUSH_TIMEOUT_S = 5.0
JOB = "torchelastic"


def checked_gateway(url: str) -> str:
    """The URL of a push gateway, `http://` put in front where there is no scheme.

    Raises:
        ValueError: it is no http(s) URL with a host, or has a password in it.
    """
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        has_host = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        has_host = False
    if "@" in whole:
        raise ValueError("the push gateway's URL has a login in it, which others would see: leave out USER:PASSWORD@")
    if not has_host or parts.scheme not in ("http", "https") or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is no push gateway: write http://HOST:PORT")
    return whole.rstrip("/")


class MetricsPusher:
    """Pushes from a thread of its own, now and every so often, and a last time in `close`. Never raises.

    Args:
        url: of the push gateway.
        registry: what is pushed.
        run_id: of the run.
        host: this host's name.
        every_s: seconds between two pushes.
        push: for tests.
    """

    def __init__(
        self,
        url: str,
        registry: CollectorRegistry,
        *,
        run_id: str,
        host: str,
        every_s: float = PUSH_EVERY_S,
        push: Callable[..., None] = push_to_gateway,
    ) -> None:
        self._url, self._registry, self._every_s, self._push = url, registry, every_s, push
        self._key = {"run_id": run_id, "instance": f"{host}@{run_id}"}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchelastic-push", daemon=True)
        self._has_complained = False

    def start(self) -> None:
        """Push from now on."""
        self._thread.start()

    def close(self, timeout_s: float = 2 * PUSH_TIMEOUT_S) -> None:
        """Push what there is now, and stop; waits at most so many seconds. Idempotent."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.is_set()  # before the push: what was there when `close` was called is in it
            self._once()
            if not is_last:
                self._closing.wait(self._every_s)

    def _once(self) -> None:
        try:
            self._push(self._url, job=JOB, registry=self._registry, grouping_key=self._key, timeout=PUSH_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a gateway, the run goes on
            level = logging.DEBUG if self._has_complained else logging.WARNING
            self._has_complained = True
            log.log(level, "metrics could not be pushed to %s: %s; still trying, without a word", self._url, error)
