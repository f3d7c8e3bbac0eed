"""Sources of deadlines against real files, commands and threads; and finding all of them."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.process.deadline_clocks import NOON_S, PATIENCE_S, Clocks
from tests.process.metadata_servers import Cloud
from tests.waiting import wait_until
from torchelastic.lifetime import Deadline, nearest
from torchelastic.lifetime.sources import (
    Poller,
    PreStopFile,
    SlurmDeadline,
    TerminationFile,
    close_all,
    detect,
)
from torchelastic.lifetime.sources.slurm import NoCommandError, SlurmCommandError, run_command

# --- SLURM ------------------------------------------------------------------------------------------------------------


class Squeue:
    """A runner that prints what the test wants, or fails."""

    def __init__(self, says: str | Exception) -> None:
        self.says = says
        self.commands: list[str] = []
        self.variables: Mapping[str, str] = {}

    def __call__(self, command: Sequence[str], variables: Mapping[str, str], timeout_s: float) -> str:
        self.commands.append(" ".join(command))
        self.variables = variables
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


def slurm(squeue: Squeue, clocks: Clocks, **variables: str) -> SlurmDeadline:
    environment = {"SLURM_JOB_ID": "42", **variables}
    found = SlurmDeadline.from_environment(environment, runner=squeue, clock=clocks.clock, wall_clock=clocks.wall_clock)
    assert found is not None
    return found


def test_slurm_tells_the_end_in_the_environment_at_once(clocks: Clocks) -> None:
    job = slurm(Squeue(""), clocks, SLURM_JOB_END_TIME=f"{NOON_S + 600:.0f}")
    assert job.remaining_s(clocks.now_s) == 600.0
    assert job.reason == f"SLURM_JOB_END_TIME={NOON_S + 600:.0f}"


def test_without_it_squeue_is_asked_in_a_way_that_no_setting_of_the_user_changes(clocks: Clocks) -> None:
    squeue = Squeue(f"43 {NOON_S + 5:.0f}\n42 {NOON_S + 300:.0f}\n")
    job = slurm(squeue, clocks)
    assert job.remaining_s(clocks.now_s) is None
    following_s = job.poll()
    assert following_s is not None
    assert 54.0 <= following_s <= 66.0
    assert job.remaining_s(clocks.now_s) == 300.0
    assert squeue.commands == ["squeue --noheader --jobs 42 --format %A %e %T"]
    assert squeue.variables == {"SLURM_TIME_FORMAT": "%s"}


def test_the_end_of_a_job_may_be_moved_both_ways(clocks: Clocks) -> None:
    squeue = Squeue(f"42 {NOON_S + 60:.0f}")
    job = slurm(squeue, clocks, SLURM_JOB_END_TIME=f"{NOON_S + 600:.0f}")
    job.poll()
    assert job.remaining_s(clocks.now_s) == 60.0
    squeue.says = f"42 {NOON_S + 7200:.0f}"
    job.poll()
    assert job.remaining_s(clocks.now_s) == 7200.0
    squeue.says = "42 N/A"
    job.poll()
    assert job.remaining_s(clocks.now_s) is None


@pytest.mark.parametrize("says", [SlurmCommandError("slurm_load_jobs error"), "", "42 soon", "<html>"], ids=str)
def test_a_squeue_that_fails_changes_nothing_and_is_one_warning(
    says: str | Exception, clocks: Clocks, caplog: pytest.LogCaptureFixture
) -> None:
    job = slurm(Squeue(says), clocks, SLURM_JOB_END_TIME=f"{NOON_S + 600:.0f}")
    caplog.clear()
    assert job.poll() is not None
    assert job.poll() is not None
    assert job.remaining_s(clocks.now_s) == 600.0
    (record,) = caplog.records
    assert "the end of job 42 is not known" in record.getMessage()


def test_an_end_in_the_past_is_left_from_another_job(clocks: Clocks, caplog: pytest.LogCaptureFixture) -> None:
    job = slurm(Squeue(""), clocks, SLURM_JOB_END_TIME=f"{NOON_S - 5:.0f}")
    assert job.remaining_s(clocks.now_s) is None
    assert "5 s in the past: ignored" in caplog.text


def program(folder: Path, text: str) -> str:
    path = folder / "squeue"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_real_command_is_run_with_its_variables(tmp_path: Path) -> None:
    command = program(tmp_path, 'echo "$2 $SLURM_TIME_FORMAT"; echo noise >&2')
    assert run_command([command, "a", "b"], {"SLURM_TIME_FORMAT": "%s"}, PATIENCE_S) == "b %s\n"


def test_a_command_that_fails_hangs_or_is_missing_is_one_sort_of_error(tmp_path: Path) -> None:
    with pytest.raises(SlurmCommandError, match="ended with 3: Invalid job id"):
        run_command([program(tmp_path, "echo Invalid job id >&2; exit 3")], {}, PATIENCE_S)
    with pytest.raises(SlurmCommandError, match="timed out"):
        run_command([program(tmp_path, "exec sleep 600")], {}, 0.1)
    with pytest.raises(NoCommandError):
        run_command([str(tmp_path / "none")], {}, PATIENCE_S)


# --- files ------------------------------------------------------------------------------------------------------------


def replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


def test_a_termination_file_may_come_change_and_go(tmp_path: Path, clocks: Clocks) -> None:
    path = tmp_path / "end"
    instance = TerminationFile(path, clock=clocks.clock, wall_clock=clocks.wall_clock)
    assert instance.poll() == 1.0
    assert instance.remaining_s(clocks.now_s) is None
    replace(path, f"{NOON_S + 120}\n")
    instance.poll()
    assert instance.remaining_s(clocks.now_s) == 120.0
    clocks.wall_s += 999.0  # what was read once does not move with the clock
    instance.poll()
    assert instance.remaining_s(clocks.now_s) == 120.0
    clocks.wall_s -= 999.0
    replace(path, f"{NOON_S + 60}\n")
    instance.poll()
    assert instance.remaining_s(clocks.now_s) == 60.0
    path.unlink()
    instance.poll()
    assert instance.remaining_s(clocks.now_s) is None


def test_garbage_in_a_termination_file_takes_nothing_back(
    tmp_path: Path, clocks: Clocks, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "end"
    replace(path, f"{NOON_S + 120}")
    instance = TerminationFile(path, clock=clocks.clock, wall_clock=clocks.wall_clock)
    instance.poll()
    caplog.clear()
    replace(path, "at dawn")
    instance.poll()
    instance.poll()
    assert instance.remaining_s(clocks.now_s) == 120.0
    (record,) = caplog.records
    assert "write Unix seconds into it" in record.getMessage()


def test_what_is_over_when_the_process_begins_is_left_from_its_last_life(
    tmp_path: Path, clocks: Clocks, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "end"
    replace(path, f"{NOON_S - 3}")
    instance = TerminationFile(path, clock=clocks.clock, wall_clock=clocks.wall_clock)
    instance.poll()
    assert instance.remaining_s(clocks.now_s) is None
    assert "which is over: ignored" in caplog.text
    replace(path, f"{NOON_S - 2}")  # but this was said while it lived
    instance.poll()
    assert instance.remaining_s(clocks.now_s) == -2.0


def test_a_termination_file_that_comes_later_may_say_that_the_time_is_over(tmp_path: Path, clocks: Clocks) -> None:
    path = tmp_path / "end"
    instance = TerminationFile(path, clock=clocks.clock, wall_clock=clocks.wall_clock)
    instance.poll()
    replace(path, f"{NOON_S:.0f}")  # `date +%s > end`: whole seconds
    clocks.now_s += 1.0
    clocks.wall_s += 1.0
    instance.poll()
    assert instance.remaining_s(clocks.now_s) == -1.0


def test_a_pod_ends_when_its_hook_has_touched_the_file(tmp_path: Path, clocks: Clocks) -> None:
    path = tmp_path / "bye"
    pod = PreStopFile(path, grace_s=30.0, clock=clocks.clock, wall_clock=clocks.wall_clock)
    pod.poll()
    assert pod.remaining_s(clocks.now_s) is None
    path.touch()
    os.utime(path, (NOON_S - 4.0, NOON_S - 4.0))
    pod.poll()
    assert pod.remaining_s(clocks.now_s) == 26.0
    clocks.now_s += 10.0
    clocks.wall_s += 999.0  # what was read once does not move with the clock
    pod.poll()
    assert pod.remaining_s(clocks.now_s) == 16.0


def test_the_file_of_the_container_before_is_ignored(
    tmp_path: Path, clocks: Clocks, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "bye"
    path.touch()
    os.utime(path, (NOON_S - 31.0, NOON_S - 31.0))
    pod = PreStopFile(path, grace_s=30.0, clock=clocks.clock, wall_clock=clocks.wall_clock)
    pod.poll()
    assert pod.remaining_s(clocks.now_s) is None
    assert "left from an earlier container" in caplog.text


# --- the thread -------------------------------------------------------------------------------------------------------


def test_one_source_with_a_fault_does_not_silence_the_others(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[threading.Thread] = []

    def broken() -> float:
        raise RuntimeError("a fault of ours")

    def sound() -> float:
        calls.append(threading.current_thread())
        return 0.0

    poller = Poller()
    poller.add(broken)
    poller.add(sound)
    wait_until(lambda: len(calls) >= 3)
    assert len(set(calls)) == 1
    assert calls[0].daemon
    poller.remove(sound)
    poller.remove(broken)
    wait_until(lambda: poller.thread is None)
    assert caplog.text.count("a source of deadlines failed") == 1


def test_a_source_can_be_asked_sooner_and_ends_the_thread_when_it_has_no_more_to_say() -> None:
    asked = threading.Semaphore(0)
    answers: list[float | None] = [None, 3600.0]

    def poll() -> float | None:
        asked.release()
        return answers.pop()

    poller = Poller()
    poller.add(poll)
    assert asked.acquire(timeout=PATIENCE_S)
    wait_until(lambda: len(answers) == 1)
    poller.add(poll)
    assert asked.acquire(timeout=PATIENCE_S)
    wait_until(lambda: poller.thread is None)


# --- all of it --------------------------------------------------------------------------------------------------------


@pytest.fixture
def found() -> Iterator[Callable[..., list[Deadline]]]:
    all_found: list[Deadline] = []

    def find(machine: str = "", runner: Squeue | None = None, **variables: str) -> list[Deadline]:
        environment = {"TORCHELASTIC_DEADLINE_SIGNALS": "none", **variables}
        runner = Squeue(NoCommandError("none")) if runner is None else runner
        deadlines = detect(environment, machine=lambda: machine, runner=runner)
        all_found.extend(deadlines)
        return deadlines

    yield find
    close_all(all_found)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "torchelastic-deadlines"]


def test_where_nothing_applies_nothing_is_found_and_no_thread_is_started(
    found: Callable[..., list[Deadline]],
) -> None:
    wait_until(lambda: not threads())
    assert found() == []
    assert found("Supermicro") == []
    assert found("Amazon EC2", TORCHELASTIC_METADATA="none") == []
    assert found("Amazon EC2", AWS_EC2_METADATA_DISABLED="true") == []
    assert not threads()


def test_all_that_applies_is_found_and_the_nearest_counts(
    found: Callable[..., list[Deadline]], tmp_path: Path, cloud: Cloud
) -> None:
    cloud.wall_s = None
    wall_s, now_s = time.time(), time.monotonic()
    end = tmp_path / "end"
    end.write_text(f"{wall_s + 200:.0f}")
    deadlines = found(
        runner=Squeue(f"42 {wall_s + 400:.0f}"),
        MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP=f"{wall_s + 4000:.0f}",
        TORCHELASTIC_TERMINATION_TIME=f"{wall_s + 5000:.0f}",
        TORCHELASTIC_TERMINATION_FILE=str(end),
        TORCHELASTIC_PRESTOP_FILE=str(tmp_path / "bye"),
        TORCHELASTIC_METADATA="aws,gcp,azure",
        TORCHELASTIC_METADATA_ENDPOINT=cloud.endpoint,
        SLURM_JOB_ID="42",
    )
    assert [deadline.name for deadline in deadlines] == [
        "capacity block",
        "elastic instance",
        "SLURM",
        "elastic instance",
        "Kubernetes preStop",
        "AWS spot",
        "GCP preemption",
        "Azure scheduled events",
    ]
    together = nearest(deadlines)

    def names_in(name: str, left_s: float) -> Callable[[], bool]:
        def holds() -> bool:
            which, remaining_s = together.which(now_s), together.remaining_s(now_s)
            assert remaining_s is not None
            return which is not None and which.name == name and abs(remaining_s - left_s) < PATIENCE_S

        return holds

    wait_until(names_in("elastic instance", 200.0))
    assert len(threads()) == 1
    cloud.gcp["preempted"] = "TRUE"
    wait_until(names_in("GCP preemption", 30.0))
    close_all(deadlines)
    wait_until(lambda: not threads())


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TORCHELASTIC_TERMINATION_TIME", "soon"),
        ("SLURM_JOB_END_TIME", "soon"),
        ("TORCHELASTIC_METADATA", "ibm"),
        ("TORCHELASTIC_TERM_GRACE_S", "long"),
        ("TORCHELASTIC_DEADLINE_SIGNALS", "TERM"),
    ],
)
def test_garbage_in_a_variable_is_an_error_before_anything_is_started(
    variable: str, value: str, found: Callable[..., list[Deadline]], cloud: Cloud, tmp_path: Path
) -> None:
    wait_until(lambda: not threads())
    variables = {"SLURM_JOB_ID": "42", "TORCHELASTIC_PRESTOP_FILE": str(tmp_path / "bye"), variable: value}
    with pytest.raises(ValueError, match=value):
        found(**variables)
    assert not threads()
