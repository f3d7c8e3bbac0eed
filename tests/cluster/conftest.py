"""Fixtures of the cluster tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.cluster.harness import Job
from torchelastic.testing.faults import Fault


class MakeJob(Protocol):
    """Makes a job that is ended with the test."""

    def __call__(self, faults: Sequence[Fault] = (), **options: Any) -> Job: ...


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[MakeJob]:
    """Makes jobs and ends what is left of them."""
    made: list[Job] = []

    def make(faults: Sequence[Fault] = (), **options: Any) -> Job:
        made.append(Job(tmp_path / f"job-{len(made)}", faults, **options))
        return made[-1]

    yield make
    for job in made:
        job.stop()
