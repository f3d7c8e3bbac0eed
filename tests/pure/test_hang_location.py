"""Who is named when a group was given up: the odd one out, by step and line; what is read from others is only text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchelastic.p2p.hang_location import HangLocation, decode, describe, outliers
from torchelastic.p2p.stacks import MAX_WHERE

HERE, THERE = "train.py:52 train_step", "train.py:41 train_step"


def test_nobody_is_odd_where_all_stood_at_one_place() -> None:
    assert outliers([HangLocation(rank, 7, HERE) for rank in range(4)]) == ()
    assert describe([HangLocation(rank, 7, HERE) for rank in range(4)]) == ""
    assert describe([HangLocation(0, 7, HERE)]) == ""
    assert describe([]) == ""


def test_the_one_elsewhere_is_named_by_line() -> None:
    locations = [HangLocation(0, 7, HERE), HangLocation(1, 7, HERE), HangLocation(2, 7, THERE)]
    assert outliers(locations) == (locations[2],)
    assert describe(locations) == f"rank 2 was in {THERE} (step 7), ranks 0, 1 in {HERE} (step 7)"


def test_the_one_in_another_step_is_named_though_it_waits_in_the_same_line() -> None:
    locations = [HangLocation(0, 8, HERE), HangLocation(1, 7, HERE), HangLocation(2, 7, HERE)]
    assert outliers(locations) == (locations[0],)


@given(st.integers(0, 9999), st.integers(0, 2**40), st.text(max_size=300))
def test_what_is_told_is_read_again_as_far_as_it_can_be_printed(rank: int, step: int, where: str) -> None:
    stand = decode(HangLocation(rank, step, where).encode())
    assert stand is not None
    assert (stand.rank, stand.step) == (rank, step)
    assert stand.where.isprintable()
    assert len(stand.where) <= MAX_WHERE
    if where.isprintable() and len(where) <= MAX_WHERE:
        assert stand.where == where
