"""`torchelastic simulate-esi` with real processes: what it ends, what it starts again, what survives it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import is_gone, wait_until
from torchelastic.processes import dies_with_parent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prctl(2)")

PATIENCE_S = 60.0
JOB = Path(__file__).parent / "short_lived_job.py"
SIMULATOR = [sys.executable, "-m", "torchelastic.launch", "simulate-esi"]
FOREVER = ["--timeout", "600", "--grace", "600"]


def job(way: str, folder: Path) -> str:
    return shlex.join([sys.executable, "-S", str(JOB), way, str(folder)])


def simulate(command: str, *words: str, **settings: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*SIMULATOR, "--cmd", command, *words], capture_output=True, timeout=PATIENCE_S, **settings)


def report_of(done: subprocess.CompletedProcess[bytes]) -> dict[str, Any]:
    assert done.stdout, done.stderr.decode()
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def column(report: dict[str, Any], name: str) -> list[Any]:
    return [life[name] for life in report["lives"]]


def pids_in(folder: Path) -> list[int]:
    return [int(word) for word in (folder / "pids").read_text().split()]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A simulator whose job ignores SIGTERM and has started everything that it starts."""
    with (tmp_path / "stderr").open("wb") as stderr:
        command = [*SIMULATOR, "--cmd", job("ignore", tmp_path), *FOREVER, "--report", str(tmp_path / "report")]
        before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, which a child inherits
        process = subprocess.Popen(dies_with_parent(command), stderr=stderr)
        signal.signal(signal.SIGHUP, before)
    try:
        wait_until((tmp_path / "pids").exists, what="the job starts")
        yield process
    finally:
        process.kill()
        process.wait()


# --- how lives end --------------------------------------------------------------------------------


def test_a_job_that_saves_at_its_end_loses_no_step_although_its_shell_goes_first(tmp_path: Path) -> None:
    done = simulate(f"{job('save', tmp_path)}; exit $?", "--timeout", "1.5", "--grace", "50", "--json")
    report = report_of(done)
    assert (done.returncode, report["finished"], report["steps_lost"]) == (0, True, 0), done.stderr.decode()
    assert (tmp_path / "done").read_text().split() == [str(step) for step in range(1, 12)]
    assert set(column(report, "how")[:-1]) == {"ended"}
    assert column(report, "killed_processes") == [0] * len(report["lives"])
    assert (tmp_path / "early").read_text() == ""  # SIGTERM never comes before the moment that was told


def test_a_job_that_stops_early_is_started_again_with_a_new_end_of_its_time(tmp_path: Path) -> None:
    done = simulate(job("stop", tmp_path), "--timeout", "500", "--json", cwd=tmp_path)
    report = report_of(done)
    assert (done.returncode, report["steps_lost"]) == (0, 0)
    assert column(report, "how") == ["stopped", "stopped", "finished"]
    assert column(report, "resumed_step") == [0, 4, 8]
    assert column(report, "committed_step") == [4, 8, 11]
    assert all(0 < given_up_s <= 500 for given_up_s in column(report, "given_up_s")[:2])
    lives = [line.split() for line in (tmp_path / "ends").read_text().splitlines()]
    assert [number for number, *_ in lives] == ["1", "2", "3"]
    assert all(in_file == variable for _, in_file, variable, _ in lives)
    assert all(0 < float(end) - float(now) <= 500 for _, end, _, now in lives)
    assert len({end for _, end, *_ in lives}) == 3


def test_a_job_that_ignores_sigterm_is_killed_with_all_that_it_has_started_and_its_loss_is_told(tmp_path: Path) -> None:
    report_path = tmp_path / "report.json"
    words = ["--timeout", "4", "--grace", "0.3", "--max-restarts", "0", "--report", str(report_path)]
    done = simulate(job("ignore", tmp_path), *words)
    report = json.loads(report_path.read_text())
    assert (done.returncode, report["finished"], report["steps_lost"]) == (1, False, 2)
    (life,) = report["lives"]
    assert (life["how"], life["committed_step"], life["saved_step"]) == ("killed", 4, 2)
    assert life["killed_processes"] >= 3
    pids = pids_in(tmp_path)
    assert len(pids) == 3
    assert all(map(is_gone, pids))
    assert b"not finished after 0 restarts: that is --max-restarts" in done.stderr


def test_what_a_command_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    done = simulate(f"setsid sleep 600 & echo $! > {tmp_path}/pids", "--timeout", "500", "--json")
    assert (done.returncode, column(report_of(done), "killed_processes")) == (0, [1])
    assert all(map(is_gone, pids_in(tmp_path)))


def test_output_and_dispositions_are_those_of_a_command_started_directly(tmp_path: Path) -> None:
    shown = (
        f"printf '\\0\\377no new line\\n\\n'; grep -E '^Sig(Blk|Ign|Cgt)' /proc/self/status; echo > {tmp_path}/x; cat"
    )
    done = simulate(f"{shown}; echo beside >&2; printf end", "--timeout", "500", input=b"not for the job")
    directly = subprocess.run(["/bin/sh", "-c", shown], stdin=subprocess.DEVNULL, capture_output=True, check=True)
    assert done.stdout == directly.stdout + b"end"
    assert b"\nbeside\n" in done.stderr


