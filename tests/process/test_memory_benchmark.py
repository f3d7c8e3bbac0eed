"""The benchmark of the memory tier, with states of a few megabytes: its figures are figures."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LIMIT_S = 120


@pytest.fixture(scope="module")
def lines() -> dict[str, dict[str, Any]]:
    """What it prints, by the name of the benchmark."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        arguments = (
            "--size 2x2 --runs 2 --endurance-s 1 --endurance-mib 2 --parts save,async_thread,replicated,endurance"
        )
        command = [sys.executable, "-m", "benchmarks.memory_tier", *arguments.split(), "--folder", folder]
        command += ["--contenders", "ours,dcp,flashpoint"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == 0, done.stderr
        assert not list(Path(folder).iterdir()), "something was left behind"
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["benchmark"].removeprefix("memory_tier."): line for line in printed}


def test_one_line_is_printed_for_each_part_with_the_load_of_the_machine(lines: dict[str, dict[str, Any]]) -> None:
    assert list(lines) == ["save", "async_thread", "replicated", "endurance"]
    assert all(line["environment"]["load_1min"] >= 0 for line in lines.values())


def test_ours_and_plain_dcp_save_and_both_are_ratios_to_a_copy(lines: dict[str, dict[str, Any]]) -> None:
    for name in ("ours", "dcp"):
        found = lines["save"][name]
        assert found["runs"] == 2, found
        assert found["memcpy_ms"] > 0
        assert found["x"] >= found["best_x"] > 0
    assert lines["save"]["ours_over_dcp"] > 0


def test_a_save_in_the_background_is_not_done_before_it_returns_and_takes_processor_time(
    lines: dict[str, dict[str, Any]],
) -> None:
    found = lines["async_thread"]["ours"]
    assert found["best_done_x"] > found["best_x"] > 0
    assert found["best_cpu_x"] > 0


def test_replicas_are_measured_between_two_ranks(lines: dict[str, dict[str, Any]]) -> None:
    assert lines["replicated"]["ranks"] == 2
    found = lines["replicated"]["ours"]
    assert found["best_x"] > 0
    assert found["best_x_alone"] > 0


def test_a_contender_that_is_not_there_is_named_with_the_remedy(lines: dict[str, dict[str, Any]]) -> None:
    assert "--flashpoint-python" in lines["save"]["flashpoint"]["not_measured"]


def test_many_saves_leave_as_many_files_as_before(lines: dict[str, dict[str, Any]]) -> None:
    found = lines["endurance"]
    assert found["saves"] >= 2
    assert found["files"]["max"] >= found["files"]["min"] > 0
    assert found["file_bytes"]["max"] >= 2 * 2**20
