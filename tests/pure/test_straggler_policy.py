"""Who is a straggler, by which figures, and when it has to go."""

from __future__ import annotations

from typing import Any

import pytest

from torchelastic.p2p.stragglers import StragglerPolicy


def test_the_figures_are_those_of_the_worker_and_of_the_best() -> None:
    comparison = StragglerPolicy().compare(6.0, [8.0, 10.0, 6.0], times=1)
    assert (comparison.rate, comparison.best, comparison.relative) == (6.0, 10.0, 0.6)
    assert (comparison.is_straggler, comparison.times, comparison.stragglers) == (True, 2, 1)
    assert str(comparison) == "60 % of the best (6 against 10 per second), 2 time(s) in a row"


def test_at_the_threshold_nobody_is_one() -> None:
    comparison = StragglerPolicy(threshold=0.8).compare(8.0, [8.0, 10.0], times=5)
    assert (comparison.is_straggler, comparison.times, comparison.stragglers) == (False, 0, 0)


def test_only_a_policy_that_says_so_removes_and_only_after_its_patience() -> None:
    removing = StragglerPolicy(remove=True, patience=3)
    assert [removing.compare(1.0, [1.0, 10.0], times).has_to_go for times in range(4)] == [False, False, True, True]
    assert not removing.compare(9.0, [9.0, 10.0], times=7).has_to_go, "it has caught up"
    assert not StragglerPolicy(patience=1).compare(1.0, [1.0, 10.0], times=99).has_to_go


@pytest.mark.parametrize("wrong", [{"threshold": 1.5}, {"threshold": -0.1}, {"patience": 0}])
def test_a_policy_that_makes_no_sense_says_which_argument(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        StragglerPolicy(**wrong)
