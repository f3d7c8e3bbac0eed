"""Reports of real runs, by the command that a person types: a group that was killed, a run that was stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import MakeJob
from tests.cluster.harness import ROOT, Job
from tests.waiting import is_gone, wait_until
from torchelastic.observe.ledger.keeper import COUNTS_EVERY_NS

#: The step in which all are killed, a save before it, and one in which the new processes wait to be looked at.
KILLED_IN, SAVED_AFTER, WATCHED_IN = 25, 20, 60


def report(job: Job) -> tuple[dict[str, Any], str]:
    """What `torchelastic report` says, as JSON and as a page."""
    command = [sys.executable, "-m", "torchelastic.launch", "report", str(job.folder / "logs")]
    pages = [
        subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
        for words in (["--json"], ["-o", "-"])
    ]
    return json.loads(pages[0]), pages[1]


def first_step_after(job: Job, killed_s: float) -> float:
    return min(float(event["t"]) for event in job.of("committed") if event["t"] > killed_s)


def status_of(job: Job) -> Any:
    """What the live page is made from."""
    url, token = job.page()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    opener.addheaders = [("Authorization", f"Bearer {token}")]
    with opener.open(f"{url}status.json", timeout=10) as answer:
        return json.load(answer)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["workers", "agent"])
def test_the_down_time_of_a_whole_group_lasts_until_its_new_processes_train_from_the_checkpoint(
    jobs: MakeJob, tmp_path: Path, victim: str
) -> None:
    job = jobs(
        step_ms=100, epochs=9, checkpoint_dir=tmp_path / "saved", checkpoint_every=10, seed=5,
        gates=[KILLED_IN, WATCHED_IN],
    )  # fmt: skip
    launcher = ("--standalone", "--rdzv-id=job7", f"--log-dir={job.folder / 'logs'}")
    agent = job.start(*launcher, nproc=2)
    job.wait_for("held", count=2, step=KILLED_IN)
    pids = [event["pid"] for event in job.of("started")]
    killed_s = time.monotonic()
    if victim == "workers":
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    else:
        agent.kill()
        assert agent.wait() == -signal.SIGKILL
        wait_until(lambda: all(map(is_gone, pids)), 10, "the workers end with their agent")
        job.agents.clear()
        job.start(*launcher, nproc=2)
    (job.folder / f"gate-{KILLED_IN}").touch()
    job.wait_for("held", count=2, step=WATCHED_IN)
    assert {event["step"] for event in job.of("loaded")} == {SAVED_AFTER}

    if victim == "workers":  # the page and the report count alike; a new agent knows nothing of the one before
        seen = wait_until(lambda: (lambda seen: seen if seen["lost"] else None)(status_of(job)["seen"]), 20, "a loss")
        assert (seen["lost"], seen["failures"]) == (2, 1)
    job.open_gate(WATCHED_IN)
    assert job.wait() == [0], job.output()[-4000:]

    document, page = report(job)
    (failure,) = document["failures"]
    assert document["seen"]["failures"] == 1
    assert len(failure["lost"]) == 2
    assert (failure["restored_from"], failure["re_formed_by"], failure["world_size"]) == ("checkpoint", 2, 2)
    assert list(failure["phases_ns"]) == ["restart", "sync", "step"]
    gap_s = first_step_after(job, killed_s) - killed_s
    # of a lost agent what is known ends with the last line of its journal
    unknown_s = 0.0 if victim == "workers" else COUNTS_EVERY_NS / 1e9
    assert gap_s - 1 < failure["down_ns"] / 1e9 < gap_s + 1 + unknown_s
    if victim == "workers":
        assert failure["steps_back"] == KILLED_IN - SAVED_AFTER
    assert "nobody trained again" not in page
    assert "1 failure" in page
    assert "2 failures" not in page


@pytest.mark.long
def test_a_worker_that_is_killed_after_ctrl_c_is_lost_and_did_not_leave_in_order(jobs: MakeJob) -> None:
    job = jobs(step_ms=10, gates=[5])
    agent = job.start("--standalone", f"--log-dir={job.folder / 'logs'}", nproc=1)
    job.wait_for("held", step=5)
    agent.send_signal(signal.SIGINT)
    assert agent.wait(60) == 128 + signal.SIGINT
    document, page = report(job)
    (worker,) = document["workers"]
    assert worker["end"] == "killed by SIGKILL", "the step that was held outlasted the patience of the agent"
    assert worker["is_loss"]
    assert [mark["kind"] for mark in document["marks"]] == ["join", "loss"]
    assert "drain" not in document["event_counts"]
    assert not re.search("left (the run )?in order", page)


@pytest.mark.long
def test_a_worker_that_leaves_in_time_after_ctrl_c_left_in_order(jobs: MakeJob) -> None:
    job = jobs(step_ms=10, epochs=1000)
    agent = job.start("--standalone", f"--log-dir={job.folder / 'logs'}", nproc=1)
    job.wait_for_step(5)
    agent.send_signal(signal.SIGINT)
    assert agent.wait(60) == 128 + signal.SIGINT
    document, _page = report(job)
    (worker,) = document["workers"]
    assert (worker["end"], worker["is_loss"]) == ("exit code 0", False)
    assert document["event_counts"]["drain"] == 1
    assert document["failures"] == []
