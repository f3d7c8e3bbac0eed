"""What `make test` says while it runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.progress import MEAN_S, line, work_s

ROOT = Path(__file__).parents[2]


def test_tests_count_with_what_their_ring_takes() -> None:
    assert work_s(["tests/pure/test_a.py::x", "tests/cluster/test_b.py::y"]) == MEAN_S["pure"] + MEAN_S["cluster"]
    assert work_s(["test_elsewhere.py::x"]) == 1.0


@pytest.mark.parametrize(
    ("done_s", "all_s", "said"),
    [
        (25.0, 100.0, " 25%  30 of 4,000 tests, 1:05 so far, about 3:15 left"),
        (100.0, 100.0, "100%  30 of 4,000 tests, 1:05 so far, about 0:00 left"),
        (0.0, 100.0, "  0%  30 of 4,000 tests, 1:05 so far"),
        (0.0, 0.0, "100%  30 of 4,000 tests, 1:05 so far, about 0:00 left"),
    ],
)
def test_the_time_left_follows_from_the_share_of_the_work(done_s: float, all_s: float, said: str) -> None:
    assert line(30, 4000, done_s, all_s, 65.0) == said


@pytest.mark.parametrize("workers", ["0", "1"], ids=["alone", "xdist"])
def test_a_run_says_how_far_it_is_and_still_names_what_fails(tmp_path: Path, workers: str) -> None:
    (tmp_path / "conftest.py").write_text("import tests.progress\ntests.progress._EVERY_S = 0.0\n")
    (tmp_path / "test_them.py").write_text("def test_good(): pass\ndef test_bad(): assert 1 == 2\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.progress",
        "-n",
        workers,
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    lines = ran.stdout.splitlines()
    assert any(each.startswith(" 50%  1 of 2 tests, 0:0") for each in lines), ran.stdout
    assert any("test_them.py::test_bad" in each and each.startswith("FAILED ") for each in lines), ran.stdout
    assert lines[-1].strip("= ").startswith("1 failed, 1 passed"), ran.stdout
