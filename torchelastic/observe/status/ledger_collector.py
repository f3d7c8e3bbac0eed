"""The ledger of a host as Prometheus metrics, computed when it is scraped.

A Prometheus counter must never fall: a fall is taken for a restart, and `increase` adds the whole value anew. Time in
the ledger does move: steps that a checkpoint does not hold turn from productive into replayed. So there are two
counters, as in double-entry bookkeeping: what was put down to an account, and what was taken out of it again because
more became known. Both only grow, and their difference is the ledger, to the nanosecond, however often it is scraped.

Imports prometheus_client, never torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from torchelastic.observe.ledger.accounts import NOTHING, Account, Amounts
from torchelastic.observe.ledger.figures import figures_of
from torchelastic.observe.ledger.host_ledger import HostLedger
from torchelastic.observe.status.host_view import seen_of
from torchelastic.version import __version__

_S = 1e-9

#: How often what has happened on the host: name, help, from the book.
_COUNTS: tuple[tuple[str, str, Callable[[HostLedger], float]], ...] = (
    ("worker_starts", "Processes of workers begun on this host.", lambda book: book.counts.started),
    ("workers_lost", "Workers of this host that neither finished nor left in order.", lambda book: book.counts.lost),
    ("failures", "Groups that broke, once each, and workers lost outside of one.", lambda book: book.counts.failures),
    ("saves", "Checkpoints taken, each counted for every worker in it.", lambda book: book.counts.saves),
    ("drains", "Workers of this host that left in order, as they were asked to.", lambda book: book.counts.drains),
    ("steps_skipped", "Steps left out because a worker called skip_step.", lambda book: book.counts.skipped_steps),
    ("workers_wrong", "Workers that were found to compute wrong.", lambda book: book.counts.wrong),
    ("samples_skipped", "Samples of these, over all hosts.", lambda book: book.counts.skipped_samples),
    ("stragglers", "Times that a worker of this host was found to be slow.", lambda book: book.counts.stragglers),
    ("etcd_outages", "Times that etcd was unreachable from this host.", lambda book: book.counts.outages),
    ("etcd_outage_seconds", "Seconds without etcd, outages that are over.", lambda book: book.counts.away_ns * _S),
    ("steps_committed", "Steps committed, each counted for every worker in it.", lambda book: book.committed()),
    ("steps_undone", "Attempts at a step that did not last, counted alike.", lambda book: book.undone()),
)  # fmt: skip

#: Of `torchelastic.observe.ledger.figures`: name there, name here, what it is.
_RATIOS = (
    ("goodput", "goodput_ratio", "Productive time over the time of this host's workers"),
    ("ettr", "ettr_ratio", "Effective training time ratio of this host"),
    ("step_efficiency", "step_efficiency_ratio", "Committed over attempted steps of this host"),
    ("participation", "participation_ratio", "Mean number of workers in a group over the wanted one, of this host"),
)


@dataclass(frozen=True)
class WorkerPlace:
    """One worker's place on the host.

    Attributes:
        local_rank: which.
        is_up: whether a process runs there.
        restarts: how often it was started again.
        step: steps that its state has seen; -1: not known.
    """

    local_rank: int
    is_up: bool
    restarts: int = 0
    step: int = -1


@dataclass(frozen=True)
class HostSnapshot:
    """What an agent knew of its host at one time. A value, so any thread may read it.

    Attributes:
        book: with what the workers had counted by then.
        now_ns: that time, by the clock of the book.
        places: of its workers.
        sees_store: whether etcd was in reach.
    """

    book: HostLedger
    now_ns: int
    places: tuple[WorkerPlace, ...] = ()
    sees_store: bool = True


@dataclass(frozen=True)
class Sides:
    """The two sides of the accounts; `put` less `taken` is the ledger.

    Attributes:
        put: put down to each, by `Account`.
        taken: taken out of it again.
    """

    put: Amounts = NOTHING
    taken: Amounts = NOTHING

    def at(self, amounts: Amounts) -> Sides:
        """Once the ledger has these amounts. Neither side falls."""
        changes = [now - put + taken for now, put, taken in zip(amounts, self.put, self.taken, strict=True)]
        return Sides(
            tuple(put + max(0, change) for put, change in zip(self.put, changes, strict=True)),
            tuple(taken + max(0, -change) for taken, change in zip(self.taken, changes, strict=True)),
        )


class LedgerCollector(Collector):
    """Register it with a `CollectorRegistry`. Scraped by any thread, by several at once too.

    Args:
        read: gives the newest snapshot; called by whoever scrapes.
        run_id: of the run.
        host: this host's name.
    """

    def __init__(self, read: Callable[[], HostSnapshot], *, run_id: str, host: str) -> None:
        self._read, self._run_id, self._host = read, run_id, host
        self._lock = threading.Lock()
        self._sides = Sides()
        self._highest: dict[tuple[str, str], float] = {}

    def describe(self) -> list[Metric]:
        """Every name, so that no worker's metric can take one of them."""
        return list(self._families(HostSnapshot(HostLedger(), 0), Sides()))

    def collect(self) -> Iterable[Metric]:
        """All metrics of the newest snapshot."""
        with self._lock:  # what is read later is of later, so no side of the accounts jumps to and fro
            snapshot = self._read()
            self._sides = self._sides.at(snapshot.book.amounts(snapshot.now_ns))
            return list(self._families(snapshot, self._sides))

    def _families(self, snapshot: HostSnapshot, sides: Sides) -> Iterator[Metric]:
        info = {"run_id": self._run_id, "host": self._host, "version": __version__}
        yield InfoMetricFamily("torchelastic_agent", "The agent of this host, and its run.", value=info)
        yield _by_account("torchelastic_ledger_seconds", "Seconds of this host's workers put down to an account.",
                          sides.put)  # fmt: skip
        yield _by_account("torchelastic_ledger_taken_back_seconds",
                          "Seconds taken out of an account again, because more became known; they are in another.",
                          sides.taken)  # fmt: skip
        for name, help_text, of in _COUNTS:
            counter = CounterMetricFamily(f"torchelastic_{name}", help_text)
            counter.add_metric([], self._never_less(name, "", of(snapshot.book)))
            yield counter
        counts = snapshot.book.counts
        restores = CounterMetricFamily("torchelastic_restores", "Times the group received its state, by source.",
                                       labels=["source"])  # fmt: skip
        for source, times in (("peer", counts.restores_from_peer), ("checkpoint", counts.restores_from_checkpoint)):
            restores.add_metric([source], self._never_less("restores", source, times))
        yield restores
        yield GaugeMetricFamily("torchelastic_etcd_reachable", "Whether this host reaches etcd.",
                                value=float(snapshot.sees_store))  # fmt: skip
        yield from self._places(snapshot.places)
        yield from _figures(snapshot)

    def _places(self, places: tuple[WorkerPlace, ...]) -> Iterator[Metric]:
        labels = ["local_rank"]
        up = GaugeMetricFamily("torchelastic_worker_up", "Whether a worker's process runs.", labels=labels)
        step = GaugeMetricFamily("torchelastic_worker_step", "Steps that a worker's state has seen.", labels=labels)
        restarts = CounterMetricFamily("torchelastic_worker_restarts", "Times a worker was started again.",
                                       labels=labels)  # fmt: skip
        for place in places:
            label = str(place.local_rank)
            up.add_metric([label], float(place.is_up))
            restarts.add_metric([label], self._never_less("worker_restarts", label, place.restarts))
            if place.step >= 0:
                step.add_metric([label], place.step)
        yield from (up, step, restarts)

    def _never_less(self, name: str, label: str, value: float) -> float:
        """A page that cannot be read any more may take counts back that were scraped already."""
        value = max(value, self._highest.get((name, label), 0.0))
        self._highest[name, label] = value
        return value


