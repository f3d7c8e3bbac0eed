"""`torchelastic doctor` with real etcds: serving, gone, stopped, full, guarded, encrypted; hosts that meet there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.cluster.secured_etcd import PASSWORD, Authority, SecuredEtcd, guard
from tests.hosts import Lab
from torchelastic.doctor.etcd_facts import check, gather_etcd, open_store
from torchelastic.doctor.etcd_rules import judge_etcd
from torchelastic.doctor.findings import Finding, Level
from torchelastic.doctor.meeting import meet
from torchelastic.doctor.meeting_rules import MeetingFacts, judge_meeting
from torchelastic.processes.background import side_by_side
from torchelastic.rendezvous.credentials import Credentials
from torchelastic.rendezvous.server import EtcdServer
from torchelastic.rendezvous.store import CoordinationStore, Put, StoreError
from torchelastic.rendezvous.url import RendezvousUrl, parse_url
from torchelastic.testing.etcd import running_etcd

OK, NOTE, WARNING, ERROR = Level.OK, Level.NOTE, Level.WARNING, Level.ERROR
NOBODY = Credentials()
TRAINER = Credentials(user="trainer", password=PASSWORD)
LONG_S = 60.0
MIB = 2**20


def url_of(*servers: EtcdServer | str, run_id: str = "doctor") -> RendezvousUrl:
    endpoints = ",".join(server if isinstance(server, str) else server.endpoint for server in servers)
    return parse_url(f"etcd://{endpoints}/{run_id}?min_workers=1")


def text_of(findings: Sequence[Finding]) -> str:
    return "\n".join(f"{one.level.name} {one.what} | {one.because} | {one.remedy}" for one in findings)


def bad(findings: Sequence[Finding]) -> list[Level]:
    return [finding.level for finding in findings if finding.level >= WARNING]


# etcd -----------------------------------------------------------------------------------------------------------------


def test_an_etcd_that_serves_is_all_right_and_is_left_as_it_was(etcd: EtcdServer, run_id: str) -> None:
    url = url_of(etcd, run_id=run_id)
    facts = gather_etcd(url, NOBODY)
    (endpoint,) = facts.endpoints
    assert endpoint.leader_id != 0
    assert endpoint.version.startswith("3.")
    assert endpoint.db_bytes > 0
    assert endpoint.quota_bytes is not None
    assert facts.alarms == ()
    assert len(facts.commits_s) == 5
    assert facts.asks_for_login is False
    assert bad(judge_etcd(facts)) == []
    store = open_store(url, NOBODY)
    try:
        assert store.list_prefix(url.root).items == ()
    finally:
        store.close()


def test_one_of_several_endpoints_that_is_away_is_a_warning(etcd: EtcdServer) -> None:
    found = check(url_of("127.0.0.1:1", etcd), NOBODY)
    assert bad(found) == [WARNING]
    assert "127.0.0.1:1 is unreachable" in text_of(found)
    assert "a commit takes" in text_of(found)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_etcd_that_is_gone_or_stopped_is_an_error(number: signal.Signals) -> None:
    with running_etcd() as server:
        os.kill(server.pid, number)
        ended = side_by_side({"check": lambda: check(url_of(server), NOBODY)}, {"check": 12.0})
        endpoint = server.endpoint
    assert "check" in ended, "it hangs"
    found = ended["check"].result()
    assert bad(found) == [ERROR]
    assert found[0].what == f"{endpoint} is unreachable"


def fill(store: CoordinationStore) -> None:
    for number in range(20):
        store.txn((), (Put(f"/much/{number}", os.urandom(MIB)),))


def test_an_etcd_that_is_full_is_an_error_with_the_way_out() -> None:
    with running_etcd(options=("--quota-backend-bytes", str(4 * MIB))) as server:
        url = url_of(server)
        store = open_store(url, NOBODY)
        try:
            with pytest.raises(StoreError, match="space exceeded"):
                fill(store)
        finally:
            store.close()
        facts = gather_etcd(url, NOBODY)
    assert facts.alarms == ("NOSPACE",)
    assert facts.endpoints[0].quota_bytes == 4 * MIB
    found = judge_etcd(facts)
    assert bad(found) == [ERROR]
    assert "alarm disarm" in text_of(found)
    assert "of 4.00 MiB" in text_of(found)


def test_endpoints_of_two_clusters_are_an_error(etcd: EtcdServer) -> None:
    with running_etcd(options=("--initial-cluster-token", "another")) as other:
        found = check(url_of(etcd, other), NOBODY)
    assert bad(found) == [ERROR]
    assert "different clusters" in text_of(found)


@pytest.fixture(scope="module")
def guarded() -> Iterator[EtcdServer]:
    with running_etcd() as server:
        guard(server, "job7")
        yield server


@pytest.mark.parametrize(
    ("credentials", "run_id", "found", "said"),
    [
        (TRAINER, "job7", [], ("a commit takes",)),
        (Credentials(user="trainer", password="horse-wrong"), "job7", [ERROR], ("refuses", "has another password")),
        (TRAINER, "job8", [ERROR], ("refuses this client", "grant-permission")),
        (NOBODY, "job7", [ERROR], ("does not take a write", "--etcd-user")),
    ],
)
def test_a_guarded_etcd_wants_the_right_login(
    guarded: EtcdServer, credentials: Credentials, run_id: str, found: list[Level], said: tuple[str, ...]
) -> None:
    judged = check(url_of(guarded, run_id=run_id), credentials)
    assert bad(judged) == found, text_of(judged)
    assert all(words in text_of(judged) for words in said), text_of(judged)
    assert PASSWORD not in text_of(judged)
    assert "horse-wrong" not in text_of(judged)


def test_an_encrypted_etcd_wants_its_authority(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    server_pair = authority.issue("server", common_name="etcd", names="IP:127.0.0.1")
    client = authority.issue("client", common_name="trainer")
    with SecuredEtcd(server_pair.cert, server_pair.key, authority.cert) as server:
        refused = check(url_of(server), NOBODY)
        facts = gather_etcd(url_of(server), Credentials(str(authority.cert), str(client.cert), str(client.key)))
    assert bad(refused) == [ERROR]
    assert "--etcd-cacert" in text_of(refused)
    assert bad(judge_etcd(facts)) == []
    assert facts.endpoints[0].quota_bytes is not None  # read over TLS too


# Hosts ----------------------------------------------------------------------------------------------------------------


class Meet(Protocol):
    def __call__(self, *hosts: dict[str, Any], wanted: int = 0, wait_s: float = LONG_S) -> list[MeetingFacts]: ...


@pytest.fixture
def meet_all(etcd: EtcdServer, run_id: str) -> Iterator[Meet]:
    """Has hosts meet at the shared etcd."""
    root = f"/torchelastic/{run_id}"
    with closing(open_store(url_of(etcd), NOBODY)) as store:

        def hold(*hosts: dict[str, Any], wanted: int = 0, wait_s: float = LONG_S) -> list[MeetingFacts]:
            parts = {
                str(number): partial(
                    meet, store, f"{root}/doctor", wanted or len(hosts), wait_s, "127.0.0.1", **settings
                )
                for number, settings in enumerate(hosts)
            }
            ended = side_by_side(parts, dict.fromkeys(parts, LONG_S))
            return [ended[part].result() for part in parts]

        yield hold
        assert store.list_prefix(f"{root}/").items == ()  # nothing is left behind


def test_hosts_find_each_other_and_compare_their_versions(meet_all: Meet) -> None:
    facts = meet_all(
        {"name": "a", "boot_id": "1", "facts": {"torch": "2.13.0"}},
        {"name": "b", "boot_id": "2", "facts": {"torch": "2.13.0"}},
        {"name": "c", "boot_id": "3", "facts": {"torch": "2.6.0"}},
    )
    assert [[visit.host.name for visit in one.visits] for one in facts] == [["b", "c"], ["a", "c"], ["a", "b"]]
    found = judge_meeting(facts[0])
    assert bad(found) == [WARNING], text_of(found)
    assert "this host reaches b, c" in text_of(found)
    assert "2.6.0 on c" in text_of(found)


def test_a_host_that_does_not_come_is_waited_for_no_longer_than_told(meet_all: Meet) -> None:
    (facts,) = meet_all({}, wanted=2, wait_s=0.3)
    assert facts.visits == ()
    found = judge_meeting(facts)
    assert bad(found) == [ERROR]
    assert "1 of 2 hosts came" in text_of(found)


_IN_A_LAB = """
import os, sys
os.environ["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = "python"
from torchelastic.doctor.meeting import check
from torchelastic.rendezvous.credentials import Credentials
from torchelastic.rendezvous.url import parse_url
url = parse_url("etcd://" + sys.argv[1] + "/doctor?min_workers=1")
for finding in check(url, Credentials(), 2, 20.0, [], {}):
    print(finding.level.name, finding.what, flush=True)
os._exit(0)
"""


def lab_meeting(lab: Lab) -> list[str]:
    command = [sys.executable, "-c", _IN_A_LAB, lab.etcd.endpoint]
    hosts = [
        subprocess.Popen(lab[name].command(command), stdout=subprocess.PIPE, text=True) for name in ("node-a", "node-b")
    ]
    return [host.communicate(timeout=LONG_S)[0] for host in hosts]


def test_hosts_that_do_not_reach_each_other_say_so(labs: Callable[..., Lab]) -> None:
    lab = labs("node-a", "node-b")
    for output in lab_meeting(lab):
        assert "OK 2 hosts came: node-a, node-b" in output
        assert "OK this host reaches node-" in output
        assert "ERROR" not in output
    lab.cut("node-a", "node-b")
    for output in lab_meeting(lab):
        assert "OK 2 hosts came: node-a, node-b" in output
        assert "ERROR node-" in output
        assert "is not reached at 10.77." in output


@pytest.mark.slow
def test_two_doctors_meet_by_the_command_line(etcd: EtcdServer, run_id: str) -> None:
    command = [sys.executable, "-m", "torchelastic.launch", "doctor", "--json", "--nnodes=2", "--wait=20"]
    command += [f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}"]
    environment = {**os.environ, "TORCHELASTIC_METADATA": "none"}
    doctors = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for one in doctors:
        out, _ = one.communicate(timeout=LONG_S)
        found = {finding["check"]: finding["level"] for finding in json.loads(out)["findings"]}
        assert {found[name] for name in ("reach of hosts", "versions of hosts")} == {"ok"}
        assert one.returncode == 1  # for etcd's address is one of this host alone
