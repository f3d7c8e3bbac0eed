"""What the agent shows to Prometheus of a worker that only counts: real processes and pages."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, cast

from tests.process.ledger_workers import killed, started
from torchelastic.agent.events import Event, LedgerWritten, WorkerExited
from torchelastic.agent.ledger_recorder import LedgerRecorder
from torchelastic.agent.worker import Worker
from torchelastic.status.ledger_collector import LedgerCollector


def test_counts_are_scraped_at_once_and_not_only_when_the_journal_has_them(tmp_path: Path) -> None:
    workers, published = [Worker(0), Worker(1, restarts=2)], list[Event]()
    recorder = LedgerRecorder(
        tmp_path / "agent", run_id="run", host="host", incarnation="a", folder=None, configured_workers=2,
        workers=lambda: workers, sees_store=lambda: False, publish=published.append,
    )  # fmt: skip
    collector = LedgerCollector(recorder.latest, run_id="run", host="host")

    def scraped() -> dict[tuple[str, str], float]:
        return {
            (sample.name.removeprefix("torchelastic_"), sample.labels.get("local_rank", "")): sample.value
            for family in collector.collect()
            for sample in family.samples
        }

    with started("commit", tmp_path / "agent") as process:
        workers[0].process = cast(Any, process)
        deadline_s = time.monotonic() + 9
        recorder.sample()
        # the journal has counts with each event, and else every ten seconds
        while scraped()["steps_committed_total", ""] < (in_journal := recorder.keeper.book.committed()) + 200:
            assert time.monotonic() < deadline_s, "200 steps that the journal has not were not seen"
            recorder.sample()
        seen = scraped()
        assert seen["worker_step", "0"] >= 200
        assert (seen["worker_up", "0"], seen["worker_up", "1"]) == (1, 0)
        assert (seen["worker_restarts_total", "0"], seen["worker_restarts_total", "1"]) == (0, 2)
        assert (seen["etcd_reachable", ""], seen["etcd_outages_total", ""]) == (0, 1)
        killed(process)
        recorder.on_event(WorkerExited(workers[0], process.pid, total_restarts=0))
        workers[0].process = None
    asyncio.run(recorder.stop())
    last = scraped()
    assert last["steps_committed_total", ""] == recorder.keeper.book.committed() >= in_journal + 200
    assert (last["worker_up", "0"], last["workers_lost_total", ""]) == (0, 1)
    assert last["etcd_reachable", ""] == 0, "as it was before the agent left the run"
    kinds = [event.event.kind for event in published if isinstance(event, LedgerWritten)]
    assert (kinds[0], kinds[-1]) == ("start", "end")
    assert "counted" not in kinds, "which is no news"
