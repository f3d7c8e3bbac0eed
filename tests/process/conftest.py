"""Fixtures of several files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from examples.imagenet import digits


@pytest.fixture(scope="session")
def digits_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "digits"
    digits.write_digits(root)
    return root


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For nets this small a second thread only waits for a core that some other test may have."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
