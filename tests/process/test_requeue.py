"""Asking SLURM to start the job again, with an scontrol that is a process of its own. The real one: tests/slurm."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchelastic.lifetime import Requeue, requeue_job
from torchelastic.lifetime import requeue as module
from torchelastic.lifetime.requeue import PATIENCE_S

JOB = {"SLURM_JOB_ID": "42"}
Scontrol = Callable[[str], Path]


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scontrol:
    """Puts a shell script where scontrol is looked for; each call writes its words into a file `calls`."""

    def install(script: str) -> Path:
        program, calls = tmp_path / "scontrol", tmp_path / "calls"
        program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return calls

    return install


def requeue(**options: Any) -> tuple[Requeue, list[float]]:
    """The answer, with the pauses that were to be made."""
    pauses: list[float] = []
    return requeue_job(**{"environment": JOB, "sleep": pauses.append, **options}), pauses


def test_a_batch_job_is_put_back_into_the_queue(scontrol: Scontrol) -> None:
    calls = scontrol("exit 0")
    assert requeue() == (Requeue(True, "restart 1 of at most 100"), [])
    assert calls.read_text() == "requeue 42\n"


def test_of_an_array_only_the_own_element_is(scontrol: Scontrol) -> None:
    calls = scontrol("exit 0")
    array = {"SLURM_JOB_ID": "45", "SLURM_ARRAY_JOB_ID": "42", "SLURM_ARRAY_TASK_ID": "3"}
    answer, _ = requeue(environment=array)
    assert answer.asked
    assert calls.read_text() == "requeue 42_3\n"


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({}, "this is no SLURM job"),
        ({"SLURM_JOB_ID": "  "}, "this is no SLURM job"),
        ({"SLURM_JOB_ID": "42; reboot"}, "'42; reboot' is no SLURM job"),
        ({"SLURM_JOB_ID": "--help"}, "'--help' is no SLURM job"),
        ({**JOB, "SLURM_ARRAY_JOB_ID": "x", "SLURM_ARRAY_TASK_ID": "3"}, "'x_3' is no SLURM job"),
        ({**JOB, "SLURM_RESTART_COUNT": "many"}, "SLURM_RESTART_COUNT is 'many'"),
        ({**JOB, "SLURM_RESTART_COUNT": "7"}, "started again 7 times, and max_restarts is 7"),
        ({**JOB, "SLURM_RESTART_COUNT": "8"}, "started again 8 times"),
    ],
)
def test_nobody_is_asked_where_there_is_no_job_or_enough_restarts(
    scontrol: Scontrol, variables: dict[str, str], says: str
) -> None:
    calls = scontrol("exit 0")
    answer, _ = requeue(environment=variables, max_restarts=7)
    assert not answer.asked
    assert says in answer.because
    assert not calls.exists()


def test_a_controller_that_is_busy_is_asked_again_and_not_for_ever(scontrol: Scontrol, tmp_path: Path) -> None:
    calls = scontrol("echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1")
    answer, pauses = requeue()
    assert not answer.asked
    assert pauses[:5] == [1.0, 2.0, 4.0, 8.0, 10.0]
    assert PATIENCE_S - 10.0 <= sum(pauses) <= PATIENCE_S
    assert calls.read_text().count("requeue") == len(pauses) + 1
    hurried, pauses = requeue(patience_s=4.0)
    assert (hurried.asked, pauses) == (False, [1.0, 2.0])
    once = tmp_path / "once"
    scontrol(f"test -e {once} && exit 0; touch {once}; echo 'Socket timed out on send/recv operation' >&2; exit 1")
    assert requeue() == (Requeue(True, "restart 1 of at most 100"), [1.0])


def test_a_controller_that_restarts_costs_the_chain_of_jobs_nothing(scontrol: Scontrol, tmp_path: Path) -> None:
    """slurmctld is away for some seconds of real time; three attempts within 3.3 s would have missed it."""
    until = tmp_path / "until"
    until.write_text(f"{time.time() + 5.0:.0f}")
    calls = scontrol(
        f"test $(date +%s) -ge $(cat {until}) && exit 0\n"
        "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1"
    )
    began_s = time.monotonic()
    answer = requeue_job(environment=JOB, patience_s=30.0)
    assert answer.asked
    assert time.monotonic() - began_s > 4.0
    assert calls.read_text().count("requeue") > 3


def test_an_scontrol_that_hangs_is_ended(scontrol: Scontrol, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "ATTEMPT_S", 0.3)
    # its child holds the output open: whoever waits for the end of that, waits for the child
    calls = scontrol(f"sleep 600 & echo $! >> {tmp_path}/children; exec sleep 600")
    try:
        answer, pauses = requeue(patience_s=3.5)
    finally:
        for pid in (tmp_path / "children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
    assert not answer.asked
    assert "timed out after 0.3 seconds" in answer.because
    assert (calls.read_text().count("requeue"), len(pauses)) == (3, 2)
