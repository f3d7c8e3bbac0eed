"""The metrics that the agent serves (the workers', its own, its ledger's), scraped from it or pushed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from torchelastic.agent.host_events import Event, MetricsPublished, RoundChanged, WorkerExited
from torchelastic.metrics.exposition import MAX_NAMES, MetricsRegistry
from torchelastic.metrics.pushing import MetricsPusher
from torchelastic.observe.status.ledger_collector import HostSnapshot, LedgerCollector

log = logging.getLogger(__name__)


class MetricsEndpoint:
    """Use it on the agent's event loop. What it serves, it serves from threads of its own.

    Args:
        run_id: of the run.
        host: this host's name.
    """

    def __init__(self, run_id: str, host: str) -> None:
        self._run_id, self._host = run_id, host
        self._registry = MetricsRegistry()
        self._refused: set[str] = set()
        self._stop_endpoint: Callable[[], None] | None = None
        self._pushing: MetricsPusher | None = None

    def on_event(self, event: Event) -> None:
        """Record what it says."""
        match event:
            case RoundChanged(round_):
                self.record("torchelastic", "rendezvous.round", round_.number)
                self.record("torchelastic", "rendezvous.world_size", len(round_.roster))
            case MetricsPublished(local_rank, items):
                for group, name, value, *_ in items:
                    self.record(group, name, value, local_rank)
            case WorkerExited(_, _, total_restarts):
                self.record("torchelastic", "agent.worker_restarts", total_restarts)

    def record(self, group: str, name: str, value: float, local_rank: int | None = None) -> None:
        """One value; what is wrong with it is logged, once for each name: it may come with every step."""
        try:
            self._registry.record(local_rank, group, name, value)
        except ValueError as error:
            known = f"{name!r:.80}"
            if known not in self._refused and len(self._refused) < MAX_NAMES:
                self._refused.add(known)
                log.warning("a metric was skipped: %s", error)

    def add_ledger(self, read: Callable[[], HostSnapshot]) -> None:
        """Serve the ledger too. Call it once, before anything is recorded: its names are its own.

        Args:
            read: gives what is known at the moment; called from other threads.
        """
        self._registry.add(LedgerCollector(read, run_id=self._run_id, host=self._host))

    def listen(self, address: tuple[str, int] | None) -> None:
        """Be there for Prometheus.

        Args:
            address: (host, port) to be scraped at; port 0 takes any free one; None: nowhere.

        Raises:
            OSError: the address cannot be listened on.
        """
        if address is not None:
            port, self._stop_endpoint = self._registry.start_endpoint(*address)
            log.info("metrics at http://%s:%d/metrics", address[0], port)

    def push(self, gateway: str | None) -> None:
        """Push from now on.

        Args:
            gateway: URL of the push gateway to push to; None: none.
        """
        if gateway is not None:
            self._pushing = MetricsPusher(
                gateway, self._registry.collector_registry, run_id=self._run_id, host=self._host
            )
            self._pushing.start()

    async def stop(self) -> None:
        """The agent ends: push a last time, within a bound, and serve nothing any more."""
        if self._pushing is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._pushing.close)
        if self._stop_endpoint is not None:
            self._stop_endpoint()
