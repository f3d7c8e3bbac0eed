"""Each benchmark at its smallest size: it ends well, leaves nothing behind, and prints its figures as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.environment import percentile, summary

ROOT = Path(__file__).parents[2]
LIMIT_S = 280

#: What makes it small, and what is in its figures.
QUICK = {
    "agent_footprint --runs 1 --idle-s 0.5": "idle",
    "checkpoint --sizes 1x4 --runs 1 --folder {folder}": "load_x",
    "checkpoint.replicated --sizes 1x4 --runs 1 --ways ours --folder {folder}": "ours",
    "collectives --blocks 3 --calls 5": "runs",
    "death --runs 1 --megabytes 0": "pidfd_to_lock",
    "iter_manager --runs 1 --calls 100 --step-ms 0": "runs",
    "leader --members 16 --runs 1": "runs",
    "ledger --steps 100 --runs 1": "runs",
    "memory_tier --parts save,load --size 1x2 --runs 1 --contenders ours --folder {folder}": "best_x",
    "rendezvous --members 2 --runs 1 --peers= --processes 1": "runs",
    "replica_transfer --mib 1 --runs 1 --tensors 4": "runs",
    "stream --rounds 1 --batches 5 --workers 0 --ranks 1": "next_us",
}
#: With jobs of several workers, some of which are killed.
JOBS = {
    "deadlines --jobs 0 --deadlines 1 --seed 1 --reserve-s 4 --shortest-s 12 --longest-s 13": "missed",
    "join --models 1M --joins 1 --workers 2": "runs",
    "overhead --pairs 1 --workers 1 --steps-ms 1": "runs",
    "recovery --kills 1 --workers 2 --salvage discard": "kill_to_committed_ms",
    "sharded --model 1M --workers 3 --kills 1 --rounds 1 --steps 3 --step-ms 5": "transfer_over_floor",
    "storm --faults 1 --modes drop --workers 2 --spares 2 --step-ms 50": "runs",
}


@pytest.mark.parametrize(
    ("command", "figure"),
    [
        *(pytest.param(*each, marks=pytest.mark.long) for each in QUICK.items()),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in JOBS.items()),
    ],
)
@pytest.mark.timeout(LIMIT_S + 20)
def test_a_benchmark_prints_its_figures_as_json(command: str, figure: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    module, *words = command.format(folder=folder).split()
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    printed: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert printed
    assert all(document["benchmark"].startswith(module.partition(".")[0]) for document in printed)
    assert all(document["environment"]["load_1min"] >= 0 for document in printed)
    assert f'"{figure}' in done.stdout
    assert list(folder.iterdir()) == []


def test_every_benchmark_that_the_makefile_runs_is_tried() -> None:
    named = {
        line.split("-m benchmarks.")[1].split()[0]
        for line in (ROOT / "Makefile").read_text().splitlines()
        if "-m benchmarks." in line
    }
    assert named - {"memory"} <= {command.split()[0] for command in (*QUICK, *JOBS)}


@pytest.mark.parametrize(("percent", "expected"), [(1, 2), (50, 100), (95, 190), (99, 198), (100, 200)])
def test_percentiles_are_values_by_nearest_rank(percent: int, expected: int) -> None:
    assert percentile(list(range(200, 0, -1)), percent) == expected


def test_a_censored_value_is_larger_than_all_and_never_hides_in_a_percentile() -> None:
    found = summary([1.0] * 98, censored=2)
    assert (found["p50"], found["p95"], found["p99"], found["max"]) == (1.0, 1.0, None, None)
    assert (found["runs"], found["censored"]) == (98, 2)
