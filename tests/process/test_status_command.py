"""`torchelastic status`, `events` and `top` as a person at a terminal meets them, with a real etcd."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.few_examples import some_daily
from tests.waiting import wait_until
from torchelastic.launch.main import main
from torchelastic.observe.ledger.accounts import NOTHING, Account, plus
from torchelastic.observe.ledger.figures import Seen
from torchelastic.observe.ledger.host_ledger import HostLedger
from torchelastic.observe.ledger.journal import Head, JournalWriter
from torchelastic.observe.ledger.ledger_events import End, Save, Start
from torchelastic.observe.status.publishing import Publisher
from torchelastic.observe.status.run_status import EventLine, HostStatus, WorkerStatus
from torchelastic.rendezvous.etcd import EtcdStore
from torchelastic.rendezvous.records import Keys, Member, Round, RoundState, encode_member, encode_round
from torchelastic.rendezvous.server import EtcdServer
from torchelastic.rendezvous.url import RendezvousUrl, parse_url

S = 10**9


def address(etcd: EtcdServer, run_id: str) -> list[str]:
    return [f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", "--connect-timeout=5"]


class RunOfOneWorker:
    """What etcd holds of a run, and an agent of it that tells of one worker: without the worker."""

    def __init__(self, url: RendezvousUrl) -> None:
        self.keys, self.events = Keys(url.root), [self.event("joined round 1")]
        self._store = EtcdStore(url.endpoints)
        self._lease = self._store.grant_lease(60.0).lease_id
        self._thread = threading.Thread(target=lambda: asyncio.run(self._publish()), daemon=True)
        self._over: Callable[[], object] = lambda: None
        self._steps = 0

    def start(self) -> None:
        self._store.put(self.keys.round, encode_round(Round(1, RoundState.RUNNING, ("m0",), because="complete")))
        self._store.put(self.keys.member("m0"), encode_member(Member("m0", "node-1")), self._lease)
        self._store.put(f"{self.keys.agents}node-1/node-1-0badcafe", b"{}", self._lease)
        self._thread.start()

    def stop(self) -> None:
        self._over()
        self._thread.join(20.0)
        self._store.close()

    def wait_for_periods(self, count: int) -> None:
        wanted = self._steps + count
        wait_until(lambda: self._steps >= wanted, 30, "the status is written again")

    def close_the_run(self) -> None:
        self._store.put(self.keys.round, encode_round(Round(1, RoundState.CLOSED, ("m0",))))
        self._store.revoke_lease(self._lease)
        self._lease = 0

    def event(self, text: str) -> EventLine:
        return EventLine(at_s=time.time(), host="node-1", kind="save", text=text, worker="node-1/0.0", rank=0)

    async def _publish(self) -> None:
        publisher = Publisher(
            self._store, self.keys, "0badcafe", lease=lambda: self._lease, status=self._status, agents=lambda: 1
        )
        task = asyncio.ensure_future(publisher.run())
        loop = asyncio.get_running_loop()
        self._over = lambda: loop.call_soon_threadsafe(task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    def _status(self, every_s: float) -> HostStatus:
        self._steps += 1
        amounts = plus(NOTHING, Account.PRODUCTIVE, self._steps * S)
        worker = WorkerStatus(
            worker="node-1/0.0", host="node-1", pid=os.getpid(), rank=0, round=1, step=self._steps, amounts=amounts
        )
        seen = Seen(self._steps * S, self._steps * S, amounts, workers=1, committed=self._steps)
        return HostStatus(
            host="node-1", incarnation="0badcafe", at_s=time.time(), every_s=every_s, workers=(worker,), seen=seen,
            events=tuple(self.events),
        )  # fmt: skip


@contextlib.contextmanager
def running(etcd: EtcdServer, run_id: str) -> Iterator[RunOfOneWorker]:
    run = RunOfOneWorker(parse_url(f"etcd://{etcd.endpoint}/{run_id}?min_workers=1&max_workers=1"))
    run.start()
    try:
        yield run
    finally:
        run.stop()


def test_status_as_json_is_that_of_now_and_its_sums_close(
    etcd: EtcdServer, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(etcd, run_id) as run:
        run.wait_for_periods(3)  # the first status was written, and no other, since nobody looks
        assert main(["status", *address(etcd, run_id), "--json"]) == 0
        first = json.loads(capsys.readouterr().out)
        run.wait_for_periods(1)
        assert main(["status", *address(etcd, run_id), "--json"]) == 0
        second = json.loads(capsys.readouterr().out)
    assert second["step"] > first["step"] >= 3
    assert [member["member_id"] for member in second["members"]] == ["m0"]
    assert second["workers"][0]["pid"] == os.getpid()
    assert second["hosts"][0]["every_s"] == 1.0, "the agent was told that somebody looks"
    assert sum(second["seen"]["amounts_ns"].values()) == second["seen"]["worker_ns"] == second["step"] * S
    assert second["figures"]["goodput"]["value"] == 1.0


@pytest.mark.parametrize("command", ["status", "top"])
def test_without_a_terminal_status_and_top_print_one_table_and_end(
    command: str, etcd: EtcdServer, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(etcd, run_id):
        assert main([command, *address(etcd, run_id)]) == 0
    said = capsys.readouterr().out
    assert f"run {run_id}" in said
    assert "\x1b" not in said
    assert re.search(r"^ +0 +node-1 +\d+ ", said, re.MULTILINE)
    assert "productive 100 %" in said
    assert "joined round 1" in said


@pytest.mark.parametrize("command", ["status", "events", "top"])
def test_a_run_that_etcd_does_not_know_is_named(
    command: str, etcd: EtcdServer, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *address(etcd, run_id)]) == 1
    assert f"knows no run '{run_id}': see --rdzv-id" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "events", "top"])
def test_an_etcd_that_is_not_there_is_named(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=x", "--connect-timeout=0.2"]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_who_waits_for_an_etcd_that_does_not_answer_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    assert main(["status", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=x", "--connect-timeout=4"]) == 1
    text = "etcd at 127.0.0.1:1 has not answered yet: trying for 4 s (--connect-timeout)"
    assert [record.getMessage() for record in caplog.records] == [text]


@pytest.mark.parametrize("command", ["status", "events", "top"])
def test_a_password_on_the_command_line_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--rdzv-endpoint=me:secret@h:1", "--rdzv-id=x"])
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert "--etcd-password-file" in said
    assert "secret" not in said


def test_a_damaged_status_is_named_and_the_others_are_shown(
    etcd: EtcdServer, run_id: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with running(etcd, run_id) as run:
        store = EtcdStore(parse_url(f"etcd://{etcd.endpoint}/{run_id}?min_workers=1&max_workers=1").endpoints)
        store.put(f"{run.keys.status}evil", b"\x80")
        store.close()
        assert main(["status", *address(etcd, run_id)]) == 0
    assert f"{run.keys.status}evil does not hold JSON" in caplog.text
    assert "node-1" in capsys.readouterr().out


# --- events -----------------------------------------------------------------------------------------------------------


def test_followed_events_come_once_as_they_happen_until_the_run_is_closed(
    etcd: EtcdServer, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    said = ""
    with running(etcd, run_id) as run:
        follow = ["events", *address(etcd, run_id), "--follow"]
        thread = threading.Thread(target=lambda: codes.append(main(follow)), daemon=True)
        thread.start()
        for text in ("saved step 1", "saved step 2"):
            run.events.append(run.event(text))
            until_s = time.monotonic() + 30.0
            while text not in said:
                assert time.monotonic() < until_s, said
                said += capsys.readouterr().out
                time.sleep(0.05)
        run.close_the_run()
        thread.join(30.0)
    said += capsys.readouterr().out
    assert codes == [0]
    assert [line.rpartition(": ")[2] for line in said.splitlines()] == [
        "joined round 1",
        "saved step 1",
        "saved step 2",
    ]


def write_journal(folder: Path, host: str, began_s: int, run_id: str = "job7") -> None:
    writer = JournalWriter(folder, f"ledger-{host}-1", Head(run_id, host, 0, began_s * S))
    events = [
        Start(at_ns=1 * S, worker=f"{host}/0.0"),
        Start(at_ns=1 * S, worker=f"{host}/1.0"),
        Save(at_ns=5 * S, worker=f"{host}/0.0", rank=0, round=1, step=10, stall_ns=S // 4),
        End(at_ns=9 * S, worker=f"{host}/0.0", rank=0, round=1, step=12, exit_code=-9),
    ]
    for event in events:
        writer.write(event, HostLedger())
    writer.close()


def test_events_of_journals_come_by_time_from_all_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_journal(tmp_path / "a", "a", 1_700_000_000)
    write_journal(tmp_path / "b", "b", 1_700_000_003)
    paths = ["--journal", str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(["events", *paths]) == 0
    lines = [line.split("  ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "a: 2 workers: started",
        "b: 2 workers: started",
        "a/0.0 (rank 0): saved step 10, training stopped for 250 ms",
        "b/0.0 (rank 0): saved step 10, training stopped for 250 ms",
        "a/0.0 (rank 0): lost, signal 9",
        "b/0.0 (rank 0): lost, signal 9",
    ]
    assert main(["events", "--json", *paths]) == 0
    plain = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["host"], one["kind"]) for one in plain] == [
        *[("a", "start")] * 2, *[("b", "start")] * 2, ("a", "save"), ("b", "save"), ("a", "end"), ("b", "end"),
    ]  # fmt: skip
    assert plain[0]["at_s"] == 1_700_000_001.0
    assert plain[4]["stall_ns"] == S // 4


def test_events_of_journals_of_two_runs_are_those_of_the_one_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_journal(tmp_path, "a", 1_700_000_000)
    write_journal(tmp_path, "b", 1_700_000_003, "job8")
    assert main(["events", "--journal", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        "torchelastic events: there are journals of several runs: say which with --rdzv-id: job7, job8\n"
    )
    assert main(["events", "--journal", str(tmp_path), "--rdzv-id", "job8"]) == 0
    assert [line.split("  ", 1)[1] for line in capsys.readouterr().out.splitlines()] == [
        "b: 2 workers: started",
        "b/0.0 (rank 0): saved step 10, training stopped for 250 ms",
        "b/0.0 (rank 0): lost, signal 9",
    ]


# --- top in a terminal ------------------------------------------------------------------------------------------------


#: Ctrl-C reaches who has the terminal. Not as a preexec_fn: that is a fork of this process, which has gRPC's threads.
TAKE_THE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


#: SIGINT arrives when this module is imported, in the callback of a weak reference: Python discards what that raises.
SIGINT_AT_IMPORT = """
import signal, sys, weakref

