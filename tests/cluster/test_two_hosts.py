"""Two hosts with the same command train the imagenet example; one loses its power in mid-run and comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.imagenet.digits import TRAIN_IMAGES
from examples.imagenet.events import read_events
from tests.cluster.harness import ROOT
from tests.hosts import why_impossible

SCRIPT = ROOT / "deploy" / "hosts" / "two_hosts.py"
STEPS_PER_EPOCH = 15


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("off", "epochs"),
    [("host-b", 8), pytest.param("host-a", 16, marks=pytest.mark.slow)],
)
def test_a_host_that_is_powered_off_and_comes_back_costs_no_image_and_the_report_shows_both(
    tmp_path: Path, off: str, epochs: int
) -> None:
    if impossible := why_impossible():
        pytest.skip(impossible)
    folder = tmp_path / "run"
    command = [sys.executable, str(SCRIPT), f"--folder={folder}", f"--digits={tmp_path / 'digits'}"]
    done = subprocess.run(
        [*command, f"--epochs={epochs}", f"--off={off}"], capture_output=True, text=True, cwd=tmp_path, check=False,
        env={key: value for key, value in os.environ.items() if key != "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"},
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}\n{said(folder)}"
    steps = epochs * STEPS_PER_EPOCH
    result = json.loads((folder / "result.json").read_text())
    assert result["ledger"] == {"steps": steps, "trained": epochs * TRAIN_IMAGES, "lost": 0, "repeated": 0}
    assert result["steps"] == steps
    assert result["top1"] > 0.9
    sizes = [event.world_size for event in read_events(folder / "events") if event.kind == "commit"]
    changes = [size for size, before in zip(sizes, [0, *sizes[:-1]], strict=True) if size != before]
    assert changes == [2, 1, 2]
    check_report(json.loads((folder / "report.json").read_text()), off, steps)
    assert (folder / "report.html").stat().st_size > 10_000


def check_report(report: dict[str, Any], off: str, steps: int) -> None:
    """`torchelastic report --json` over the journals of both hosts must tell of the loss and of the return."""
    assert report["is_over"]
    assert report["sums_are_exact"]
    assert len(report["hosts"]) == 3, "one journal of the host that stayed, two of the other"
    (failure,) = report["failures"]
    (lost,) = failure["lost"]
    assert lost["name"].startswith(f"{off}-")
    assert lost["how"] == "its agent was lost"
    assert failure["world_size"] == 1
    assert failure["steps_back"] == 0
    lives = sorted(
        (life for life in report["workers"] if life["host"].startswith(off)), key=lambda one: one["began_ns"]
    )
    assert [life["is_loss"] for life in lives] == [True, False]
    returned = lives[1]
    assert returned["began_ns"] > failure["at_ns"]
    assert returned["step"] == steps
    assert 0 < returned["committed"] < steps
    (join,) = [event for event in report["events"] if event["worker"] == returned["worker"] and event["kind"] == "join"]
    assert join["text"] == "joined round 3 as rank 1, world size 2"


def said(folder: Path) -> str:
    """What the hosts have written, for the message of a failure."""
    return "\n".join(file.read_text(errors="replace")[-3000:] for file in sorted(folder.glob("*.txt")))
