"""A thousand groups, each given up while a rank waits in it, leave no descriptor and no thread behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchelastic.network.ports import unused_ports
from torchelastic.processes import dies_with_parent

ROOT = Path(__file__).parents[2]
#: Not for one more group each, but for what a runtime opens when it likes.
SPARE = 3


@pytest.mark.long
@pytest.mark.parametrize("times", [100, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(400)])])
def test_no_descriptor_and_no_thread_is_left_by_groups_that_were_given_up(times: int) -> None:
    (port,) = unused_ports("127.0.0.1")
    command = [sys.executable, "-m", "tests.process.reforming_rank"]
    # torch looks up a name for the other end of each connection, for its log: a lost packet must not take 5 s each time
    environment = {**os.environ, "RES_OPTIONS": "timeout:1 attempts:1"}
    ranks = [
        subprocess.Popen(
            dies_with_parent([*command, str(rank), str(port), str(times)]),
            cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    second = ranks[1].communicate(timeout=60 + times / 4)
    first = ranks[0].communicate("\n", timeout=20)  # the store's server, on which the other relies, goes last
    reports: list[dict[str, Any]] = []
    for process, (out, errors) in zip(ranks, (first, second), strict=True):
        assert process.returncode == 0, errors[-3000:]
        reports.append(json.loads(out))
    for report in reports:
        assert report["woken"] == times, "somebody was not woken by the cut"
        for what, early in report["early"].items():
            assert report["end"][what] <= early + SPARE, f"{what}: {early} early, {report['end'][what]} at the end"
