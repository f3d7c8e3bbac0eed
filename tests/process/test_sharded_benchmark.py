"""`python -m benchmarks.sharded` with a small model: a real kill, copies in all ways, and figures that are figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
LIMIT_S = 800


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.sharded", "--model=1M", "--workers=3", "--step-ms=5", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    done = run("--kills=2", "--rounds=1", "--steps=3", "--peers=torchrun", "--peer-runs=1")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_a_killed_worker_is_survived_and_the_transfer_has_its_floor(figures: dict[str, Any]) -> None:
    kills = figures["kills"]
    assert kills["kill_to_committed_ms"]["runs"] == 2, kills
    assert kills["kill_to_committed_ms"]["max"] > kills["beyond_one_step_ms"]["max"]
    assert kills["beyond_one_step_ms"]["max"] > kills["beyond_one_step_and_transfer_ms"]["max"]
    assert kills["transfer_over_floor"]["min"] > 0
    # rank 0's neighbour may have all that it needs in its own memory: its own shard, and the copy of the lost one
    assert 0 < kills["received_bytes"][1] < 1_059_200 * 3 * 4
    # each parameter has two moments; both survivors get all of it together, and the counters of AdamW twice
    for received, local in zip(kills["received_bytes"], kills["local_bytes"], strict=True):
        assert 1_059_200 * 3 * 4 <= received + local <= 1_059_200 * 3 * 4 + 2 * 64 * 4
    assert all(0 <= steps <= 2 for steps in kills["repeated_steps"]), "with a copy after each step"


def test_the_copies_of_each_way_are_counted_and_compared(figures: dict[str, Any]) -> None:
    ways = figures["copies"]["ways"]
    assert list(ways) == ["none", "every_20", "every_5", "every_1"]
    assert "stopped_ms" not in ways["none"]
    assert ways["every_20"]["copies"] <= 1
    assert 1 <= ways["every_1"]["copies"] <= 3
    assert ways["every_1"]["stopped_ms"]["min"] > 0
    assert ways["every_1"]["relative_to_none"]["runs"] == 1
    assert figures["copies"]["memcpy_ms"]["min"] > 0


def test_memory_is_told_in_multiples_of_the_shard(figures: dict[str, Any]) -> None:
    memory = figures["memory"]
    assert memory["shard_bytes"] >= 1_059_200 * 3 * 4 / 3
    # two of its own and two of its partner, whose shard may be larger by one row in 42
    assert 1 <= memory["own_x"] < memory["all_x"] <= 4.1


def test_the_peer_goes_on_from_its_checkpoint(figures: dict[str, Any]) -> None:
    peer = figures["peers"]["torchrun_dcp"]
    assert peer["kill_to_committed_ms"]["runs"] == 1, peer
    assert peer["times_ours"] > 0


def test_a_hybrid_mesh_that_a_kill_makes_unusable_is_an_error_that_says_so() -> None:
    done = run("--hybrid=3")
    assert done.returncode == 2
    assert "a kill leaves 2 of 3 workers, and 2 is no multiple of 3" in done.stderr


def test_workers_that_make_no_replicas_are_an_error_that_says_so() -> None:
    done = run("--peers=torchrun,torchft")
    assert done.returncode == 2
    assert "3 workers do not make replicas of 2" in done.stderr
