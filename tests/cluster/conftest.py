"""Fixtures of the cluster tests."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.cluster.harness import Job
from torchelastic.testing.faults import Fault
from torchelastic.testing.hosts import Lab, why_impossible


class MakeJob(Protocol):
    """Makes a job that is ended with the test."""

    def __call__(self, faults: Sequence[Fault] = (), **options: Any) -> Job: ...


class MakeLab(Protocol):
    """Makes a lab that is taken down with the test."""

    def __call__(self, *hosts: str, wires: Collection[str] = (), second: Mapping[str, str] | None = None) -> Lab: ...


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


@pytest.fixture
def labs() -> Iterator[MakeLab]:
    """Makes labs of hosts with networks of their own; where that is impossible the test is skipped, with the reason."""
    with ExitStack() as stack:

        def make(*hosts: str, wires: Collection[str] = (), second: Mapping[str, str] | None = None) -> Lab:
            impossible = why_impossible(wires=bool(wires))
            if impossible:
                pytest.skip(impossible)
            return stack.enter_context(Lab(hosts, wires, second))

        yield make
