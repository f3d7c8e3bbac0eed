"""The agent's socket: who may use it, what it answers, what it makes of garbage."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import until
from torchelastic.agent.connections import Connections
from torchelastic.agent.host_events import (
    Event,
    MemberDeclared,
    MemberWithdrawn,
    MetricsPublished,
    RoundChanged,
    WorkerLeaves,
)
from torchelastic.rendezvous.client import AgentClient, AgentError
from torchelastic.rendezvous.records import JoinRequest, Member, Round, RoundState, StateStatus

Scenario = Callable[["Host"], Awaitable[None]]


class Host:
    """Connections with nothing behind them but lists of what they have asked for."""

    def __init__(self, folder: Path) -> None:
        self.declared: list[Member] = []
        self.withdrawn: list[str] = []
        self.let_leave: list[int] = []
        self.metrics: list[tuple[int | None, list[Any]]] = []
        self.path = folder / "agent"
        self.connections = Connections(
            self.path,
            host="h",
            address="127.0.0.1",
            incarnation="abc",
            clock=time.monotonic,
            publish=self._publish,
            until_written=self._written,
        )

    def _publish(self, event: Event) -> None:
        match event:
            case MemberDeclared(member):
                self.declared.append(member)
            case MemberWithdrawn(member_id):
                self.withdrawn.append(member_id)
            case WorkerLeaves(pid):
                self.let_leave.append(pid)
            case MetricsPublished(local_rank, items):
                self.metrics.append((local_rank, items))

    async def _written(self) -> None:
        return

    async def open(self) -> Worker:
        reader, writer = await asyncio.open_unix_connection(str(self.path))
        return Worker(reader, writer)


class Worker:
    """A worker's end, in bare JSON lines."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def say(self, **message: Any) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    def say_bytes(self, data: bytes) -> None:
        self._writer.write(data)

    async def hear(self) -> dict[str, Any]:
        line = await asyncio.wait_for(self._reader.readline(), 5.0)
        assert line, "the agent hung up"
        return dict(json.loads(line))

    async def hear_of(self, op: str) -> None:
        while (await self.hear())["op"] != op:
            pass

    async def is_hung_up(self) -> bool:
        return await asyncio.wait_for(self._reader.read(), 5.0) == b""

    async def rest(self) -> bytes:
        return await self._reader.read()

    def hang_up(self) -> None:
        self._writer.close()

    def say_no_more(self) -> None:
        self._writer.write_eof()


def with_host(folder: Path, scenario: Scenario) -> None:
    async def run() -> None:
        host = Host(folder)
        await host.connections.start()
        host.connections.open()
        try:
            await scenario(host)
        finally:
            await host.connections.stop()

    asyncio.run(run())


def join(worker: Worker, **fields: Any) -> None:
    message = {"store_address": "h:1", "step": 3, "state_status": 3, "failed": False, "patience_s": 2.0, **fields}
    worker.say(op="join", **message)


