"""Contract: two pods of one node, which have one kernel and two networks, keep replicas for each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts import Lab, why_impossible


@pytest.mark.long
@pytest.mark.parametrize("kind", ["local", "memory"])
def test_two_pods_of_one_node_replicate_to_each_other(tmp_path: Path, kind: str) -> None:
    impossible = why_impossible()
    if impossible:
        pytest.skip(impossible)
    with Lab(["pod-a", "pod-b"]) as lab:
        networks = {lab[name].network.readlink() for name in ("pod-a", "pod-b")}
        assert len(networks) == 2, "the pods share a network"
        ranks = []
        for rank, name in enumerate(("pod-a", "pod-b")):
            variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": lab["pod-a"].address}
            variables |= {"MASTER_PORT": "29400", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
            command = lab[name].command([sys.executable, "-m", "tests.contracts.pod_ranks", kind, str(tmp_path)])
            ranks.append(
                subprocess.Popen(
                    command, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
        ended = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors for _, errors in ended)
    answers = [json.loads(output.splitlines()[-1]) for output, _ in ended]
    assert [answer["shards"] for answer in answers] == [2, 2], "\n".join(errors for _, errors in ended)
    assert "saved without" not in "".join(errors for _, errors in ended)
