"""Strangers write under the run's prefix: what they wrote is reported and ignored, and the run goes on."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from tests.cluster.etcd_cluster import ask_etcd
from tests.cluster.harness import RunRecords
from tests.cluster.light_hosts import TTL_S, LightHost, form, play, until_all_run
from tests.cluster.proxy import Proxy
from tests.waiting import until
from torchelastic.rendezvous.records import Member, Round, encode_member
from torchelastic.rendezvous.server import EtcdServer
from torchelastic.rendezvous.view import COME_BACK_S, Settings

#: How long a change of membership may take when nothing is in its way but garbage.
CHANGE_S = 5.0
#: etcd takes 1.5 MiB in a request; the larger of the two is refused by its size, the other one has to be read.
HUGE_BYTES = (1_468_006, 1_520_000)
HUGE = tuple(b'{"a":"' + b"x" * (size - 8) + b'"}' for size in HUGE_BYTES)
GARBAGE = {
    "no text": b"\x80\x04\x95\xff\x00",
    "empty": b"",
    "a list": b"[]",
    "wrong types": b'{"number": "1", "state": [], "host": 5}',
    "deep": b"[" * 100_000,
    "huge": HUGE[0],
    "above the limit": HUGE[1],
}


@dataclass
class Scene:
    """Three hosts in a running round, the last of which reaches etcd by way of a proxy; and a stranger."""

    endpoint: str
    records: RunRecords
    hosts: list[LightHost]
    round: Round
    proxy: Proxy
    written: list[str] = field(default_factory=list)

    def scribble(self, key: str, value: bytes) -> None:
        """The stranger writes, without a lease."""
        question = {"key": base64.b64encode(key.encode()).decode(), "value": base64.b64encode(value).decode()}
        ask_etcd(self.endpoint, "kv/put", question, timeout_s=5.0)
        self.written.append(key)

    def stored_round(self) -> dict[str, Any]:
        """What stands in the round's key, which must be a round."""
        key = base64.b64encode(self.records.keys.round.encode()).decode()
        (kv,) = ask_etcd(self.endpoint, "kv/range", {"key": key})["kvs"]
        document: dict[str, Any] = json.loads(base64.b64decode(kv["value"]))
        return document

    async def start_over(self) -> None:
        """The host behind the proxy loses its connection and has to read everything again."""
        host = self.hosts[-1]
        contacts = len(host.contacts_s)
        await asyncio.to_thread(self.proxy.reset)
        await until(lambda: len(host.contacts_s) > contacts, CHANGE_S, "the host is back")

    def assert_nobody_noticed(self) -> None:
        told = {
            (one.number, one.state) for host in self.hosts for one in host.rounds if one.number >= self.round.number
        }
        assert told == {(self.round.number, self.round.state)}, f"the round was disturbed: {told}"

    async def change_members(self, timeout_s: float = CHANGE_S) -> None:
        """A worker is lost; a new host with a new worker comes, which has never known anything but what it reads."""
        number, host = self.hosts[0].round.number, self.hosts[1]
        host.lose(next(iter(host.workers)))
        after = await until_all_run(self.hosts, 2, timeout_s, after=number)
        newcomer = self.hosts[-1].another("newcomer")
        await newcomer.start()
        try:
            newcomer.ask("w3")
            await until_all_run([*self.hosts, newcomer], 3, CHANGE_S, after=after.number)
        finally:
            await newcomer.membership.stop()


def in_a_scene(etcd: EtcdServer, run_id: str, scenario: Callable[[Scene], Awaitable[None]], leader: int = 0) -> None:
    """Play a scenario; the host with that number leads."""
    records = RunRecords(etcd.endpoint, run_id)

    async def run(hosts: list[LightHost]) -> None:
        await hosts[leader].start()
        await until(lambda: hosts[leader].leads, CHANGE_S, "it leads")
        await asyncio.gather(*(host.start() for number, host in enumerate(hosts) if number != leader))
        scene = Scene(etcd.endpoint, records, hosts, await form(hosts), proxy)
        await scenario(scene)
        assert scene.written, "there was no garbage"

    with Proxy((etcd.host, etcd.port)) as proxy:
        make = partial(LightHost, run_keys=records.keys, settings=Settings(2, 3, last_call_s=30.0, ttl_s=TTL_S))
        direct = [(etcd.host, etcd.port)]
        endpoints = [direct, direct, [proxy.endpoint]]
        play(lambda: [make(one, name=f"host-{number}") for number, one in enumerate(endpoints)], run, start=0)


