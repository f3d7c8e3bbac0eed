"""The pods of deploy/kubernetes as processes: etcd with certificates, hosts that come, go and come too late."""

from __future__ import annotations

import base64
import http.client
import json
import re
import shlex
import signal
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.conftest import MakeJob, MakeLab
from tests.cluster.harness import ROOT, Job
from tests.cluster.pods import Pods, end, write_image
from tests.hosts import Lab
from tests.process.manifests import PAGE, container_of, secrets_of_the_page, the
from tests.waiting import wait_until
from torchelastic.rendezvous.records import Keys
from torchelastic.rendezvous.url import DEFAULT_PREFIX

MEMBERS = ("etcd-0", "etcd-1", "etcd-2")
TRAINERS = ("train-0", "train-1")
#: What Kubernetes would set on each pod of the Job.
UID = "7c1f8a52"
LABELS = {"batch.kubernetes.io/job-name": "train", "batch.kubernetes.io/controller-uid": UID}


def make_secrets(folder: Path) -> dict[str, list[Path]]:
    """Run the page's command for certificates, and sort the files as its secrets do."""
    [line] = re.findall(r"^deploy/tls/make-certs\.sh (.*)$", PAGE.read_text(), flags=re.M)
    done = subprocess.run([ROOT / "deploy/tls/make-certs.sh", *shlex.split(line)], cwd=folder, capture_output=True)
    assert done.returncode == 0, done.stderr
    return {name: [folder / file for file in files] for name, files in secrets_of_the_page().items()}


def is_healthy(lab: Lab, member: str) -> bool:
    """What the readiness probe of the manifest sees."""
    container = container_of("StatefulSet", "etcd")
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    probe = container["readinessProbe"]["httpGet"]
    with lab[member].entered():
        try:
            url = f"http://{lab[member].address}:{ports[probe['port']]}{probe['path']}"
            with urllib.request.urlopen(url, timeout=2.0) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@pytest.fixture
def lab(labs: MakeLab) -> Lab:
    return labs(*MEMBERS, *TRAINERS)


@pytest.fixture
def pods(lab: Lab, tmp_path: Path) -> Iterator[Pods]:
    """A cluster with the manifests' etcd, ready."""
    made = Pods(lab, tmp_path / "volumes", make_secrets(tmp_path))
    made.serve_names({**{name: [f"{name}.etcd"] for name in MEMBERS}, **{name: [f"{name}.train"] for name in TRAINERS}})
    members = []
    try:
        for name in MEMBERS:
            with (tmp_path / f"{name}.txt").open("wb") as log:
                command = made.command("StatefulSet", "etcd", name)
                members.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
        for name in MEMBERS:
            log_of = tmp_path / f"{name}.txt"
            wait_until(partial(is_healthy, lab, name), 30, f"{name} is ready: {log_of.read_text()[-1500:]}")
        yield made
    finally:
        end(members)


def round_of(lab: Lab, folder: Path) -> tuple[int, str]:
    """Number and state of the round that stands in etcd, over TLS as any client."""
    context = ssl.create_default_context(cafile=folder / "tls" / "ca.pem")
    context.load_cert_chain(folder / "tls" / "client.pem", folder / "tls" / "client.key")
    context.check_hostname = False  # this process asks by address, and only names are in the certificate
    key = Keys(f"{DEFAULT_PREFIX}/{LABELS['batch.kubernetes.io/job-name']}-{UID}").round
    question = json.dumps({"key": base64.b64encode(key.encode()).decode()})
    with lab["etcd-0"].entered():
        connection = http.client.HTTPSConnection(lab["etcd-0"].address, 2379, timeout=5, context=context)
        connection.request("POST", "/v3/kv/range", question)
        [stored] = json.load(connection.getresponse())["kvs"]
    document = json.loads(base64.b64decode(stored["value"]))
    return document["number"], document["state"]


def start(job: Job, pods: Pods, pod: str) -> subprocess.Popen[bytes]:
    job.agents.append(job._popen(pods.command("Job", "train", pod, LABELS), f"agent-{len(job.agents)}.txt", {}))
    return job.agents[-1]


@pytest.mark.long
def test_a_pod_that_is_added_joins_one_that_is_deleted_leaves_in_its_grace_and_its_replacement_trains_on(
    jobs: MakeJob, lab: Lab, pods: Pods, tmp_path: Path
) -> None:
    job = jobs(gates=[5, 20], wait_for_newcomer_at=[7, 30], full_world=2)
    write_image(tmp_path / "volumes", job)
    grace_s = float(the("Job", "train")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"])
    first = start(job, pods, "train-0_a")
    job.wait_for("held", step=5)
    second = start(job, pods, "train-1_a")
    job.open_gate(5)
    job.wait_for("held", count=2, step=20)
    assert len(job.of("held", step=20, round=2)) == 2, "the one that was added has joined the one that trained"
    second.send_signal(signal.SIGTERM)
    wait_until(lambda: round_of(lab, tmp_path) == (2, "gathering"), 30, f"they are asked: {job.output()[-2000:]}")
    job.open_gate(20)
    assert second.wait(grace_s) == 128 + signal.SIGTERM, job.output()[-4000:]
    replacement = start(job, pods, "train-1_b")
    assert first.wait(60) == replacement.wait(60) == 0, job.output()[-4000:]
    late = start(job, pods, "train-1_c")
    assert late.wait(60) == 0, job.output_of(3)
    assert "is already closed: it was finished before" in job.output_of(3)
    job.check_identity(finishers=2)
    assert not job.of("rolled_back"), "nobody waited for a time-out, nothing was undone"
    assert job.rounds() == {1: 1, 2: 2, 3: 1, 4: 2}
    logs = tmp_path / "volumes" / "checkpoints" / "logs"
    with_logs = {path.parent.name for path in logs.glob("*/worker_0.0.log")}
    assert with_logs == {"train-0_a", "train-1_a", "train-1_b"}, (
        "each pod's logs are kept, and the late one had no worker"
    )
    assert list((tmp_path / "volumes" / "checkpoints" / "train").iterdir()), "and checkpoints"
