"""A worker that stops between two steps: while a group is formed, in a sync, in a save; collectives may take a minute.

Where no step is under way none can be late; the others go by the signs of life.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cluster.conftest import MakeJob
from tests.cluster.harness import run_standalone
from torchelastic.testing.faults import Fault

#: Of collectives; without signs of life nobody goes on before that, and in a save nobody ever does.
TIMEOUT_S = 60.0


@pytest.mark.parametrize(
    ("phase", "rank", "named"),
    [
        pytest.param("form", 1, "forming the group", marks=pytest.mark.long),
        # rank 0 serves the store of the round: the others may be on the way to it, or connected already
        pytest.param("form", 0, "forming the group", marks=pytest.mark.long),
        pytest.param("sync", 1, "bringing the states in sync", marks=pytest.mark.long),
        # .. or they are still in need of it, for they are not in sync before it answers
        pytest.param("sync", 0, "(?:forming the group|bringing the states in sync)", marks=pytest.mark.long),
        pytest.param("save", 0, "saving a checkpoint", marks=pytest.mark.long),
    ],
)
def test_a_worker_that_stops_between_steps_is_named_and_replaced(
    jobs: MakeJob, tmp_path: Path, phase: str, rank: int, named: str
) -> None:
    fault = Fault("hang", phase, rank=None if phase == "save" else rank, step=5 if phase == "save" else 0)
    job = jobs([fault], timeout_ms=int(1000 * TIMEOUT_S), checkpoint_dir=tmp_path / "checkpoints")
    run_standalone(job)
    assert job.plan.struck() == [0], job.output()[-3000:]
    job.check_identity()
    told = re.findall(rf"{named}: no sign of life from rank {rank} for (\S+) s", job.output())
    assert told, job.output()[-6000:]
    struck_s = job.plan.struck_at_s(0)
    went_on_s = min(float(event["t"]) for event in job.of("committed") if event["t"] > struck_s + float(told[0]))
    assert went_on_s - struck_s < TIMEOUT_S / 2
    first = {event["pid"] for event in job.of("started", restart=0)}
    assert len(first & {event["pid"] for event in job.of("finished")}) == 2, "nobody but the one that hung was ended"