def test_garbage_among_the_members_is_reported_and_ignored(
    etcd: EtcdServer, run_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def is_reported(key: str) -> None:
        await until(lambda: f"ignored: {key}" in caplog.text, CHANGE_S, f"{key} is reported")

    async def scenario(scene: Scene) -> None:
        for kind, garbage in GARBAGE.items():
            stranger = scene.records.keys.member(f"stranger {kind}")
            scene.scribble(stranger, garbage)
            await is_reported(stranger)
            # and over the record of somebody who trains
            scene.scribble(scene.records.keys.member("w2"), garbage)
            await scene.start_over()
            scene.assert_nobody_noticed()
        await scene.change_members()

    in_a_scene(etcd, run_id, scenario)


@pytest.mark.long
def test_garbage_in_place_of_the_round_is_reported_ignored_and_written_over_by_whoever_reads_it_next(
    etcd: EtcdServer, run_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(scene: Scene) -> None:
        key = scene.records.keys.round
        for kind, garbage in GARBAGE.items():
            caplog.clear()
            scene.scribble(key, garbage)
            await until(lambda: caplog.text.count(f"ignored: {key}") >= 3, CHANGE_S, f"all have reported {kind}")
            scene.assert_nobody_noticed()
            await scene.start_over()
            document = scene.stored_round()
            assert (document["number"], document["roster"]) == (scene.round.number, list(scene.round.roster)), kind
        await asyncio.sleep(TTL_S)
        scene.assert_nobody_noticed()
        await scene.change_members(COME_BACK_S + CHANGE_S)

    in_a_scene(etcd, run_id, scenario)


@pytest.mark.parametrize("kind", ["no text", pytest.param("above the limit", marks=pytest.mark.slow)])
def test_garbage_in_place_of_the_round_does_not_stop_a_change_of_membership(
    etcd: EtcdServer, run_id: str, kind: str
) -> None:
    async def scenario(scene: Scene) -> None:
        scene.scribble(scene.records.keys.round, GARBAGE[kind])
        # if the leader hears of it too late, it puts the round back first, and then nobody counts as lost for a while
        await scene.change_members(COME_BACK_S + CHANGE_S)

    in_a_scene(etcd, run_id, scenario)


@pytest.mark.long
@pytest.mark.parametrize(
    ("key", "leader"),
    [("incarnation", 0), ("leader", 0), ("leader", 2)],
    ids=["the store's name", "the leader's name", "the leader's name, which begins a new session"],
)
def test_garbage_in_place_of_a_name_costs_no_round_and_leaves_the_run_with_a_leader(
    etcd: EtcdServer, run_id: str, key: str, leader: int
) -> None:
    async def scenario(scene: Scene) -> None:
        for garbage in GARBAGE.values():
            scene.scribble(getattr(scene.records.keys, key), garbage)
            await scene.start_over()  # by the last host
            scene.assert_nobody_noticed()
        if key == "incarnation":
            await asyncio.sleep(TTL_S)
        scene.assert_nobody_noticed()
        await scene.change_members()

    in_a_scene(etcd, run_id, scenario, leader)


@pytest.mark.long
def test_garbage_at_the_keys_of_agents_costs_no_round(etcd: EtcdServer, run_id: str) -> None:
    async def scenario(scene: Scene) -> None:
        keys = scene.records.keys
        for garbage in GARBAGE.values():
            for host in scene.hosts:
                scene.scribble(f"{keys.agents}{host.name}/{host.agent_id}", garbage)
                scene.scribble(f"{keys.processes}{host.name}/{host.agent_id}", garbage)
            # an earlier agent, it may seem, of the host that is yet to come
            scene.scribble(f"{keys.processes}newcomer/stranger", garbage)
            await scene.start_over()
            scene.assert_nobody_noticed()
        await scene.change_members()

    in_a_scene(etcd, run_id, scenario)


def test_keys_that_are_no_text_under_the_prefix_disturb_nobody(etcd: EtcdServer, run_id: str) -> None:
    async def scenario(scene: Scene) -> None:
        keys = scene.records.keys
        for key in (keys.members, keys.agents, keys.round, keys.leader, f"{keys.root}/"):
            question = {"key": base64.b64encode(key.encode() + b"\xff\xfe\x00").decode(), "value": "AA=="}
            ask_etcd(scene.endpoint, "kv/put", question)
            scene.written.append(key)
        await scene.start_over()
        scene.assert_nobody_noticed()
        await scene.change_members()

    in_a_scene(etcd, run_id, scenario)


#: It would clear the terminal, and begin a line of its own there.
OBEYED = "\x1b[2J\nWARNING all is lost"


@pytest.mark.long
def test_names_of_keys_that_a_terminal_would_obey_are_written_as_escapes_by_agents_and_commands(
    etcd: EtcdServer, run_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    def told(command: str) -> str:
        options = [f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}"]
        done = subprocess.run(
            [sys.executable, "-m", "torchelastic.launch", command, *options], capture_output=True, text=True, timeout=60
        )
        return done.stdout + done.stderr

    async def scenario(scene: Scene) -> None:
        keys = scene.records.keys
        garbage, forged = keys.member(f"garbage{OBEYED}"), keys.member(f"forged{OBEYED}")
        scene.scribble(garbage, b"no record")
        scene.scribble(forged, encode_member(Member("forged", "stranger", "127.0.0.1:1", ready_for=1)))
        scene.scribble(f"{keys.status}stranger{OBEYED}", b"no record")
        scene.scribble(f"{keys.agents}stranger{OBEYED}/1", b"no record")
        names = [f"ignored: {keys.member(name)}" for name in ("garbage", "forged")]
        await until(lambda: all(name in caplog.text for name in names), CHANGE_S, "they are reported")
        await scene.change_members()
        output = caplog.text
        for command in ("status", "events"):
            output += await asyncio.to_thread(told, command)
        assert output.count("ignored: ") >= 6, "members at agents and commands, the status at the commands"
        assert r"\x1b[2J\nWARNING all is lost" in output
        assert "\x1b" not in output
        assert not [line for line in output.splitlines() if line.startswith("WARNING all")]
        assert not [
            member for host in scene.hosts for one in host.rounds for member in one.roster if "forged" in member
        ]

    in_a_scene(etcd, run_id, scenario)