class Finder:
    def find_spec(self, name, path, target=None):
        if name == "{module}":
            print("SIGINT arrives", file=sys.stderr)
            weakref.finalize(type("One", (), {{}})(), self.interrupt)

    def interrupt(self):
        signal.raise_signal(signal.SIGINT)
        for _ in range(10):  # the interpreter calls handlers at the end of a loop's body
            pass

sys.meta_path.insert(0, Finder())
"""
CONSOLE = "from torchelastic.launch.main import console\nconsole()\n"


class Terminal:
    """A pseudo-terminal with `torchelastic top` in it; `first` is Python that its process runs before."""

    def __init__(self, *words: str, first: str = "") -> None:
        self.master, self.slave = pty.openpty()
        self.resize(30, 100)
        self.modes = termios.tcgetattr(self.slave)
        # COLUMNS is of the terminal in which the tests run: workers of xdist have it
        left_out = {"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "COLUMNS", "LINES"}
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        program = ["-c", first + CONSOLE] if first else ["-m", "torchelastic.launch"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_THE_TERMINAL, sys.executable, *program, "top", *words],
            stdin=self.slave, stdout=self.slave, stderr=self.slave, start_new_session=True,
            env={**environment, "TERM": "xterm-256color"},
        )  # fmt: skip
        self.shown = b""

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def read(self) -> None:
        while select.select([self.master], [], [], 0.05)[0]:
            self.shown += os.read(self.master, 65536)

    def forget(self) -> None:
        self.read()
        self.shown = b""

    def wait_for(self, condition: Callable[[str], object], timeout_s: float = 30.0) -> str:
        until_s = time.monotonic() + timeout_s
        while not condition(self.text()):
            assert time.monotonic() < until_s, self.text()[-3000:]
            assert self.process.poll() is None, self.text()[-3000:]
            self.read()
        return self.text()

    def text(self) -> str:
        """What was shown, without colours; each picture begins on a new line."""
        return _plain(self.shown.decode(errors="replace").replace("\x1b[H", "\n"))

    def picture(self) -> list[str]:
        """The lines of the last one that have something in them."""
        lines = _plain(self.shown.decode(errors="replace").rpartition("\x1b[H")[2]).splitlines()
        return [line.rstrip() for line in lines if line.strip()]

    def wait(self) -> int:
        until_s = time.monotonic() + 20.0
        while self.process.poll() is None:
            assert time.monotonic() < until_s, self.text()[-3000:]
            self.read()
        self.read()
        return self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)
        os.close(self.slave)


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")


@contextlib.contextmanager
def top(*words: str, first: str = "") -> Iterator[Terminal]:
    terminal = Terminal(*words, first=first)
    try:
        yield terminal
    finally:
        terminal.close()


def check_left_as_it_was(terminal: Terminal) -> None:
    assert terminal.shown.rfind(b"\x1b[?1049h") < terminal.shown.rfind(b"\x1b[?1049l"), "the other screen is left"
    assert terminal.shown.rfind(b"\x1b[?25l") < terminal.shown.rfind(b"\x1b[?25h"), "the cursor is back"
    assert termios.tcgetattr(terminal.slave) == terminal.modes


def test_top_lives_follows_the_size_of_the_terminal_and_survives_etcd() -> None:
    with EtcdServer() as etcd, running(etcd, "job7"), top(*address(etcd, "job7"), "--interval=0.2") as terminal:
        terminal.wait_for(lambda text: "run job7" in text and "productive 100 %" in text and "q: quit" in text)
        steps = terminal.wait_for(lambda text: len(set(re.findall(r"step (\d+)", text))) >= 3)
        assert "etcd has not answered" not in steps
        terminal.wait_for(lambda _: any("restarts" in line for line in terminal.picture()))
        assert 50 < max(map(len, terminal.picture())) <= 100
        terminal.resize(30, 50)
        terminal.wait_for(lambda _: terminal.picture()[-1:] == ["q: quit"] and max(map(len, terminal.picture())) <= 50)
        assert not any("restarts" in line for line in terminal.picture()), "no place for them"
        etcd.kill()
        terminal.wait_for(lambda text: "etcd has not answered for" in text)
        etcd.restart()
        terminal.forget()
        terminal.wait_for(lambda text: "run job7" in text and "etcd has not" not in text[text.rfind("run job7") :])
        terminal.type(b"x")
        terminal.forget()
        terminal.wait_for(lambda text: "run job7" in text)
        terminal.type(b"Q")
        assert terminal.wait() == 0


@pytest.mark.parametrize("how", some_daily(["q", "ctrl-c", "sigterm"], "ctrl-c".__eq__))
def test_top_ends_cleanly(how: str, etcd: EtcdServer, run_id: str) -> None:
    with running(etcd, run_id), top(*address(etcd, run_id)) as terminal:
        terminal.wait_for(lambda text: f"run {run_id}" in text)
        if how == "sigterm":
            terminal.process.send_signal(signal.SIGTERM)
        else:
            terminal.type(b"\x03" if how == "ctrl-c" else how.encode())
        assert terminal.wait() == (128 + signal.SIGTERM if how == "sigterm" else 0)
        check_left_as_it_was(terminal)
        assert "Traceback" not in terminal.text()


def test_a_sigint_whose_exception_python_discards_ends_top(etcd: EtcdServer, run_id: str) -> None:
    with (
        running(etcd, run_id),
        top(*address(etcd, run_id), first=SIGINT_AT_IMPORT.format(module="rich.live")) as terminal,
    ):
        assert terminal.wait() == 0
        assert "SIGINT arrives" in terminal.text()
        assert termios.tcgetattr(terminal.slave) == terminal.modes


def test_control_c_ends_top_while_etcd_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(30.0)
        port = silent.getsockname()[1]
        with top(f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=x", "--connect-timeout=100") as terminal:
            with silent.accept()[0]:
                terminal.type(b"\x03")
                assert terminal.wait() == 0
            assert "Traceback" not in terminal.text()
