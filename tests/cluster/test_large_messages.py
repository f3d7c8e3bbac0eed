"""A worker that is killed in the middle of a large message costs one worker, and no wait for a time-out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.harness import ROOT

STEPS, FATAL = 60, 5
#: gloo's own time-out, by default, is 10 s.
SOON_S = 5.0


@pytest.mark.long
@pytest.mark.parametrize("attempt", range(2))
def test_a_kill_in_the_middle_of_a_broadcast_costs_the_killed_worker_alone(tmp_path: Path, attempt: int) -> None:
    del attempt  # where the message is cut differs from run to run
    command = [sys.executable, "-m", "torchelastic.launch", "run", "-v", "--standalone", "--nproc-per-node=3"]
    command += ["-m", "tests.cluster.large_message_job", str(tmp_path), str(STEPS), str(FATAL)]
    run = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100, check=False
    )
    events = [json.loads(line) for path in tmp_path.glob("events-*.jsonl") for line in path.read_text().splitlines()]

    def of(kind: str) -> list[dict[str, Any]]:
        return sorted((event for event in events if event["e"] == kind), key=lambda event: float(event["t"]))

    assert run.returncode == 0, run.stdout[-4000:]
    (death,) = of("dies")
    survivors = {event["pid"] for event in of("started")[:3]} - {death["pid"]}
    assert survivors <= {event["pid"] for event in of("finished")}, "a survivor was ended, too"
    assert "did not get ready in time" not in run.stdout
    # one who had all of the message before the others were cut has committed that step, and brings the other level
    after = {
        pid: [float(event["t"]) for event in of("trained") if event["step"] > FATAL and event["pid"] == pid]
        for pid in survivors
    }
    assert all(len(times) in (STEPS - FATAL - 1, STEPS - FATAL) for times in after.values()), after
    assert max(min(times) for times in after.values()) - float(death["t"]) < SOON_S, run.stdout[-4000:]
    totals = {event["total"] for event in of("finished") if event["pid"] in survivors}
    assert totals == {float(sum(range(STEPS)))}
