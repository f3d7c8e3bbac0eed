"""Scripts with an IterManager that finds its deadlines by itself: under the simulator, and with signals."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.managed_job import TOTAL
from tests.waiting import wait_until
from torchelastic.lifetime import STOPPED_EARLY, IterManager
from torchelastic.processes import dies_with_parent

JOB = Path(__file__).parent / "managed_job.py"
ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def command(way: str, folder: Path) -> list[str]:
    return [sys.executable, str(JOB), way, str(folder)]


def simulated(way: str, folder: Path) -> dict[str, Any]:
    words = [sys.executable, "-m", "torchelastic.launch", "simulate-esi", "--json", "--timeout", "2.2", "--grace", "5"]
    words += ["--max-restarts", "20", "--cmd", shlex.join(command(way, folder))]
    done = subprocess.run(words, capture_output=True, timeout=PATIENCE_S, cwd=folder, env=ENVIRONMENT)
    assert done.stdout, done.stderr.decode()
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def steps_done(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "done").read_text().split()]


@pytest.mark.long
@pytest.mark.parametrize("way", ["exit_code", "without_close", "falls_off", "on_a_thread"])
def test_a_life_is_reported_as_finished_only_when_the_run_has_finished(way: str, tmp_path: Path) -> None:
    report = simulated(way, tmp_path)
    assert report["finished"], report
    *_, last = report["lives"]
    # on a machine that is busy a life may be over before it has begun, and may need some of its grace
    lives = [life for life in report["lives"] if life["committed_step"] is not None]
    assert len(lives) >= 2
    assert {life["how"] for life in lives} <= {"stopped", "ended", "finished"}
    own_codes = {life["exit_code"] for life in lives if life["how"] == "stopped"}
    assert own_codes <= {0 if way in ("falls_off", "on_a_thread") else STOPPED_EARLY}
    assert last["how"] == "finished"
    assert (report["steps_lost"], steps_done(tmp_path)) == (0, list(range(1, TOTAL + 1)))
    for life, following in itertools.pairwise(lives):
        assert life["committed_step"] == life["saved_step"] == following["resumed_step"]


def test_the_loop_of_the_seed_goes_on_from_its_save_and_ends(tmp_path: Path) -> None:
    report = simulated("seed", tmp_path)
    assert report["finished"], report
    done = steps_done(tmp_path)
    assert sorted(set(done)) == list(range(1, TOTAL + 1))
    first, second = [life for life in report["lives"] if life["committed_step"] is not None][:2]
    assert first["how"] in ("ended", "killed")
    assert first["saved_step"] == second["resumed_step"]
    # not all: what it trains after its last word is not known
    assert report["steps_lost"] <= len(done) - TOTAL


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**ENVIRONMENT, "TORCHELASTIC_TERM_GRACE_S": "1.5"}
    for_ever = dies_with_parent(command("for_ever", tmp_path))
    with subprocess.Popen(for_ever, env=environment, stderr=subprocess.PIPE) as process:
        try:
            wait_until(lambda: (tmp_path / "done").exists())
            yield process
        finally:
            process.kill()


def test_on_sigterm_it_saves_within_the_grace_and_asks_to_be_started_again(
    running: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == STOPPED_EARLY
    assert int((tmp_path / "saved").read_text()) == steps_done(tmp_path)[-1]
    assert b"deadline: signal (SIGTERM, 1.5 s of grace)" in errors


def test_on_two_sigterms_at_once_it_does_so_once(running: subprocess.Popen[bytes], tmp_path: Path) -> None:
    running.send_signal(signal.SIGTERM)
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == STOPPED_EARLY
    assert errors.count(b"save and stop") == 1


def test_a_metadata_service_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_DEADLINE_SIGNALS", "none")
    monkeypatch.setenv("TORCHELASTIC_METADATA", "aws,gcp,azure")
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        monkeypatch.setenv("TORCHELASTIC_METADATA_ENDPOINT", f"http://{host}:{port}")
        manager = IterManager(velastic_dir=tmp_path)
        connection, _ = server.accept()  # somebody is waiting for an answer now, and will not get one
        took_s = []
        for _ in range(20):
            began_s = time.monotonic()
            manager.iter()
            took_s.append(time.monotonic() - began_s)
        answers = connection.recv(10)
        manager.close()
        connection.close()
    assert answers, "it was asked"
    assert sorted(took_s)[10] < 0.5, "each answer is waited for 1 s, by another thread"
    assert not manager.should_stop
