"""Many who scrape an agent's metrics at a time: each gets a whole answer, and all of it is of one moment."""

from __future__ import annotations

import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import count

from prometheus_client.parser import text_string_to_metric_families

from torchelastic.ledger.counters import Counters
from torchelastic.ledger.events import Counted, Start
from torchelastic.ledger.host_ledger import HostLedger
from torchelastic.metrics.exposition import MetricsRegistry
from torchelastic.status.ledger_collector import HostSnapshot, LedgerCollector, WorkerPlace

S = 10**9
SCRAPERS, SCRAPES = 16, 12


def scrape(port: int) -> dict[str, float]:
    """The sums over all labels of each name."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def test_many_scrapes_at_a_time_get_whole_answers_each_of_one_moment() -> None:
    moments, lock = count(1), threading.Lock()

    def read() -> HostSnapshot:
        """Later with every call: the worker trains, and has counted half of its time."""
        with lock:
            now_ns = next(moments) * S
        time.sleep(0.001)  # another one may overtake it here, if it can
        tally = Counters.begun(0).entered(1, 1, 0, 1).synchronized(2, 0).commits(now_ns // 2 + 2)
        book = HostLedger().after_all(
            [Start(at_ns=0, worker="a/0.0"), Counted(at_ns=tally.since_ns, worker="a/0.0", tally=tally)]
        )
        return HostSnapshot(book, now_ns, (WorkerPlace(0, is_up=True, step=tally.step),))

    registry = MetricsRegistry()
    registry.add(LedgerCollector(read, run_id="r", host="a"))
    registry.record(0, "mine", "loss", 0.5)
    port, stop = registry.start_endpoint("127.0.0.1", 0)
    try:
        with ThreadPoolExecutor(SCRAPERS) as pool:
            rows = list(pool.map(lambda _: [scrape(port) for _ in range(SCRAPES)], range(SCRAPERS)))
    finally:
        stop()
    everything = [found for row in rows for found in row]
    assert len({frozenset(found) for found in everything}) == 1, "each answer has every metric"
    for found in everything:
        assert found["torchelastic_ledger_taken_back_seconds_total"] == 0, "an older book came after a newer one"
        put = found["torchelastic_ledger_seconds_total"]
        in_accounts_s = put - found["torchelastic_ledger_taken_back_seconds_total"]
        assert abs(in_accounts_s - found["torchelastic_whole_job_seconds"]) < 1e-6, "of another moment"
    for row in rows:
        put_s = [found["torchelastic_ledger_seconds_total"] for found in row]
        assert put_s == sorted(put_s), "a counter fell"
    moments_seen = {found["torchelastic_whole_job_seconds"] for found in everything}
    assert len(moments_seen) == SCRAPERS * SCRAPES, "each has its own moment"
