"""Runs that cannot go well.

Each ends in bounded time, with one clear error and an exit code, and leaves nothing behind.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.cluster.harness import JOB, Job, run_standalone
from tests.waiting import is_gone, wait_until
from torchelastic.launch.main import main
from torchelastic.network.ports import unused_ports
from torchelastic.p2p import CoordinatorP2P
from torchelastic.rendezvous.server import BINARY_VARIABLE, EtcdServer
from torchelastic.testing.faults import Fault

MakeJob = Callable[..., Job]


def last_line(job: Job) -> str:
    return job.output().rstrip().splitlines()[-1]


def unused_endpoint() -> str:
    return "127.0.0.1:{}".format(*unused_ports("127.0.0.1"))


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


# --- the launcher's own addresses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "is_taken", [pytest.param(True, id="taken"), pytest.param(False, id="no port", marks=pytest.mark.long)]
)
def test_metrics_that_cannot_be_served_are_one_line(jobs: MakeJob, tmp_path: Path, is_taken: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] if is_taken else 99999
        job = jobs()
        job.start_launcher("--standalone", f"--metrics-port={port}", script(tmp_path, "print('never')"))
        assert job.wait(30) == [1]
    assert last_line(job).startswith(f"the metrics endpoint cannot listen on 127.0.0.1:{port} (")
    assert last_line(job).endswith("the run was not started")
    assert "Traceback" not in job.output()


@pytest.mark.parametrize(
    ("binary", "said"), [("/nowhere/etcd", "which is no executable file"), ("/bin/false", "ended with status 1")]
)
def test_an_own_etcd_that_does_not_start_is_told_without_a_traceback(
    binary: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(BINARY_VARIABLE, binary)
    assert main(["run", "--standalone", str(JOB)]) == 1
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("torchelastic run: the etcd of --standalone cannot be started: ")
    assert said in first


def test_no_folder_for_temporary_files_is_one_line_that_names_tmpdir() -> None:
    options = f"--rdzv-endpoint {unused_endpoint()} --rdzv-id alone"
    no_files = f"ulimit -f 0; exec {sys.executable} -m torchelastic.launch run {options} {JOB}"
    done = subprocess.run(["bash", "-c", no_files], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("torchelastic run: no folder for temporary files can be made: set TMPDIR to one that ")


# --- a worker's own errors --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_worker_that_fails_for_good_leaves_the_others_to_finish(jobs: MakeJob) -> None:
    job = run_standalone(jobs([Fault("crash", "backward", rank=1, step=7)]), "--max-restarts=0", nproc=2)
    assert job.plan.struck() == [0]
    job.check_identity(finishers=1)
    assert len(job.of("started")) == 2
    assert "ValueError: injected" in job.output()


def test_when_the_run_fails_the_traceback_is_the_last_thing_on_the_screen(jobs: MakeJob) -> None:
    job = jobs([Fault("raise", "backward", step=2), Fault("crash", "backward", step=7)])
    job.start("--standalone", "--max-restarts=0", nproc=1)
    assert job.wait() == [1]
    ending = job.output()[job.output().rindex("worker 0 failed: exit code 1") :].rstrip().splitlines()
    assert ending[1] == "Traceback (most recent call last):", "after a second round too"
    assert ending[-1].startswith("ValueError: injected")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        pytest.param("def f(:\n", "SyntaxError: ", id="syntax error"),
        pytest.param("raise SystemExit('no data set')\n", "no data set", id="own exit", marks=pytest.mark.long),
    ],
)
def test_a_script_that_never_gets_to_training_is_not_started_again(
    jobs: MakeJob, tmp_path: Path, text: str, error: str
) -> None:
    job = jobs()
    job.start_launcher("--standalone", "--nproc-per-node=2", script(tmp_path, text))
    assert job.wait(30) == [1]
    assert last_line(job).startswith("then worker ")
    assert f"failed: exit code 1: {error}" in last_line(job)
    assert job.output().count(f"[worker 0] {error}") == 1, "started once"


@pytest.mark.long
def test_mistakes_in_a_state_or_step_are_named_before_anything_else_happens(jobs: MakeJob) -> None:
    forgetful = jobs(mistake="forgetful state")
    wrong = jobs(mistake="wrong result")
    for job in (forgetful, wrong):
        job.start("--standalone", "--max-restarts=0", nproc=1)
    assert forgetful.wait() == [1]
    assert wrong.wait() == [1]
    assert "write ForgetfulState.apply, or return None from snapshot()" in last_line(forgetful)
    assert last_line(wrong) == (
        "TypeError: train_step returned a int: return None, a WorkerStats, or (state, worker_stats)"
    )


@pytest.mark.long
def test_a_checkpoint_folder_that_cannot_be_written_is_named_before_anything_is_trained(
    jobs: MakeJob, tmp_path: Path
) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("")
    job = jobs(checkpoint_dir=blocked / "checkpoints")
    job.start("--standalone", nproc=1)
    assert job.wait() == [1]
    assert str(blocked / "checkpoints") in last_line(job)
    assert not job.of("drawn")
    assert len(job.of("started")) == 1


# --- the rendezvous ---------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_an_etcd_that_cannot_be_reached_is_named_in_bounded_time(jobs: MakeJob) -> None:
    endpoint = unused_endpoint()
    with_launcher, alone = jobs(), jobs()
    with_launcher.start(f"--rdzv-endpoint={endpoint}", "--rdzv-id=nowhere", "--connect-timeout=2", nproc=1)
    alone.start_alone(f"etcd://{endpoint}/nowhere?min_workers=1&connect_timeout=2", "alone")
    for job in (with_launcher, alone):
        assert job.wait(30) == [1]
        assert endpoint in last_line(job)
        assert not job.of("drawn")
    assert not with_launcher.of("started"), "no worker is started for nothing"


@pytest.mark.long
def test_a_run_that_was_closed_turns_new_workers_away(jobs: MakeJob, etcd: EtcdServer, run_id: str) -> None:
    rendezvous = (f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}")
    first, second, alone = jobs(epochs=1), jobs(), jobs()
    first.start(*rendezvous, nproc=1)
    assert first.wait() == [0]
    second.start(*rendezvous, nproc=1)
    alone.start_alone(f"etcd://{etcd.endpoint}/{run_id}?min_workers=1", "alone")
    for job in (second, alone):
        assert job.wait() == [1]
        assert f"{run_id!r} at {etcd.endpoint} is already closed" in last_line(job)
        assert "choose another run id" in last_line(job)


@pytest.mark.long
def test_too_few_workers_end_after_the_rendezvous_timeout(jobs: MakeJob) -> None:
    job = jobs()
    job.start("--standalone", "--min-workers=2", "--max-workers=2", "--rdzv-timeout=2", "--max-restarts=0", nproc=1)
    assert job.wait(30) == [1]
    assert "fewer than min_workers=2 workers came within 2 s" in last_line(job)
    (asked,) = job.of("asking")
    assert not job.of("formed")
    assert job.of("error") == [] or job.of("error")[0]["t"] - asked["t"] < 10


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--standalone", "--nnodes=2:3", str(JOB)], "--standalone is for one host"),
        (["--standalone", "--min-workers=3", "--max-workers=2", str(JOB)], "max_workers=2 is below min_workers=3"),
        (["--standalone", "--min-workers=0", str(JOB)], "min_workers='0' must be a whole number of at least 1"),
        (["--standalone", "--max-workers=0", str(JOB)], "max_workers='0' must be a whole number of at least 1"),
        (["--standalone", "--multiple-of=0", str(JOB)], "multiple_of='0' must be a whole number of at least 1"),
        (["--standalone", "--nproc-per-node=3", "--multiple-of=4", str(JOB)], "no group could ever be formed"),
        (["--rdzv-endpoint=etcd-host", str(JOB)], "give --rdzv-endpoint HOST:PORT and --rdzv-id ID"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused_at_once(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["run", *arguments])
    assert refused.value.code == 2
    assert complaint in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"c10d_backend": "mpi"}, "c10d_backend='mpi'"),
        ({"init_method": "etcd://localhost/run?min_workers=1&min_wrokers=2"}, "unknown parameter 'min_wrokers'"),
        ({"init_method": "etcd://localhost/run?min_workers=3&max_workers=2"}, "max_workers=2 is below min_workers=3"),
        # with an agent's socket in the environment it does not train alone
        ({"init_method": None}, "no rendezvous: TORCHELASTIC_AGENT_SOCKET is set, TORCHELASTIC_INIT_METHOD is not"),
    ],
)
def test_a_coordinator_that_cannot_work_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, str], complaint: str
) -> None:
    monkeypatch.delenv("TORCHELASTIC_INIT_METHOD", raising=False)
    monkeypatch.setenv("TORCHELASTIC_AGENT_SOCKET", "/nowhere")
    with pytest.raises(ValueError, match=complaint):
        CoordinatorP2P(**{"init_method": "etcd://localhost/run?min_workers=1", **arguments})  # type: ignore[arg-type]  # strings all


# --- the agent itself -------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_nothing_outlives_an_agent_that_is_killed(jobs: MakeJob) -> None:
    job = jobs(gates=[5])
    job.forked = False  # the real command: what is its child is what it has started
    agent = job.start("--standalone", nproc=2)
    job.wait_for("held", count=2, step=5)
    maps = Path(f"/proc/{agent.pid}/maps").read_text()
    assert "libtorch" not in maps, "the agent has loaded torch"
    assert "grpc" in maps, "what the agent loads can be seen there"
    children = psutil.Process(agent.pid).children(recursive=True)
    names = {child.name() for child in children}
    assert "etcd" in names
    assert len(children) >= 3
    os.kill(agent.pid, signal.SIGKILL)
    agent.wait()
    wait_until(lambda: all(is_gone(child.pid) for child in children), 10, f"{names} end with the agent")
