"""From the training thread to the agent, through memory that outlives the worker: real processes, really killed."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from torch.utils.data import Dataset

from tests.process.ledger_workers import killed, started
from tests.waiting import wait_until
from torchelastic.data import ElasticBatchSampler, ElasticLoader
from torchelastic.observe.ledger import shared_counts as page_module
from torchelastic.observe.ledger.accounts import Account
from torchelastic.observe.ledger.counters import Counters
from torchelastic.observe.ledger.host_ledger import HostLedger
from torchelastic.observe.ledger.keeper import LedgerKeeper
from torchelastic.observe.ledger.ledger_events import LedgerEvent, LedgerFormatError
from torchelastic.observe.ledger.meter import LEDGER_VARIABLE, Meter, this_worker
from torchelastic.observe.ledger.shared_counts import (
    PAGE_BYTES,
    PageReader,
    PageWriter,
    page_paths,
)
from torchelastic.processes.family import above
from torchelastic.processes.identity import process_started_ns


class Lines:
    """A journal in a list."""

    def __init__(self) -> None:
        self.events: list[LedgerEvent] = []

    def write(self, event: LedgerEvent, book: HostLedger) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass

    def of(self, kind: str) -> list[Any]:
        return [event for event in self.events if event.kind == kind]


@pytest.fixture
def socket_path(tmp_path: Path) -> Iterator[Path]:
    """Of an agent that is not there; whatever is left in shared memory for it is an error."""
    path = tmp_path / "agent"
    yield path
    name = page_paths(path, 0)[0].name.rpartition(".")[0]
    left = list(page_module.SHARED_MEMORY.glob(f"{name}.*"))
    for one in left:
        one.unlink()
    assert not left


def page_of(socket_path: Path, pid: int) -> Path:
    return next(path for path in page_paths(socket_path, pid) if path.exists())


def until_committed(keeper: LedgerKeeper, worker: str, steps: int) -> None:
    def is_seen() -> bool:
        keeper.poll()
        life = keeper.now().lives.get(worker)
        return life is not None and life.tally.committed >= steps

    wait_until(is_seen, 10, f"{steps} steps are seen")


@pytest.mark.parametrize("what", ["commit", "save"])
def test_what_a_killed_worker_had_counted_is_there_and_sums_to_its_wall_time(what: str, socket_path: Path) -> None:
    journal = Lines()
    keeper = LedgerKeeper(socket_path, "host", journal)
    for number in range(2):
        with started(what, socket_path) as process:
            keeper.started(process.pid, f"0.{number}")
            until_committed(keeper, f"host/0.{number}", 200)
            seen = keeper.now().lives[f"host/0.{number}"].tally
            killed(process)
            ended_ns = time.monotonic_ns()
            keeper.ended(process.pid, exit_code=-9, is_loss=True, cause="killed by SIGKILL")
        life = keeper.book.lives[f"host/0.{number}"]
        assert life.tally.committed >= seen.committed >= 200
        assert ended_ns <= (life.ended_ns or 0) <= time.monotonic_ns()
        assert sum(life.amounts(0)) == life.wall_ns(0) == (life.ended_ns or 0) - life.started_ns
        assert keeper.book.why_wrong(0) == ""
        assert life.amounts(0)[Account.REPLAYED] > 0, "the step that it died in"
    assert len(journal.of("end")) == 2
    assert all(event.exit_code == -9 and event.step > 0 for event in journal.of("end"))
    if what == "save":
        saves = journal.of("save")
        assert saves
        assert all(event.tier == "memory" and event.stall_ns >= 0 for event in saves)


def test_a_death_that_is_known_early_is_the_end(socket_path: Path) -> None:
    keeper = LedgerKeeper(socket_path, "host")
    with started("commit", socket_path) as process:
        keeper.started(process.pid, "0.0")
        until_committed(keeper, "host/0.0", 1)
        killed(process)
        keeper.died(process.pid)
        known_ns = time.monotonic_ns()
        time.sleep(0.02)  # what the kernel takes until the parent hears of it
        keeper.ended(process.pid, exit_code=-9, is_loss=True)
    assert (keeper.book.lives["host/0.0"].ended_ns or 0) <= known_ns


def test_counts_that_are_read_while_they_are_written_are_never_torn(socket_path: Path) -> None:
    with started("commit", socket_path) as process:
        path = page_of(socket_path, process.pid)
        reader = PageReader(path)
        path.unlink()
        assert reader.pid == process.pid
        tallies = [tally for _ in range(3_000) if (tally := reader.counts()) is not None]
        reader.close()
    assert len(tallies) > 2_000, "some read may meet both slots being written, most must not"
    assert all(tally.why_wrong() == "" for tally in tallies)
    since = [tally.since_ns for tally in tallies]
    assert since == sorted(since)
    assert tallies[-1].committed > tallies[0].committed


def test_whatever_byte_of_the_newest_counts_is_wrong_the_counts_before_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "page"
    writer = PageWriter(path, 1)
    older, newer = Counters.begun(5).switched(9, Account.IDLE), Counters.begun(5).switched(20, Account.IDLE)
    writer.write_counts(older)
    writer.write_counts(newer)
    whole = path.read_bytes()
    assert PageReader(path).counts() == newer
    for at in range(64, 64 + 168):
        damaged = bytearray(whole)
        damaged[at] ^= 0x40
        path.write_bytes(damaged)
        reader = PageReader(path)
        assert reader.counts() == (newer if 68 <= at < 72 else older), at  # four bytes are padding
        reader.close()


def test_counts_that_do_not_sum_up_are_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "page"
    writer = PageWriter(path, 1)
    right = Counters.begun(5).switched(9, Account.IDLE)
    writer.write_counts(right)
    writer.write_counts(replace(right, since_ns=10))
    assert PageReader(path).counts() == right


def test_what_is_no_page_is_refused(tmp_path: Path) -> None:
    for name, content in {"short": b"x" * 100, "zeros": bytes(PAGE_BYTES), "later": b"te-pages\x09" * 8192}.items():
        (tmp_path / name).write_bytes(content[:PAGE_BYTES])
        with pytest.raises(LedgerFormatError):
            PageReader(tmp_path / name)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(LedgerFormatError):
        PageReader(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "short")
    with pytest.raises(OSError, match="link"):
        PageReader(tmp_path / "link")


def test_a_page_full_of_rubbish_costs_the_agent_nothing(socket_path: Path) -> None:
    keeper = LedgerKeeper(socket_path, "host")
    keeper.started(os.getpid(), "0.0")
    path = page_paths(socket_path, os.getpid())[1]
    writer = PageWriter(path, os.getpid())
    rubbish: list[dict[str, Any]] = [
        {"kind": "end", "at_ns": 1}, {"kind": "save", "at_ns": "now"}, {"kind": "?"}, {"kind": "start", "at_ns": 5},
        {"kind": "counted", "at_ns": 5, "tally": {}}, {"kind": "re_form", "at_ns": 1, "phases_ns": [1]}, {},
        {"kind": "straggler", "at_ns": 4, "worker": "other/0.0"},
    ]  # fmt: skip
    for fields in rubbish:
        writer.write_event(fields)
    ahead = Counters.begun(0).switched(time.monotonic_ns() + 10**15, Account.IDLE)
    writer.write_counts(ahead)
    keeper.poll()
    assert keeper.book.lives["host/0.0"].ended_ns is None, "of its end a worker tells nothing"
    keeper.ended(os.getpid(), exit_code=0, is_loss=False)
    assert set(keeper.book.lives) == {"host/0.0"}
    assert keeper.book.why_wrong(time.monotonic_ns()) == ""
    assert keeper.book.counts.stragglers == 1


def test_where_there_is_no_shared_memory_the_page_is_next_to_the_socket(
    socket_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "SHARED_MEMORY", tmp_path / "none")
    meter = Meter(process_started_ns(os.getpid()))
    meter.publish(str(socket_path))
    meter.synchronized(3)
    keeper = LedgerKeeper(socket_path, "host")
    keeper.started(os.getpid(), "p")
    keeper.poll()
    assert keeper.book.lives["host/p"].tally.step == 3
    assert list(tmp_path.iterdir()) == [], "the page is gone once the agent has it"


def _commit_once(meter: Meter) -> None:
    meter.step_committed()


def test_a_forked_child_leaves_its_parents_page_alone(socket_path: Path) -> None:
    meter = Meter(process_started_ns(os.getpid()))
    meter.publish(str(socket_path))
    meter.synchronized(0)
    keeper = LedgerKeeper(socket_path, "host")
    keeper.started(os.getpid(), "0.0")
    child = multiprocessing.get_context("fork").Process(target=_commit_once, args=(meter,))
    child.start()
    child.join(20)
    assert child.exitcode == 0
    keeper.poll()
    assert keeper.now().lives["host/0.0"].tally.committed == 0
    meter.step_committed()
    keeper.poll()
    assert keeper.now().lives["host/0.0"].tally.committed == 1


def test_only_what_the_agent_has_started_publishes_to_it(socket_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_LEDGER_OF", "")  # as it is put back to after this test
    meter = Meter(time.monotonic_ns())
    monkeypatch.setenv(LEDGER_VARIABLE, f"{os.getppid() + 1}:{socket_path}")
    meter.publish_to_parent()
    assert not meter.is_published
    for agent_pid in (os.getppid(), above(os.getpid())[-1]):  # nothing, or a wrapper script, stands between
        meter = Meter(time.monotonic_ns())
        monkeypatch.setenv(LEDGER_VARIABLE, f"{agent_pid}:{socket_path}")
        meter.publish_to_parent()
        assert meter.is_published
        page_of(socket_path, os.getpid()).unlink()


def test_a_process_that_a_worker_has_started_is_no_worker(socket_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEDGER_VARIABLE, f"{os.getppid()}:{socket_path}")
    meter = Meter(time.monotonic_ns())
    monkeypatch.setenv("TORCHELASTIC_LEDGER_OF", f"{os.getppid()}:{os.getpid() + 1}")
    meter.publish_to_parent()
    assert not meter.is_published
    monkeypatch.setenv("TORCHELASTIC_LEDGER_OF", f"{os.getppid() + 1}:{os.getpid() + 1}")  # of another launcher
    meter.publish_to_parent()
    assert meter.is_published
    page_of(socket_path, os.getpid()).unlink()


def test_a_wait_for_a_batch_of_an_elastic_loader_is_data_wait() -> None:
    class Slow(Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            time.sleep(0.02)
            return index

    meter = this_worker()
    meter.synchronized(0)
    before_ns = meter.tally().totals[Account.DATA_WAIT]
    loader = ElasticLoader(Slow(), ElasticBatchSampler(4, 2, epochs=1, seed=0))
    for _ in range(2):
        next(loader)
        meter.step_committed()
    totals = meter.tally().totals
    assert totals[Account.DATA_WAIT] - before_ns >= 80_000_000
    assert sum(totals) == meter.tally().since_ns - meter.tally().started_ns
