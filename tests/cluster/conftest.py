"""Fixtures of the cluster tests."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.cluster.harness import Job
from tests.cluster.shell import Shell, launcher
from tests.hosts import Lab, why_impossible
from torchelastic.rendezvous.server import EtcdServer
from torchelastic.testing.etcd import running_etcd
from torchelastic.testing.faults import Fault


def pytest_configure(config: pytest.Config) -> None:
    """See `tests/conftest.py`."""
    Job.device = config.getoption("--device")
    Job.forked = config.getoption("--forked-workers")


class MakeJob(Protocol):
    """Makes a job that is ended with the test."""

    def __call__(self, faults: Sequence[Fault] = (), **options: Any) -> Job: ...


class MakeLab(Protocol):
    """Makes a lab that is taken down with the test."""

    def __call__(self, *hosts: str, wires: Collection[str] = (), second: Mapping[str, str] | None = None) -> Lab: ...


class AtTerminal(Protocol):
    """Starts `torchelastic WORDS` in a terminal of its own; with a text, that is written to `train.py` beforehand."""

    def __call__(self, *words: str, text: str | None = None, **variables: str) -> Shell: ...


@pytest.fixture
def host_folder() -> Iterator[Path]:
    """The folder that a person works in; as its TMPDIR, a host of its own as far as the runs of a host are found."""
    with tempfile.TemporaryDirectory(prefix="h-") as folder:  # a short name: a launcher's socket lies below
        yield Path(folder)


@pytest.fixture
def at_terminal(host_folder: Path) -> Iterator[AtTerminal]:
    """Starts commands in `host_folder` and ends what is left of them."""
    started: list[Shell] = []

    def run(*words: str, text: str | None = None, **variables: str) -> Shell:
        if text is not None:
            (host_folder / "train.py").write_text(text)
        started.append(Shell(*launcher(*words), folder=host_folder, TMPDIR=str(host_folder), **variables))
        return started[-1]

    yield run
    for shell in started:
        shell.kill()


@pytest.fixture
def own_etcd() -> Iterator[EtcdServer]:
    """A server that the test may break."""
    with running_etcd() as server:
        yield server


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


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    """A folder in memory where there is one, else on disk: nothing but the speed differs."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as folder:
        yield Path(folder)
