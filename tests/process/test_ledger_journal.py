"""The ledger on disk: what a killed agent leaves, files that rotate, and what may be wrong with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.process.ledger_workers import HEAD, ROOT, killed, started
from tests.process.small_tmpfs import small_tmpfs
from torchelastic.observe.ledger.accounts import Account
from torchelastic.observe.ledger.host_ledger import HostLedger, ledger_to_dict
from torchelastic.observe.ledger.journal import BackgroundJournal, Journal, JournalWriter, journal_files, read_journal
from torchelastic.observe.ledger.keeper import LedgerKeeper
from torchelastic.observe.ledger.ledger_events import LedgerEvent, LedgerFormatError, Straggler
from torchelastic.observe.ledger.meter import Meter

NAME = "ledger-test"


def read_journals(folder: Path) -> dict[str, Journal]:
    return {name: read_journal(paths) for name, paths in journal_files(folder).items()}


def straggler(step: int) -> Straggler:
    return Straggler(at_ns=step, worker="host/0.0", step=step)


def written(folder: Path, count: int, max_bytes: int = 2**20, keep: int = 8) -> tuple[HostLedger, JournalWriter]:
    writer, book = JournalWriter(folder, NAME, HEAD, max_bytes=max_bytes, keep=keep), HostLedger()
    for step in range(count):
        writer.write(straggler(step), book)
        book = book.after(straggler(step))
    return book, writer


def test_a_killed_agent_leaves_everything_that_it_had_written(tmp_path: Path) -> None:
    with started("journal", tmp_path) as process:
        assert process.stdout is not None
        acknowledged = [int(process.stdout.readline()) for _ in range(300)]
        killed(process)
    journal = read_journals(tmp_path)[NAME]
    steps = [event.step for event in journal.events]
    assert steps == list(range(len(steps)))
    assert len(steps) > acknowledged[-1]
    assert journal.damaged == 0
    assert journal.head == HEAD
    assert len(list(tmp_path.iterdir())) > 1, "it has rotated meanwhile"


def test_cut_off_at_any_byte_a_journal_reads_up_to_its_last_whole_line(tmp_path: Path) -> None:
    _, writer = written(tmp_path, 5)
    writer.close()
    path = writer.path
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole) + 1):
        path.write_bytes(whole[:length])
        journal = read_journals(tmp_path)[NAME]
        assert [event.step for event in journal.events] == list(range(whole[first:length].count(b"\n")))
        assert journal.damaged == 0
    path.write_bytes(whole[: first - 5])
    with pytest.raises(LedgerFormatError, match="head"):
        read_journals(tmp_path)


def test_files_rotate_old_ones_go_and_nothing_but_single_events_is_lost(tmp_path: Path) -> None:
    book, writer = written(tmp_path, 1_000, max_bytes=4096, keep=3)
    writer.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 3
    assert all(path.stat().st_size <= 4096 for path in files)
    journal = read_journals(tmp_path)[NAME]
    assert journal.events[-1].step == 999
    assert journal.events[0].step > 500
    assert journal.before.counts.stragglers == journal.events[0].step
    assert journal.book() == book


def test_lines_that_are_no_events_are_counted_and_the_rest_is_read(tmp_path: Path) -> None:
    _, writer = written(tmp_path, 3)
    writer.close()
    with writer.path.open("ab") as file:
        file.write(b"\xff\xfe\n[1, 2]\n" + b"[" * 100_000 + b'\n{"kind":"end","at_ns":"x"}\n')
        file.write(b'{"kind":"teleport","at_ns":1}\n{"kind":"drain","at_ns":77}\n')
    journal = read_journals(tmp_path)[NAME]
    assert (len(journal.events), journal.damaged, journal.unknown) == (4, 4, 1)
    assert journal.events[-1].at_ns == 77


def test_a_journal_of_a_later_version_is_refused_and_named(tmp_path: Path) -> None:
    _, writer = written(tmp_path, 1)
    writer.close()
    head, rest = writer.path.read_text().split("\n", 1)
    writer.path.write_text(json.dumps({**json.loads(head), "version": 2}) + "\n" + rest)
    with pytest.raises(LedgerFormatError, match=rf"{writer.path.name}.*version 2.*newer torchelastic"):
        read_journals(tmp_path)
    writer.path.write_text(json.dumps({**json.loads(head), "brought_forward": {}}) + "\n" + rest)
    with pytest.raises(LedgerFormatError, match="damaged head"):
        read_journals(tmp_path)


def test_a_full_disk_costs_events_and_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.process.ledger_workers", "full", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    failed = int(done.stdout)
    journal = read_journals(tmp_path)[NAME]
    assert failed > 0
    assert 0 < len(journal.events) <= 1_000 - failed
    assert done.stderr.count("cannot be written") == 1


def test_a_disk_that_is_full_when_a_file_begins_costs_the_events_of_that_time_only(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "disk", 64 * 1024) as disk:
        book, writer = written(disk, 30, max_bytes=4096)
        rest = os.statvfs(disk)
        (disk / "filler").write_bytes(b"x" * (rest.f_bavail * rest.f_frsize))
        for step in range(30, 100):
            writer.write(straggler(step), book)
        assert writer.failed > 0, "no file has begun on the full disk"
        (disk / "filler").unlink()
        for step in range(100, 130):
            writer.write(straggler(step), book)
        writer.close()
        journal = read_journals(disk)[NAME]
        assert [event.step for event in journal.events if event.step < 30] == list(range(30))
        assert [event.step for event in journal.events if event.step >= 100] == list(range(100, 130))
        assert journal.damaged == 0


def test_a_line_that_is_cut_off_by_a_full_disk_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "disk", 64 * 1024) as disk:
        book, writer = written(disk, 1)
        step = 1
        while not writer.failed:
            writer.write(straggler(step), book)
            step += 1
        subprocess.run(["mount", "-o", "remount,size=1m", str(disk)], check=True)
        writer.write(straggler(step), book)
        writer.close()
        journal = read_journals(disk)[NAME]
        assert [event.step for event in journal.events] == [*range(step - 1), step]
        assert journal.damaged == 0


def test_while_the_folder_is_away_no_older_file_goes(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    book, writer = written(folder, 100, max_bytes=4096)
    files = sorted(path.name for path in folder.iterdir())
    folder.rename(tmp_path / "away")
    for step in range(100, 200):
        writer.write(straggler(step), book)
    assert writer.failed > 8, "no file has begun meanwhile"
    (tmp_path / "away").rename(folder)
    writer.write(straggler(200), book)
    writer.close()
    assert sorted(path.name for path in folder.iterdir())[: len(files)] == files
    assert read_journals(folder)[NAME].events[-1].step == 200


class Stuck:
    """A writer on a disk that does not answer."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.written: list[LedgerEvent] = []

    def write(self, event: LedgerEvent, book: HostLedger) -> None:
        assert self.goes_on.wait(30)
        self.written.append(event)

    def close(self) -> None:
        pass


