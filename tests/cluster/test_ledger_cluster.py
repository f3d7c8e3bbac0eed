"""A run with a kill, a join, saves, a drain and an outage of etcd: the ledger of every worker sums to its wall time."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import MakeJob
from tests.cluster.harness import Job
from tests.waiting import wait_until
from torchelastic.observe.ledger.accounts import Account
from torchelastic.observe.ledger.figures import figures_of, seen
from torchelastic.observe.ledger.host_ledger import HostLedger
from torchelastic.observe.ledger.journal import Journal
from torchelastic.observe.ledger.merge import SILENT_NS, merged_ledgers
from torchelastic.observe.ledger.shared_counts import PageWriter, page_paths
from torchelastic.observe.report.journals import find_journals
from torchelastic.rendezvous.server import EtcdServer

ETCD_IS_SEEN_AGAIN_S = 15.0


def ledger(job: Job) -> tuple[Journal, HostLedger]:
    """The journal of the only host, and its book."""
    [journal] = find_journals([job.folder / "logs"]).journals.values()
    assert (journal.damaged, journal.unknown) == (0, 0)
    return journal, journal.book()


def of(journal: Journal, kind: str) -> list[Any]:
    return [event for event in journal.events if event.kind == kind]


def check_sums(book: HostLedger) -> None:
    """Every worker's accounts sum to its life, and all have ended."""
    assert book.lives
    for life in book.lives.values():
        assert life.ended_ns is not None
        amounts = life.amounts(0)
        assert sum(amounts) == life.ended_ns - life.started_ns == life.wall_ns(0)
        assert min(amounts) >= 0
    assert book.why_wrong(0) == ""


@pytest.fixture
def pages() -> Iterator[dict[str, Path]]:
    """Pages that workers have left whose launchers were killed, and others."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    socket_paths = {"left": f"/left-{os.getpid()}", "new": f"/new-{os.getpid()}", "alive": f"/alive-{os.getpid()}"}
    found = {}
    for name, socket_path in socket_paths.items():
        pid = os.getpid() if name == "alive" else dead.pid
        found[name] = page_paths(socket_path, pid)[0]
        PageWriter(found[name], pid).close()
        if name != "new":
            os.utime(found[name], (time.time() - 3600,) * 2)
    yield found
    for path in found.values():
        path.unlink(missing_ok=True)


def test_the_next_launcher_removes_what_dead_workers_have_left_in_shared_memory_and_nothing_else(
    jobs: MakeJob, tmp_path: Path, pages: dict[str, Path]
) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("")
    job = jobs()
    job.start_launcher("--standalone", str(script))
    assert job.wait() == [0], job.output()
    assert [name for name, path in pages.items() if path.exists()] == ["new", "alive"]


@pytest.mark.long
def test_with_a_kill_a_join_saves_and_an_outage_of_etcd_every_workers_accounts_sum_to_its_wall_time(
    jobs: MakeJob, tmp_path: Path
) -> None:
    job = jobs(
        step_ms=20, epochs=6, checkpoint_dir=tmp_path / "saved", checkpoint_every=10, gates=[15, 25],
        wait_for_newcomer_at=[40], full_world=2,
    )  # fmt: skip
    with EtcdServer() as etcd:
        job.start(
            f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=ledger", "--ttl=2", "--min-workers=1",
            f"--log-dir={job.folder / 'logs'}", nproc=2,
        )  # fmt: skip
        job.wait_for_step(14)
        etcd.kill()
        wait_until(lambda: "etcd is out of reach" in job.output(), 10, "the agent has noticed")
        [path] = (job.folder / "logs").glob("ledger-*.jsonl")
        wait_until(lambda: '"kind":"store_outage"' in path.read_text(), 10, "the ledger tells of it")
        etcd.restart()
        wait_until(lambda: "etcd is back" in job.output(), ETCD_IS_SEEN_AGAIN_S, "the agent has found it")
        job.open_gate(15)
        job.wait_for_step(24)
        killed_ns = time.monotonic_ns()
        job.kill_worker(1)
        job.open_gate(25)
        assert job.wait() == [0], job.output()[-4000:]
    journal, book = ledger(job)
    check_sums(book)

    # the killed one: its end is when it was killed, and it was a loss
    [end] = [event for event in of(journal, "end") if event.is_loss]
    assert (end.exit_code, end.cause) == (-9, "killed by SIGKILL")
    assert killed_ns - 10**9 < end.at_ns < killed_ns + 10**9
    assert len(book.lives) == 3, "two places, one of them twice"
    # what the job did is what the ledger says
    committed = len(job.of("committed"))
    assert book.committed() == committed
    assert book.counts.failures == 1
    assert {event.step for event in of(journal, "save")} >= {10, 20, 30}
    assert [event.is_over for event in of(journal, "store_outage")] == [False, True]
    assert book.counts.away_ns > 0
    joined = {event.worker for event in of(journal, "join")}
    assert joined == set(book.lives)
    recovered = of(journal, "re_form")
    assert {tuple(event.phases_ns) for event in recovered} == {("agree", "re_form", "sync", "step")}
    survivors = {event.worker for event in recovered}
    assert len(survivors) >= 1
    amounts = book.amounts(0)
    for account in set(Account) - {Account.DATA_WAIT}:
        # gloo may notice a loss before the agent has seen the end of the process
        assert amounts[account] > 0 or account.label == "detect", account.label
    for worker in survivors:
        life = book.lives[worker].amounts(0)
        assert life[Account.PRODUCTIVE] > 0 < life[Account.RE_FORM]
    run = seen([book], [0], wall_ns=(book.counts.last_ns - (book.counts.first_ns or 0)), configured_workers=2)
    figures = figures_of(run)
    assert 0 < figures.goodput.value <= 1
    assert 0 < figures.step_efficiency.value < 1
    for figure in (figures.goodput, figures.ettr, figures.participation):
        assert figure.value <= figure.attainable < 1, figure


@pytest.mark.slow
def test_after_all_were_killed_the_steps_beyond_the_checkpoint_are_replayed_in_the_ledger_of_the_first_agent(
    jobs: MakeJob, tmp_path: Path
) -> None:
    job = jobs(step_ms=20, epochs=4, checkpoint_dir=tmp_path / "saved", checkpoint_every=10, seed=5, gates=[25, 30])
    job.start("--standalone", f"--log-dir={job.folder / 'logs'}", nproc=2)
    job.wait_for("held", count=2, step=25)
    time.sleep(2.5)  # the agent looks once a second
    job.stop()
    job.agents.clear()
    job.open_gate(25)
    job.start("--standalone", f"--log-dir={job.folder / 'logs'}", nproc=2)
    job.wait_for("held", count=2, step=30)
    time.sleep(1e-9 * SILENT_NS + 1)  # so long the first agent may only be slow to write
    job.open_gate(30)
    assert job.wait() == [0], job.output()[-4000:]
    journals = find_journals([job.folder / "logs"]).journals
    books = merged_ledgers(journals)
    assert len(books) == 2
    first, second = (books[name] for name in sorted(journals, key=lambda name: journals[name].head.wall_ns))
    check_sums(first)
    check_sums(second)
    restored = [event for name in journals for event in journals[name].events if event.kind == "restore"]
    assert {event.step for event in restored} == {0, 20}
    for life in first.lives.values():
        # what it has done since its last event is written every 10 s: a journal that ends so suddenly may lack the rest
        known = life.tally.committed
        assert 20 < known <= 25
        assert life.lost_ns > 0
        assert life.amounts(0)[Account.REPLAYED] > (known - 22) * 20_000_000
    assert second.counts.restores_from_checkpoint == 1
