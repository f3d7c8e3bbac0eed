"""Fixtures of the ImageNet example's tests."""

from __future__ import annotations

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
