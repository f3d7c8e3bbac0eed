"""Runs over a real etcd with the certificates of deploy/tls/make-certs.sh, by the flags that the script prints."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.harness import Job
from tests.cluster.secured_etcd import SecuredEtcd
from tests.process.made_certificates import make_certs
from torchelastic.rendezvous.server import EtcdServer

MakeJob = Callable[..., Job]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the script prints."""
    done = make_certs(tmp_path_factory.mktemp("made") / "tls", "127.0.0.1", "localhost")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of somebody else."""
    folder = tmp_path_factory.mktemp("made") / "stranger"
    assert make_certs(folder, "127.0.0.1").returncode == 0
    return folder


@pytest.fixture(scope="module")
def etcd_over_tls(said: str) -> Iterator[EtcdServer]:
    """An etcd with the flags that were printed."""
    lines = said.partition("  and with several members")[0].replace("\\\n", "").splitlines()
    [line] = [line for line in lines if line.startswith("etcd ")]
    cert, key, *others = shlex.split(line.removeprefix("etcd "))
    values = [word.partition("=")[2] for word in (cert, key)]
    assert "--client-cert-auth" in others
    with SecuredEtcd(values[0], values[1], options=others) as server:
        yield server


def launcher_flags(said: str) -> list[str]:
    [line] = re.findall(r"^torchelastic run (.*) \.\.$", said, flags=re.M)
    return shlex.split(line)


@pytest.mark.long
def test_a_run_connects_with_the_flags_that_were_printed(
    jobs: MakeJob, etcd_over_tls: EtcdServer, run_id: str, said: str
) -> None:
    job = jobs(epochs=1)
    job.start(f"--rdzv-endpoint={etcd_over_tls.endpoint}", f"--rdzv-id={run_id}", *launcher_flags(said), nproc=1)
    assert job.wait() == [0], job.output()[-4000:]
    job.check_identity(finishers=1)
