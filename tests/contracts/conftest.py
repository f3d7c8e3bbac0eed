"""The device of the contracts' states."""

from __future__ import annotations

import pytest

from tests.contracts import facades


def pytest_configure(config: pytest.Config) -> None:
    """See `tests/conftest.py`."""
    facades.device = config.getoption("--device")
