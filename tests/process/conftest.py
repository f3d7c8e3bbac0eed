"""Fixtures of several files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from examples.imagenet import digits
from tests.process.deadline_clocks import NOON_S, Clocks
from tests.process.metadata_servers import Cloud, serving

if TYPE_CHECKING:
    from tests.process.local_ranks import Crew


@pytest.fixture(scope="session")
def digits_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "digits"
    digits.write_digits(root)
    return root


@pytest.fixture(scope="module")
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    """Processes that become the ranks of all tests of a file: as many as its `CREW_SIZE` says."""
    from tests.process.local_ranks import crew_of  # torch, which not every file of this folder needs

    with crew_of(request.module.CREW_SIZE) as made:
        yield made


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """A folder on tmpfs, where there is one."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
def root(memory_folder: Path) -> Path:
    """The same, where hosts have their folders side by side."""
    return memory_folder


@pytest.fixture
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing says which job this is, nor where its memory is."""
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "TORCHELASTIC_MEMORY_ROOT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    cloud = Cloud()
    cloud.wall_s = NOON_S
    with serving(cloud):
        yield cloud


@pytest.fixture
def corpus(memory_folder: Path) -> Path:
    """A folder on tmpfs with a small dataset for the transformer example in it."""
    from tests.process import transformer_jobs  # pyarrow and the example, which only these tests need

    transformer_jobs.dataset(memory_folder)
    return memory_folder
