"""`--no-python run.sh`, where run.sh starts python and ends with its exit code: all is as without it."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from tests.cluster.harness import Job
from tests.waiting import is_gone, wait_until
from torchelastic.testing.faults import Fault

WRAPPER = f"""#!/bin/sh
{sys.executable} "$@"
exit $?
"""


class Wrapped(Job):
    """A job whose workers are started by a script."""

    forked = False

    def _program(self) -> list[str]:
        wrapper = self.folder / "run.sh"
        wrapper.write_text(WRAPPER)
        wrapper.chmod(0o755)
        return ["--no-python", str(wrapper), str(self.script)]


@pytest.mark.long
def test_a_hang_is_seen_a_kill_is_named_and_the_launcher_ends(tmp_path: Path) -> None:
    faults = [Fault("hang", "step", rank=1, step=10), Fault("kill", "step", step=20, incarnation=1)]
    job = Wrapped(tmp_path, faults, timeout_ms=60_000, hang_floor_s=1.0, wait_for_newcomer_at=[15, 25], full_world=2)
    try:
        job.start("--standalone", nproc=2)
        assert job.wait() == [0], job.output()[-4000:]
    finally:
        job.stop()
    job.check_identity(finishers=2)
    output = job.output()
    assert "did not get ready in time: its stacks follow in its log" in output
    assert re.search(r"worker \d failed: exit code 137 \(128 \+ SIGKILL\)", output)
    assert len(job.of("started")) == 4
    assert re.search(r"worker \d \(start \d, rank \d, round \d, step 40\): ended, exit code 0", output)


@pytest.mark.long
def test_sigterm_drains_them(tmp_path: Path) -> None:
    job = Wrapped(tmp_path, gates=[5])
    try:
        launcher = job.start("--standalone", nproc=2)
        job.wait_for("held", count=2)
        launcher.send_signal(signal.SIGTERM)
        wait_until(lambda: job.output().count("leaves the run, at the end of a step") == 2, 30, "both are asked")
        job.open_gate(5)
        assert job.wait() == [128 + signal.SIGTERM], job.output()[-4000:]
    finally:
        job.stop()
    assert [event["rank"] for event in job.of("finished")] == [-1, -1]
    assert "not started again" not in job.output()
    assert "lost" not in job.output()


@pytest.mark.long
def test_they_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    job = Wrapped(tmp_path, gates=[5])
    try:
        launcher = job.start("--standalone", nproc=2)
        held = job.wait_for("held", count=2)
        launcher.send_signal(signal.SIGKILL)
        pids = [int(event["pid"]) for event in held]
        wait_until(lambda: all(map(is_gone, pids)), 30, "what the wrapper has started ends too")
    finally:
        job.stop()