@pytest.mark.parametrize(("before", "told"), [({}, b"7.5\n"), ({"TORCHELASTIC_TERM_GRACE_S": "20"}, b"20\n")])
def test_the_job_is_told_its_grace_unless_the_user_has_said_it(before: dict[str, str], told: bytes) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_TERM_GRACE_S"} | before
    words = ["--timeout", "500", "--grace", "7.5"]
    assert simulate("echo $TORCHELASTIC_TERM_GRACE_S", *words, env=environment).stdout == told


# --- what ends the simulator ----------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_job_and_the_simulator_at_once(
    running: subprocess.Popen[bytes], tmp_path: Path, number: signal.Signals
) -> None:
    running.send_signal(number)
    assert running.wait(PATIENCE_S) == 128 + number  # the grace, which is not waited for, is ten minutes
    assert all(map(is_gone, pids_in(tmp_path)))
    assert (
        f"interrupted by {number.name} after 0 whole attempts"
        in json.loads((tmp_path / "report").read_text())["reason"]
    )


def test_a_signal_that_meets_a_finalizer_ends_it_too() -> None:
    """Python drops what a signal handler raises there."""
    program = (
        "import os, signal, sys\n"
        "from torchelastic.launch import simulate_esi\n"
        "from torchelastic.launch.main import main\n"
        "class Finalized:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "simulate_esi.Reported.read = lambda _: Finalized() and None\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", program, "simulate-esi", "--cmd", "exec sleep 600", *FOREVER]
    ended = subprocess.run(command, stderr=subprocess.PIPE, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 128 + signal.SIGTERM
    assert b"Exception ignored " in ended.stderr, "the fault has happened"


def test_the_command_of_a_simulator_that_was_killed_ends_too(tmp_path: Path) -> None:
    command = [*SIMULATOR, "--cmd", f"echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pids; exec sleep 600"]
    running = subprocess.Popen([*command, *FOREVER], stderr=subprocess.DEVNULL)
    try:
        wait_until((tmp_path / "pids").exists, what="the job starts")
    finally:
        running.kill()
        running.wait()
    wait_until(lambda: all(map(is_gone, pids_in(tmp_path))), what="the command ends")


def test_workers_of_torchrun_end_with_the_simulator(tmp_path: Path) -> None:
    worker = tmp_path / "worker.sh"
    new, pids = tmp_path / "new", tmp_path / "pids"
    worker.write_text(f"trap : TERM; echo $$ > {new}; mv {new} {pids}; while :; do sleep 1; done")
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 1 --no-python sh {worker}"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = dies_with_parent([*SIMULATOR, "--cmd", torchrun, *FOREVER])
    running = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        wait_until((tmp_path / "pids").exists, what="the worker starts")
        (pid,) = pids_in(tmp_path)
        assert os.getsid(pid) == pid  # no signal to the command's process group reaches it
    finally:
        running.send_signal(signal.SIGTERM)
    assert running.wait(PATIENCE_S) == 143
    assert is_gone(pid)


def test_a_signal_that_was_ignored_before_stays_ignored(tmp_path: Path) -> None:
    command = [*SIMULATOR, "--cmd", f"touch {tmp_path}/started; exec sleep 600", *FOREVER]
    running = subprocess.Popen(
        command, stderr=subprocess.DEVNULL, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    try:
        wait_until((tmp_path / "started").exists, what="the job starts")
        ignored = int(Path(f"/proc/{running.pid}/status").read_text().split("SigIgn:")[1].split()[0], 16)
        assert ignored & 1 << (signal.SIGHUP - 1)
    finally:
        running.send_signal(signal.SIGTERM)
    assert running.wait(PATIENCE_S) == 143


def test_a_report_that_cannot_be_written_is_told_after_the_table() -> None:
    done = simulate("true", "--timeout", "60", "--report", "/dev/full")
    told = done.stderr.decode()
    assert done.returncode == 1
    assert told.endswith("torchelastic simulate-esi: --report /dev/full cannot be written: No space left on device\n")
    assert "finished in attempt 1" in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--timeout", "1e300"], "--timeout 1e+300: give seconds, above 0, and at most"),
        (["--timeout", "5", "--pause", "1e300"], "--pause 1e+300: give seconds, 0 or more, and at most"),
        (["--timeout", "5", "--report", "/tmp"], "--report /tmp: give a file"),
    ],
)
def test_words_that_cannot_be_carried_out_are_refused_before_the_job_starts(words: list[str], said: str) -> None:
    done = simulate("true", *words)
    assert done.returncode == 2
    assert done.stderr.decode().startswith(f"torchelastic simulate-esi: {said}")
