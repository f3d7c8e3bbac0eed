"""Hosts with two networks, of which the one that leads to etcd leads to no other host: `--iface` names the other one.

Each host is a set of network namespaces; see `tests.hosts`. Needs root.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import MakeJob, MakeLab
from tests.cluster.harness import ROOT, Job
from tests.hosts import Host, Lab
from tests.waiting import wait_until

NAMES = ("a", "b")
#: The interface on the second network has another name on each host.
SECOND = {"a": "eth1", "b": "rail0"}
SUBNET = "10.78.0.0/24"


@pytest.fixture
def lab(labs: MakeLab) -> Lab:
    """Both hosts reach etcd over eth0, where they do not reach each other, and each other over the second network."""
    lab = labs(*NAMES, second=SECOND)
    lab.cut(*NAMES)
    assert not lab.reaches(*NAMES, timeout_s=0.2)
    return lab


def start(job: Job, lab: Lab, *options: str, **environment: str) -> None:
    """Start the same command on both hosts."""
    for name in NAMES:
        job.start(
            f"--rdzv-endpoint={lab.etcd.endpoint}", "--rdzv-id=networks", "--nnodes=2", *options,
            nproc=1, host=lab[name], **environment,
        )  # fmt: skip


@pytest.mark.long
def test_hosts_meet_over_the_network_that_was_chosen(jobs: MakeJob, lab: Lab) -> None:
    job = jobs(epochs=1, gates=[3])
    start(job, lab, f"--iface={SUBNET}")
    job.wait_for("held", step=3, count=2)
    first = peers_of(lab["a"])
    assert lab["b"].second[1] in first, f"{first}: the workers' connections are not on the second network"
    assert lab["b"].address not in first
    job.open_gate(3)
    assert job.wait() == [0, 0], job.output()[-4000:]
    job.check_identity(finishers=2)


@pytest.mark.long
def test_without_a_choice_hosts_take_the_way_to_etcd_and_where_that_does_not_join_them_it_is_said(
    jobs: MakeJob, lab: Lab
) -> None:
    job = jobs(epochs=1, timeout_ms=8000)  # rank 0 waits so long for the other, who tries all the time
    start(job, lab)
    remedy = "choose one with `torchelastic run --iface`"
    wait_until(lambda: remedy in job.output(), 90.0, f"{remedy}; {job.output()[-3000:]}")
    assert f"at {lab['a'].address}:" in job.output() or f"at {lab['b'].address}:" in job.output()
    assert not job.of("committed")


@pytest.mark.slow
def test_workers_without_a_launcher_and_their_agents_go_by_the_variable(jobs: MakeJob, lab: Lab) -> None:
    job = jobs(epochs=1)
    url = f"etcd://{lab.etcd.endpoint}/alone?min_workers=2&max_workers=2"
    for name in NAMES:
        job.start_alone(url, f"alone-{name}", host=lab[name], TORCHELASTIC_IFACE=SUBNET)
    assert job.wait() == [0, 0], job.output()[-4000:]
    job.check_identity(finishers=2)


def doctors(lab: Lab, *options: str) -> dict[str, dict[str, list[str]]]:
    """The levels of each check of both hosts' doctors, which meet."""
    words = ["doctor", f"--rdzv-endpoint={lab.etcd.endpoint}", "--nnodes=2", "--wait=30", "--json", *options]
    command = [sys.executable, "-m", "torchelastic.launch", *words]
    running = {name: subprocess.Popen(lab[name].command(command), stdout=subprocess.PIPE, cwd=ROOT) for name in NAMES}
    found: dict[str, dict[str, list[str]]] = {}
    for name, process in running.items():
        for finding in json.loads(process.communicate(timeout=90)[0])["findings"]:
            found.setdefault(name, {}).setdefault(finding["check"], []).append(finding["level"])
    return found


def peers_of(host: Host) -> set[str]:
    """The addresses to which a host has connections."""
    lines = host.run("cat", "/proc/net/tcp").splitlines()[1:]
    established = [line.split()[2] for line in lines if line.split()[3] == "01"]
    return {".".join(str(byte) for byte in reversed(bytes.fromhex(end.partition(":")[0]))) for end in established}


def test_a_bad_name_is_refused_with_the_interfaces_that_there_are(lab: Lab, tmp_path: Path) -> None:
    script = tmp_path / "never.py"
    script.write_text("raise AssertionError('it was started')")
    words = ["run", f"--rdzv-endpoint={lab.etcd.endpoint}", "--rdzv-id=x", "--iface=eth1", str(script)]
    command = lab["b"].command([sys.executable, "-m", "torchelastic.launch", *words])
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "--iface eth1: there is no interface 'eth1'" in line
    assert "eth0 (10.77.0.2), rail0 (10.78.0.2)" in line