def _by_account(name: str, help_text: str, amounts: Amounts) -> CounterMetricFamily:
    counter = CounterMetricFamily(name, help_text, labels=["account"])
    for account in Account:
        counter.add_metric([account.label], amounts[account] * _S)
    return counter


def _figures(snapshot: HostSnapshot) -> Iterator[Metric]:
    """The same figures as in a status; none before there was a worker, since 0 would be an alarm."""
    seen = seen_of(snapshot.book, snapshot.now_ns, len(snapshot.places))
    figures = {figure.name: figure for figure in figures_of(seen)}
    for name, metric, help_text in _RATIOS:
        figure = figures[name]
        yield _gauge(f"torchelastic_{metric}", f"{help_text}.", figure.value, is_there=bool(seen.worker_ns))
        yield _gauge(
            f"torchelastic_{metric.removesuffix('_ratio')}_attainable_ratio",
            f"{help_text}: the bound for the failures and costs seen.",
            figure.attainable,
            is_there=bool(seen.worker_ns),
        )
    whole = figures["whole_job_s"]
    yield _gauge("torchelastic_whole_job_seconds", "Seconds since the first start of a worker of this host.",
                 whole.value, is_there=bool(seen.worker_ns))  # fmt: skip
    yield _gauge("torchelastic_whole_job_attainable_seconds",
                 "Seconds that its productive time would have taken at the attainable goodput.",
                 whole.attainable, is_there=bool(seen.worker_ns))  # fmt: skip


def _gauge(name: str, help_text: str, value: float, *, is_there: bool) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help_text, value=value if is_there else None)
