"""As `docker stop` (10 s) and spot nodes of GKE (15 s) do it: SIGTERM, and SIGKILL after a grace that nobody has told.

The job is a process of its own session, which is killed as a whole.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_until
from torchelastic.checkpoint import FileSystemCheckpointManager
from torchelastic.checkpoint.api import DEFAULT_KEY
from torchelastic.processes import dies_with_parent

#: Not as long as 10 s, so that the tests are quick, and less than the 30 s that SIGTERM usually means.
GRACE_S, STEP_S = 4.0, 0.02
PATIENCE_S = 60.0
LEFT_OUT = ("TORCHELASTIC_TERM_GRACE_S", "TORCHELASTIC_DEADLINE_SIGNALS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")


def wait_for(folder: Path, step: int, job: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: job.poll() is not None or trained(folder) >= step, PATIENCE_S, "the job trains")
    assert job.poll() is None, "the job has ended"


def trained(folder: Path) -> int:
    path = folder / "done"
    return int(path.read_text()) if path.exists() else 0


def saved(folder: Path, way: str) -> int:
    """The step in the newest checkpoint; 0: there is none."""
    if way == "managed":
        path = folder / "saved"
        return int(path.read_text()) if path.exists() else 0
    checkpoint = FileSystemCheckpointManager(str(folder / "checkpoints")).get_latest_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.open_input_stream(DEFAULT_KEY) as stream:
        return int(stream.read())


def stopped(way: str, folder: Path, grace_s: float, **variables: str) -> tuple[int, int, int]:
    """The step at which SIGTERM came, the newest saved step once SIGKILL has come, and the exit code."""
    inherited = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    words = [sys.executable, "-m", "tests.process.sigterm_job", way, str(folder)]
    with (folder / "log").open("wb") as log:
        job = subprocess.Popen(
            dies_with_parent(words), env={**inherited, **variables}, stderr=log, start_new_session=True
        )
    try:
        wait_for(folder, 20, job)
        assert saved(folder, way) == 0, "no deadline is known, so nothing was saved"
        came_at = trained(folder)
        job.send_signal(signal.SIGTERM)
        try:
            job.wait(grace_s)
        except subprocess.TimeoutExpired:
            pass
    finally:
        os.killpg(job.pid, signal.SIGKILL) if job.poll() is None else None
    code = job.wait()
    return came_at, saved(folder, way), code


@pytest.mark.parametrize("way", ["managed", "train"])
def test_a_job_whose_grace_nobody_has_told_saves_at_once(way: str, tmp_path: Path) -> None:
    came_at, step, code = stopped(way, tmp_path, GRACE_S)
    log = (tmp_path / "log").read_text()
    assert code == -signal.SIGKILL, "it has gone on, as there might have been 30 s"
    assert came_at <= step <= came_at + 1.0 / STEP_S, log
    assert "SIGTERM, 30 s of grace are a guess" in log


@pytest.mark.long
@pytest.mark.parametrize("way", ["managed", "train"])
def test_a_job_that_was_told_its_grace_saves_once_at_the_end_of_it(way: str, tmp_path: Path) -> None:
    came_at, step, code = stopped(way, tmp_path, 20.0, TORCHELASTIC_TERM_GRACE_S="9")
    log = (tmp_path / "log").read_text()
    assert code == 75, log
    assert step > came_at + 0.5 / STEP_S, log
    assert "nobody has said" not in log


@pytest.mark.long
@pytest.mark.parametrize("way", ["managed", "train"])
def test_a_job_that_has_the_thirty_seconds_uses_them(way: str, tmp_path: Path) -> None:
    came_at, step, code = stopped(way, tmp_path, 40.0)
    assert code == 75, (tmp_path / "log").read_text()
    assert step > came_at + 5.0 / STEP_S
