from __future__ import annotations

import pytest

from torchelastic.testing.clock import FakeClock


def test_it_stands_still_until_it_is_advanced() -> None:
    clock = FakeClock(5.0)
    assert (clock(), clock()) == (5.0, 5.0)
    clock.advance(1.5)
    assert clock() == 6.5


def test_sleep_returns_at_once_and_later() -> None:
    clock = FakeClock(0.0)
    clock.sleep(3600.0)
    assert clock() == 3600.0


@pytest.mark.parametrize("seconds", [-0.1, float("nan"), float("inf")])
def test_it_cannot_go_back_or_nowhere(seconds: float) -> None:
    clock = FakeClock(1.0)
    with pytest.raises(ValueError, match="cannot advance"):
        clock.advance(seconds)
    assert clock() == 1.0
