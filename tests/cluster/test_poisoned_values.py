"""Values that no agent writes, under the keys that agents read, and errors that nobody foresaw: a run goes on."""

from __future__ import annotations

import base64
import os
import signal
import socket
from pathlib import Path

import pytest

from tests.cluster.conftest import MakeJob
from tests.cluster.etcd_cluster import ask_etcd
from tests.cluster.harness import ROOT, RunRecords, process_tree
from tests.waiting import wait_until
from torchelastic.agent.predecessors import ProcessRecord
from torchelastic.processes.identity import Process, this_place
from torchelastic.rendezvous.records import Member, encode_member
from torchelastic.rendezvous.server import EtcdServer

#: Several launchers and their workers have to start.
pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

#: Whole numbers that `float()` does not take, numbers that `int()` does not take, and what no recursion gets out of.
HUGE, INFINITE, DEEP = b"7" * 400, b"1e400", b"[" * 900 + b"]" * 900
MEMBER = encode_member(Member("stranger", "nowhere", "h:1", patience_s=15.0))


def put(etcd: EtcdServer, key: str, value: bytes) -> None:
    question = {"key": base64.b64encode(key.encode()).decode(), "value": base64.b64encode(value).decode()}
    ask_etcd(etcd.endpoint, "kv/put", question, timeout_s=5.0)


def about(pid: bytes) -> bytes:
    """What a former agent of this very host may have written, but for its pid."""
    return ProcessRecord(this_place(), Process(4711, 1), 1, {}).encode().replace(b'"pid":4711', b'"pid":' + pid)


def test_members_and_agents_with_impossible_numbers_are_named_and_ignored_by_a_run_that_goes_on(
    jobs: MakeJob, etcd: EtcdServer, run_id: str
) -> None:
    """Two workers train; a third comes with a launcher of its own, which reads the keys of its host first."""
    keys = RunRecords(etcd.endpoint, run_id).keys
    members = {
        keys.member("huge"): MEMBER.replace(b":15.0", b":" + HUGE),
        keys.member("infinite"): MEMBER.replace(b":15.0", b":" + INFINITE),
        keys.member("deep"): MEMBER.replace(b":15.0", b":" + DEEP),
        keys.member("step"): MEMBER.replace(b'"step":0', b'"step":' + HUGE),
    }
    agents = {
        f"{keys.processes}{socket.gethostname()}/{name}": about(pid)
        for name, pid in (("huge", HUGE), ("infinite", INFINITE), ("deep", DEEP))
    }
    job = jobs(gates=[10])
    arguments = [f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", "--min-workers=2", "--max-workers=3"]
    job.start(*arguments, "--last-call=0.5", nproc=2)
    job.wait_for("held", count=2, step=10, timeout_s=120)
    for key, value in {**members, **agents}.items():
        assert value != MEMBER
        put(etcd, key, value)
    wait_until(lambda: all(f"ignored: {key}" in job.output_of(0) for key in members), 20, f"all of {members} are named")
    job.start(*arguments, nproc=1)
    wait_until(lambda: "is gathering: 1 waiting to join" in job.output(), 90, f"it is let in: {job.output()[-3000:]}")
    job.open_gate(10)
    assert job.wait(150) == [0, 0], job.output()[-4000:]
    job.check_identity(finishers=3)
    assert job.rounds() == {1: 2, 2: 3}
    for key in agents:
        assert f"ignored: {key}" in job.output_of(1)
    assert "Traceback" not in job.output()


#: Put before everything else on the path of one agent: while the file is there its protocol fails, as a bug would.
FAILS = """
import os
from pathlib import Path
from torchelastic.rendezvous import leadership

advance = leadership.advance

def fails(view, event, now_s):
    if Path(os.environ["FAULT"]).exists():
        raise RuntimeError("a bug that a test has put here")
    return advance(view, event, now_s)

leadership.advance = fails
"""


def test_an_agent_that_fails_while_it_leads_says_why_and_lets_another_lead(
    jobs: MakeJob, etcd: EtcdServer, run_id: str, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAILS)
    fault = tmp_path / "fault"
    records = RunRecords(etcd.endpoint, run_id)
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    arguments = [f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", "--min-workers=3", "--max-workers=3"]
    job = jobs(gates=[10])
    job.start(*arguments, "--last-call=60", nproc=1, PYTHONPATH=path, FAULT=str(fault))
    wait_until(lambda: "this agent leads run" in job.output_of(0), 60, "the first agent leads")
    other = job.start(*arguments, "--last-call=60", nproc=2)
    job.wait_for("held", count=3, step=10, timeout_s=120)
    assert len(records.terms()) == 1
    fault.touch()
    family = process_tree(other.pid)
    victim = next(event["pid"] for event in job.of("formed", round=1) if event["pid"] in family)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: "this agent leads run" in job.output_of(1), 20, f"the other one leads: {job.output()[-3000:]}")
    job.open_gate(10)
    assert job.wait(150) == [0, 0], job.output()[-4000:]
    job.check_identity(finishers=3)
    assert job.rounds() == {1: 3, 2: 3}
    said = job.output_of(0)
    assert "a bug in torchelastic: the session with etcd failed" in said
    assert "Traceback" in said
    assert "RuntimeError: a bug that a test has put here" in said
    assert "this agent stops leading run" in said
    assert "a bug" not in job.output_of(1)
    assert len({term.value for term in records.terms()}) == 2
