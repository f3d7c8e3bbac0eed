"""`torchelastic doctor --burn-in`: real cores compute the same, and one whose bit is flipped is named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.waiting import wait_until
from torchelastic.doctor.burn_in import burn_in
from torchelastic.doctor.burn_in_party import WORKS
from torchelastic.doctor.burn_in_rules import BurnInFacts, judge_burn_in
from torchelastic.doctor.findings import Level
from torchelastic.launch.main import main
from torchelastic.processes.background import in_background
from torchelastic.testing import BitFlip, flip_bit

#: Long after this, a burn-in of a few rounds has hung.
LONG_S = 120.0
ROUNDS = 5
CORES = sorted(os.sched_getaffinity(0))
WORK = "matmul in bfloat16"


def computed(monkeypatch: pytest.MonkeyPatch, fault: BitFlip | None = None) -> BurnInFacts:
    """What all cores compute in a few rounds, with a fault or without."""
    for name, value in ({} if fault is None else fault.environment).items():
        monkeypatch.setenv(name, value)
    facts = burn_in(LONG_S, rounds=ROUNDS)
    if fault is not None:
        fault.require_struck()
    assert {party.name for party in facts.parties} >= {f"core {core}" for core in CORES}
    assert all(party.rounds == ROUNDS for party in facts.parties)
    return facts


@pytest.mark.long
def test_all_cores_have_the_same_results_and_each_the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = computed(monkeypatch)
    assert {finding.level for finding in judge_burn_in(facts)} <= {Level.OK, Level.NOTE}
    cores = [party for party in facts.parties if party.name.startswith("core")]
    assert {work for work, _ in cores[0].results} == set(WORKS)
    for task, seen in cores[0].results.items():
        assert len(seen) == 1
        if len({party.kind for party in cores}) == 1:
            assert {next(iter(party.results[task])) for party in cores} == set(seen)
    patterns = {next(iter(seen)) for (work, _), seen in cores[0].results.items() if work == WORK}
    assert len(patterns) == 4, "the numbers are not those of the round before"


def test_a_core_that_flips_one_bit_once_is_named_with_the_work_and_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = f"core {CORES[-1]}"
    # of the last round, whose numbers the first one had too
    fault = flip_bit(tmp_path, party=core, work=WORK, at_round=ROUNDS - 1)
    errors = [one for one in judge_burn_in(computed(monkeypatch, fault)) if one.level == Level.ERROR]
    assert [one.what for one in errors] == [
        f"{core} computes wrong: {WORK} in 1 of {ROUNDS} rounds (the first: round {ROUNDS})"
    ]
    assert "its result differs from one round to another" in errors[0].because


@pytest.mark.long
@pytest.mark.skipif(len(CORES) < 2, reason="two cores to compare; run it on a host with two: pytest -k flips_a_bit")
def test_a_core_that_flips_a_bit_every_time_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = f"core {CORES[-1]}"
    facts = computed(monkeypatch, flip_bit(tmp_path, party=core, work="integer hashing"))
    alike = [party.name for party in facts.parties if party.kind == facts.parties[-1].kind]
    errors = [one.what for one in judge_burn_in(facts) if one.level == Level.ERROR]
    if len(alike) == 2:
        assert errors == [f"{', '.join(alike)} disagree: integer hashing"]
    else:
        assert errors == [f"{core} computes wrong: integer hashing in {ROUNDS} of {ROUNDS} rounds"]


def pinned_to(core: int) -> psutil.Process | None:
    """The process that was started here and may run on this core alone."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.cpu_affinity() == [core]:
                return process
    return None


@pytest.mark.long
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores; on a host with two: pytest -k on_its_own")
def test_each_core_has_a_process_on_its_own_and_one_that_crashes_is_named() -> None:
    ended = in_background(lambda: burn_in(LONG_S, rounds=60), "burn-in")
    processes = wait_until(
        lambda: found if all(found := [pinned_to(core) for core in CORES]) else None, LONG_S, "a process on each core"
    )
    assert processes[-1] is not None
    processes[-1].send_signal(signal.SIGSEGV)
    facts = ended.result(LONG_S)
    (error,) = [one for one in judge_burn_in(facts) if one.level == Level.ERROR]
    assert error.what.startswith(f"core {CORES[-1]} did not compute to the end, in round ")
    assert error.because == "killed by SIGSEGV"
    assert {party.name: party.rounds for party in facts.parties}[f"core {CORES[0]}"] == 60


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-gpu")
def test_a_gpu_that_flips_one_bit_once_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = flip_bit(tmp_path, party="GPU 0", work=WORK, at_round=ROUNDS - 1)
    errors = [one.what for one in judge_burn_in(computed(monkeypatch, fault)) if one.level == Level.ERROR]
    assert errors == [f"GPU 0 computes wrong: {WORK} in 1 of {ROUNDS} rounds (the first: round {ROUNDS})"]


def asked(*words: str, environment: Mapping[str, str]) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON and the rest of what the command says."""
    command = [sys.executable, "-m", "torchelastic.launch", "doctor", "--json", *words]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.long
def test_the_command_ends_in_time_and_its_exit_code_is_that_of_the_findings(tmp_path: Path) -> None:
    fault = flip_bit(tmp_path, party=f"core {CORES[0]}", work="copy of memory", at_round=0)
    began_s = time.monotonic()
    code, told, said = asked("--burn-in", "30", environment=fault.environment)
    assert time.monotonic() - began_s < 30 + 25, "the other checks take at most 15 s"
    fault.require_struck()
    (error,) = [one for one in told["findings"] if one["check"] == "burn-in"]
    assert (error["level"], code) == ("error", 1)
    assert error["what"].startswith(f"core {CORES[0]} computes wrong: copy of memory in 1 of")
    assert "burn-in: every core and GPU computes for 30 s" in said


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "1e9"])
def test_a_time_that_makes_no_sense_is_refused(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--burn-in", seconds])
    assert end.value.code == 2
    assert "--burn-in" in capsys.readouterr().err
