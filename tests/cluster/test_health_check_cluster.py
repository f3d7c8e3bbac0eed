"""`torchelastic run --health-check`: a host that fails it never trains, and the others go on and say why."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import MakeJob
from tests.cluster.harness import RunRecords
from tests.waiting import wait_until
from torchelastic.launch.main import main
from torchelastic.processes.exit_codes import COMPUTES_WRONG
from torchelastic.rendezvous.server import EtcdServer
from torchelastic.testing import flip_bit

BAD = "echo 'error    burn-in  core 3 computes wrong'; exit 1"
SAID = "its health check failed: exit code 1: error burn-in core 3 computes wrong"


def run(folder: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A launcher of its own, whose script leaves a file."""
    (folder / "script.py").write_text("import os; open('ran', 'w').write(os.environ['TORCHELASTIC_RUN_ID'])\n")
    command = [sys.executable, "-m", "torchelastic.launch", "run", "--standalone", "--page=off", *options, "script.py"]
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=150)


@pytest.mark.long
@pytest.mark.daily
def test_a_host_that_fails_is_kept_out_with_76_and_the_others_train_and_say_why(
    jobs: MakeJob, etcd: EtcdServer, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", "--nnodes=1:2", "--last-call=0.5"]
    job = jobs(gates=[6])
    job.start(*words, "--health-check=true", nproc=1)
    job.wait_for_step(4)
    bad = job.start(*words, f"--health-check={BAD}", nproc=1)
    assert bad.wait(60) == COMPUTES_WRONG, job.output()[-4000:]
    said = job.output_of(1)
    assert f"the health check failed: exit code 1: {BAD}\nerror    burn-in  core 3 computes wrong\n" in said
    assert len(job.of("started")) == 1, "no worker of it has started"
    wait_until(lambda: f"is kept out of the run: {SAID}" in job.output_of(0), 60, "the other host says so")
    place = [f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}"]
    assert main(["status", *place, "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert [one["because"] for one in status["kept_out"]] == [SAID]
    assert main(["events", *place]) == 0
    assert f"kept out of the run: {SAID}" in capsys.readouterr().out
    job.open_gate(6)
    assert job.wait()[0] == 0, job.output()[-4000:]
    job.check_identity(finishers=1)
    assert set(job.rounds().values()) == {1}, "it was never a member"
    assert all(state != "broken" for _, state in RunRecords(etcd.endpoint, run_id).rounds()[1:]), "nor missed"


@pytest.mark.long
def test_who_waits_in_vain_for_enough_workers_is_told_who_was_kept_out(
    jobs: MakeJob, etcd: EtcdServer, run_id: str
) -> None:
    words = [f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", "--nnodes=2", "--rdzv-timeout=25"]
    job = jobs()
    job.start(*words, "--max-restarts=0", nproc=1)
    job.wait_for("started")  # its agent has looked: launchers with one host's name delete each other's old records
    job.start(*words, f"--health-check={BAD}", nproc=1)
    assert job.wait() == [1, COMPUTES_WRONG], job.output()[-4000:]
    assert "fewer than min_workers=2 workers came within 25 s" in job.output_of(0)
    assert f"is kept out: {SAID}" in job.output_of(0)


@pytest.mark.long
def test_a_signal_while_the_check_runs_ends_it_and_the_launcher(jobs: MakeJob) -> None:
    job = jobs()
    folder = job.folder
    launcher = job.start("--standalone", f"--health-check=echo $$ > {folder}/pid; sleep 600", nproc=1)
    wait_until(lambda: (folder / "pid").exists() and (folder / "pid").read_text().strip(), 60, "the check runs")
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(30) == 128 + signal.SIGTERM
    assert not Path(f"/proc/{(folder / 'pid').read_text().strip()}").exists()
    assert job.of("started") == []


@pytest.mark.long
def test_a_host_with_a_core_that_flips_a_bit_is_kept_out_by_the_burn_in_and_one_without_is_not(tmp_path: Path) -> None:
    core = f"core {max(os.sched_getaffinity(0))}"
    check = f"--health-check={sys.executable} -m torchelastic doctor --burn-in 30"
    fault = flip_bit(tmp_path, party=core, work="matmul in float64", at_round=0)
    done = run(tmp_path, check, **fault.environment)
    fault.require_struck()
    assert done.returncode == COMPUTES_WRONG, done.stderr
    assert f"{core} computes wrong: matmul in float64 in 1 of" in done.stderr
    assert not (tmp_path / "ran").exists()
    done = run(tmp_path, "--health-check=env > seen")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ran").exists()
    seen = dict(line.partition("=")[::2] for line in (tmp_path / "seen").read_text().splitlines())
    assert seen["TORCHELASTIC_RUN_ID"] == (tmp_path / "ran").read_text()
    assert seen["LOCAL_WORLD_SIZE"] == "1"
    assert "TORCHELASTIC_INIT_METHOD" not in seen, "what it starts must not take part in the run"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--health-check= "], "--health-check is empty"),
        (["--health-check=true", "--health-check-timeout=0"], "--health-check-timeout is 0"),
        (["--health-check-timeout=5"], "give --health-check COMMAND too"),
    ],
)
def test_what_is_no_check_is_refused_before_anything_is_started(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["run", "--standalone", *options, __file__])
    assert end.value.code == 2
    assert said in capsys.readouterr().err