def test_a_disk_that_does_not_answer_never_keeps_the_agent_waiting() -> None:
    stuck, event, ledger = Stuck(), straggler(0), HostLedger()
    journal = BackgroundJournal(stuck)
    for _ in range(10_100):
        journal.write(event, ledger)
    assert 90 <= journal.dropped <= 100
    stuck.goes_on.set()
    journal.close()
    assert len(stuck.written) == 10_100 - journal.dropped


class Clock:
    """Nanoseconds that move when they are told to."""

    now_ns = 10**12

    def __call__(self) -> int:
        return self.now_ns


def training(folder: Path, clock: Clock, **journal: int) -> tuple[LedgerKeeper, Meter]:
    """A worker whose first step begins, and its agent, who keeps a journal."""
    writer = JournalWriter(folder / "ledger", NAME, HEAD, **journal)
    keeper = LedgerKeeper(folder / "agent", "host", writer, clock_ns=clock, started_ns=lambda _pid: clock.now_ns)
    keeper.started(os.getpid(), "0.0")
    meter = Meter(clock.now_ns, clock)
    meter.publish(str(folder / "agent"))
    meter.entered(1, 0, 1)
    meter.synchronized(0)
    return keeper, meter


@pytest.mark.parametrize("hours", [0.5, pytest.param(24, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_a_run_of_20_ms_steps_stays_bounded_in_memory_and_on_disk(hours: float, tmp_path: Path) -> None:
    clock = Clock()
    keeper, meter = training(tmp_path, clock, max_bytes=100_000, keep=3)
    seconds = int(hours * 3600)
    for second in range(seconds):
        for _ in range(50):
            clock.now_ns += 20_000_000
            meter.step_committed()
        if second % 10 == 0:
            with meter.saving("memory"):
                clock.now_ns += 3_000_000
        keeper.poll()
        if second % 600 == 599:
            meter.step_undone("a peer was lost")
            meter.group_wanted()
            meter.entered(second, 0, 1)
            meter.synchronized(50 * second)
    size = len(json.dumps(ledger_to_dict(keeper.now())))
    assert size < 60_000, f"the book has {size} bytes"
    files = list((tmp_path / "ledger").iterdir())
    assert len(files) <= 3
    assert sum(path.stat().st_size for path in files) <= 300_000
    assert keeper.now().committed() == 50 * seconds
    assert keeper.now().why_wrong(clock.now_ns) == ""
    keeper.close()
    journal = read_journals(tmp_path / "ledger")[NAME]
    assert journal.book() == keeper.book
    assert journal.book().amounts(clock.now_ns)[Account.SAVE_STALL] == 3_000_000 * -(-seconds // 10)


def test_of_a_worker_that_waits_until_all_is_killed_the_journal_ends_at_most_ten_seconds_before(tmp_path: Path) -> None:
    clock = Clock()
    keeper, meter = training(tmp_path, clock)
    meter.step_undone("a peer was lost")
    for _ in range(605):  # etcd is away, and nobody counts anything
        keeper.poll()
        clock.now_ns += 1_000_000_000
    book = read_journals(tmp_path / "ledger")[NAME].book()
    assert clock.now_ns - book.counts.last_ns <= 10_000_000_000
    assert book.amounts(book.counts.last_ns)[Account.RE_FORM] >= 595_000_000_000
    assert book.why_wrong(book.counts.last_ns) == ""
    keeper.close()
