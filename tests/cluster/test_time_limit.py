"""`torchelastic run --time-limit`: the workers stop before it, and the launcher says that they did."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.few_examples import some_daily
from torchelastic.launch.run_options import limited
from torchelastic.lifetime import STOPPED_EARLY

SCRIPT = """
import sys, time
from pathlib import Path
from torchelastic.lifetime import IterManager
manager = IterManager(redundant_time=0.5, save_ckpt_time=0.1, velastic_dir=sys.argv[1])
for _ in range(100_000):
    manager.iter()
    if manager.should_save_ckpt():
        Path(sys.argv[1], "saved").write_text(str(manager.iter_count))
    if manager.should_stop:
        break
    time.sleep(0.01)
sys.exit(manager.exit_code)
"""
VARIABLE = "TORCHELASTIC_TERMINATION_TIME"


def run(folder: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torchelastic.launch", "run", "--standalone", "--page=off", *options, str(script)]
    environment = {**os.environ, "TORCHELASTIC_METADATA": "none", **variables}
    return subprocess.run([*command, str(folder)], env=environment, capture_output=True, text=True, timeout=90)


def test_a_worker_saves_and_stops_before_the_limit_and_is_not_started_again(tmp_path: Path) -> None:
    done = run(tmp_path, "--time-limit=8")
    assert done.returncode == STOPPED_EARLY, done.stderr
    assert int((tmp_path / "saved").read_text()) > 1
    assert done.stderr.count("deadline: elastic instance") == 1, "one life, one stop"


@pytest.mark.parametrize(
    ("limit", "variables"),
    some_daily([("0", {}), ("nan", {}), ("5", {VARIABLE: "soon"})], lambda case: case[0] == "nan"),
)
def test_what_is_no_limit_is_refused_before_anything_is_started(
    tmp_path: Path, limit: str, variables: dict[str, str]
) -> None:
    done = run(tmp_path, f"--time-limit={limit}", **variables)
    assert done.returncode == 2
    assert ("--time-limit is " if not variables else f"{VARIABLE} is 'soon'") in done.stderr
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("known", "limit_s", "told"),
    [
        (None, None, None),
        (None, 60.0, "1060.000"),
        ("", 60.0, "1060.000"),
        ("2000", 60.0, "1060.000"),
        ("1030", 60.0, None),
        ("900", 60.0, "1060.000"),
    ],
)
def test_of_two_ends_the_nearer_counts_and_one_in_the_past_does_not(
    known: str | None, limit_s: float | None, told: str | None
) -> None:
    environment = {} if known is None else {VARIABLE: known}
    assert limited(environment, limit_s, now_s=1000.0) == ({} if told is None else {VARIABLE: told})