def test_only_its_user_may_open_the_socket(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        assert stat.S_IMODE(host.path.stat().st_mode) == 0o600

    with_host(tmp_path, scenario)


NOBODY_UID = 65534


#: Becomes another user, says hello, and prints what came of it.
AS_NOBODY = """
import os, socket, sys
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
try:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5.0)
        connection.connect(sys.argv[1])
        connection.sendall(b'{"op":"hello","pid":1,"local_rank":0}\\n')
        print("answered " + connection.recv(1000).decode(), end="")
except OSError as error:
    print(type(error).__name__, end="")
"""


def ask_as_nobody(path: Path) -> str:
    """Connect from a process of another user; a new one, for a fork of this one may hang in gRPC, if that is loaded."""
    command = [sys.executable, "-c", AS_NOBODY, str(path), str(NOBODY_UID)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user: sudo .venv/bin/python -m pytest FILE")
@pytest.mark.parametrize("modes", ["as they are", "opened for everybody"])
def test_a_process_of_another_user_is_refused_by_the_files_modes_and_without_them_by_its_uid(
    modes: str, caplog: pytest.LogCaptureFixture
) -> None:
    with tempfile.TemporaryDirectory() as folder:  # tmp_path lies in a folder that nobody else may enter

        async def scenario(host: Host) -> None:
            if modes == "opened for everybody":
                Path(folder).chmod(0o755)
                host.path.chmod(0o666)
            outcome = await asyncio.to_thread(ask_as_nobody, host.path)
            if modes == "as they are":
                assert outcome == "PermissionError"
            else:
                assert outcome in ("answered ", "ConnectionResetError", "BrokenPipeError"), "hung up without a word"
                assert f"a process of user {NOBODY_UID} may not use the agent of user 0" in caplog.text
            assert not host.connections.by_member

        with_host(Path(folder), scenario)


def test_who_hangs_up_is_withdrawn_unless_it_has_finished(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        names = []
        for finished in (False, True):
            worker = await host.open()
            worker.say(op="hello", pid=os.getpid(), local_rank=0)
            names.append((await worker.hear())["member"])
            host.connections.on_event(RoundChanged(Round(1, RoundState.RUNNING, tuple(names), "h:1")))
            await worker.hear_of("round")
            if finished:
                worker.say(op="done", step=9)
                await worker.hear_of("noted")
            worker.hang_up()
            await until(lambda: not host.connections.by_member)
        assert host.withdrawn == names[:1]
        assert (host.declared[-1].done, host.declared[-1].step) == (1, 9)

    with_host(tmp_path, scenario)


def test_garbage_ends_that_connection_and_no_other(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        good = await host.open()
        good.say(op="hello", pid=7, local_rank=0)
        await good.hear()
        for garbage in (b"\x80\x04.\n", b"[1]\n", b'{"op":"join"}\n', b'{"op":"hello","pid":"x","local_rank":0}\n'):
            bad = await host.open()
            bad.say_bytes(garbage)
            assert await bad.is_hung_up(), garbage
        bad = await host.open()
        bad.say(op="hello", pid=8, local_rank=1)
        await bad.hear()
        join(bad, state_status=99)
        assert await bad.is_hung_up()
        join(good)
        await until(lambda: host.declared)

    with_host(tmp_path, scenario)


#: Numbers that no conversion takes, numbers that are none, what no recursion gets out of, half a character.
POISON = [
    "7" * 400,
    "-" + "7" * 400,
    "1e400",
    "NaN",
    "Infinity",
    "[" * 900 + "]" * 900,
    "[" * 20_000,
    '"\\ud800"',
    "-1",
]
HELLO = {"op": "hello", "pid": 7, "local_rank": 0}
JOIN = {"op": "join", "store_address": "h:1", "step": 3, "state_status": 3, "failed": False, "patience_s": 2.0}
DONE = {"op": "done", "step": 9}
METRICS = {"op": "metrics", "items": [["g", "n", 1.5, 0.0]]}


@pytest.mark.parametrize(
    ("before", "message", "field"),
    [
        *(((), HELLO, field) for field in ("pid", "local_rank")),
        *(((HELLO,), JOIN, field) for field in ("store_address", "step", "state_status", "failed", "patience_s")),
        ((HELLO,), DONE, "step"),
        (({"op": "metrics-hello", "pid": 7, "local_rank": 0},), METRICS, "items"),
    ],
)
def test_a_field_with_an_impossible_value_ends_that_connection_without_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: tuple[Any, ...], message: dict[str, Any], field: str
) -> None:
    async def scenario(host: Host) -> None:
        for poison in POISON:
            bad = await host.open()
            for one in before:
                bad.say(**one)
            bad.say_bytes(json.dumps({**message, field: "POISON"}).replace('"POISON"', poison).encode() + b"\n")
            bad.say_no_more()
            assert (await asyncio.wait_for(bad.rest(), 5.0)).count(b'"op":"noted"') == 0, poison
        assert host.declared == []
        assert host.metrics == []
        good = await host.open()
        good.say(**HELLO)
        await good.hear()
        join(good)
        await until(lambda: host.declared)

    with_host(tmp_path, scenario)
    assert caplog.text.count("a worker's connection ends") == len(POISON)
    assert not [record for record in caplog.records if record.exc_info]


def test_while_the_store_is_being_found_workers_wait_and_a_refusal_reaches_them(tmp_path: Path) -> None:
    async def run() -> None:
        host = Host(tmp_path)
        await host.connections.start()
        worker = await host.open()
        worker.say(op="hello", pid=7, local_rank=0)
        host.connections.fail_all("unavailable", "no etcd at x:1")
        answer = await worker.hear()
        assert (answer["op"], answer["kind"], answer["message"]) == ("fatal", "unavailable", "no etcd at x:1")
        await host.connections.stop()

    asyncio.run(run())


# --- leaving ---------------------------------------------------------------------------------------------------------


async def hear_fatal(worker: Worker) -> dict[str, Any]:
    while True:
        message = await worker.hear()
        if message["op"] == "fatal":
            return message


def test_a_worker_in_a_group_that_is_to_leave_goes_when_the_next_round_is_there_without_it(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        worker = await host.open()
        worker.say(op="hello", pid=os.getpid(), local_rank=0)
        join(worker)
        name = (await worker.hear())["member"]
        await until(lambda: len(host.declared) == 1)
        host.connections.on_event(RoundChanged(Round(1, RoundState.RUNNING, (name, "x"), "h:1")))
        assert host.connections.leave(name)
        assert host.declared[-1].leaving
        assert host.let_leave == [os.getpid()]
        join(worker)
        await until(lambda: len(host.declared) == 3)
        assert (host.declared[-1].ready_for, host.declared[-1].leaving) == (2, True)
        host.connections.on_event(RoundChanged(Round(1, RoundState.GATHERING, (name, "x"), "h:1", leaving=(name,))))
        assert host.withdrawn == []
        host.connections.on_event(RoundChanged(Round(2, RoundState.RUNNING, ("x",), "h:1")))
        assert (await hear_fatal(worker))["kind"] == "drained"
        assert host.withdrawn == [name]
        worker.say(op="done", step=8)  # it has left: nothing that it says counts any more
        worker.say_no_more()
        assert await worker.is_hung_up()
        assert len(host.declared) == 3

    with_host(tmp_path, scenario)


def test_a_spare_that_asks_to_leave_goes_at_once_and_is_not_started_again(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        host.connections.on_event(RoundChanged(Round(1, RoundState.RUNNING, ("x",), "h:1")))
        worker = await host.open()
        worker.say(op="hello", pid=4711, local_rank=0)
        join(worker)
        worker.say(op="leave")
        assert (await hear_fatal(worker))["kind"] == "drained"
        assert host.let_leave == [4711]
        assert len(host.withdrawn) == 1

    with_host(tmp_path, scenario)


LEAVES_A_NOTICE = """
import os, sys, time
from torchelastic.processes.death_notice import leave_notice, notice_path
assert leave_notice(notice_path(sys.argv[1], os.getpid()))
print("left", flush=True)
time.sleep(600)
"""


def test_a_worker_that_has_left_a_notice_is_withdrawn_at_its_death_though_its_connection_is_open(
    tmp_path: Path,
) -> None:
    async def scenario(host: Host) -> None:
        command = [sys.executable, "-c", LEAVES_A_NOTICE, str(host.path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "left\n"
        worker = await host.open()
        worker.say(op="hello", pid=process.pid, local_rank=0, notice=True)
        await worker.hear_of("welcome")
        join(worker)
        await until(lambda: host.declared)
        assert not host.withdrawn
        process.kill()
        await until(lambda: host.withdrawn)
        process.wait()

    with_host(tmp_path, scenario)


def test_a_worker_whose_notice_cannot_be_had_is_welcome_all_the_same(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        worker = await host.open()
        worker.say(op="hello", pid=os.getpid(), local_rank=0, notice=True)
        await worker.hear_of("welcome")

    with_host(tmp_path, scenario)


@pytest.mark.parametrize("said_hello", [True, False])
def test_an_agent_that_ends_says_nothing_of_workers_that_are_still_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, said_hello: bool
) -> None:
    """What a private agent says last is why it ended; asyncio before 3.12 would put a traceback behind it."""
    served: list[bool] = []

    async def scenario(host: Host) -> None:
        worker = await host.open()
        if said_hello:
            worker.say(op="hello", pid=os.getpid(), local_rank=0)
            await worker.hear_of("welcome")
        await until(lambda: any("_serve" in repr(task) for task in asyncio.all_tasks()))
        served.append(True)

    with_host(tmp_path, scenario)
    assert served
    assert not [record.getMessage() for record in caplog.records if record.name == "asyncio"]


def test_a_second_hello_ends_the_connection_and_leaves_no_ghost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(host: Host) -> None:
        worker = await host.open()
        worker.say(op="hello", pid=os.getpid(), local_rank=0)
        await worker.hear_of("welcome")
        (first,) = host.connections.by_member
        join(worker)
        await until(lambda: host.declared)
        worker.say(op="hello", pid=os.getpid(), local_rank=0)
        await until(lambda: not host.connections.by_member)
        assert host.withdrawn == [first]
        assert await worker.is_hung_up()

    with_host(tmp_path, scenario)
    assert "a second 'hello'" in caplog.text


# --- the worker's end ------------------------------------------------------------------------------------------------


def test_a_worker_that_gives_up_waiting_for_its_agents_answer_hangs_up(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "agent"))
        listener.listen()
        with pytest.raises(AgentError, match="did not answer"):
            AgentClient(str(tmp_path / "agent"), connect_timeout_s=0.2, on_round=lambda _: None)
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(5.0)
            assert json.loads(connection.makefile("rb").readline())["op"] == "hello"
            assert connection.recv(1) == b"", "it has hung up, so that no member comes of it"


ASKED = JoinRequest("h:1", 3, StateStatus.COMPLETE, False, 2.0)


async def client_of(host: Host) -> AgentClient:
    return await asyncio.to_thread(AgentClient, str(host.path), connect_timeout_s=5.0, on_round=lambda _round: None)


def tell(host: Host, *rounds: Round) -> None:
    """The agent hears of all of them in one go, and so does the worker."""
    for round_ in rounds:
        host.connections.on_event(RoundChanged(round_))


def test_a_worker_gets_its_round_though_it_broke_before_its_thread_could_look(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        client = await client_of(host)
        for number in range(1, 60, 2):
            asked = len(host.declared)
            joining = asyncio.create_task(asyncio.to_thread(client.join, ASKED))
            await until(lambda asked=asked: len(host.declared) > asked)  # type: ignore[misc]  # bound at once
            runs = Round(number, RoundState.RUNNING, (client.member_id,), "h:1")
            tell(host, runs, replace(runs, state=RoundState.BROKEN))
            assert (await asyncio.wait_for(joining, 5.0)).number == number, "else it waits, and is taken for hung"
        client.close()

    with_host(tmp_path, scenario)


def test_a_worker_whose_agent_missed_the_beginning_of_its_round_waits_no_more(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        client = await client_of(host)
        joining = asyncio.create_task(asyncio.to_thread(client.join, ASKED))
        await until(lambda: bool(host.declared))
        now = Round(1, RoundState.GATHERING, (client.member_id,), "h:1", waiting=1)
        tell(host, now)
        assert (await asyncio.wait_for(joining, 5.0)).number == 1
        assert host.connections.waiting_since_s(client.member_id) is None, "it trains"
        tell(host, replace(now, state=RoundState.BROKEN))
        assert len(host.declared) == 1, "it asks itself, with the steps that it has committed"
        client.close()

    with_host(tmp_path, scenario)


@pytest.mark.parametrize("is_broken", [False, True], ids=["runs", "broke at once"])
def test_a_worker_that_has_finished_takes_the_round_in_which_it_is_needed_once_more(
    tmp_path: Path, is_broken: bool
) -> None:
    async def scenario(host: Host) -> None:
        for _ in range(20):
            client = await client_of(host)
            first = Round(1, RoundState.RUNNING, (client.member_id,), "h:1")
            asked = len(host.declared)
            joining = asyncio.create_task(asyncio.to_thread(client.join, ASKED))
            await until(lambda asked=asked: len(host.declared) > asked)  # type: ignore[misc]  # bound at once
            tell(host, first)
            await joining
            tell(host, replace(first, state=RoundState.GATHERING))
            await asyncio.to_thread(client.done, 4, 5.0)
            closing = asyncio.create_task(asyncio.to_thread(client.wait_closed, 5.0))
            tell(host, replace(first, state=RoundState.CLOSING))
            again = replace(first, number=2)
            tell(host, again, *[replace(again, state=RoundState.BROKEN)] * is_broken)
            assert await asyncio.wait_for(closing, 5.0) is False, "else it goes home, and with it the last step"
            asked = len(host.declared)
            joining = asyncio.create_task(asyncio.to_thread(client.join, ASKED))
            if is_broken:  # which the worker may learn before it takes the round, or after
                await until(lambda asked=asked, joining=joining: len(host.declared) > asked or joining.done())  # type: ignore[misc]  # bound at once
                asks_again = len(host.declared) > asked
                assert not asks_again or host.declared[-1].ready_for == 3
                tell(host, *[replace(first, number=3)] * asks_again)
            assert (await asyncio.wait_for(joining, 5.0)).number == (3 if is_broken and asks_again else 2)
            assert is_broken or len(host.declared) == asked, "who asks for a round that it has breaks it for the others"
            client.close()

    with_host(tmp_path, scenario)
