"""Fixtures of the tests with a real SLURM: one for the whole session, and what an uninterrupted job comes to."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Slurm, running_slurm, why_impossible
from tests.slurm.jobs import Job


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """A SLURM with two nodes; without its packages the test is skipped, and says how to get them."""
    if impossible := why_impossible():
        pytest.skip(impossible)
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)  # munge insists that others may pass
        with running_slurm(Path(folder)) as running:
            yield running


@pytest.fixture(scope="session")
def uninterrupted(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job of two ranks that was left alone until it had finished."""
    job = Job(slurm, tmp_path_factory.mktemp("uninterrupted"))
    job.submit(ends_in_s=None, pause_s=0.0)
    job.wait_until("COMPLETED")
    return job
