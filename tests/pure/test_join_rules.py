"""What an error means in a group that is not the one that has trained before: the decision, as a table."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from torchelastic.join_rules import (
    AfterError,
    GroupChange,
    Reshaped,
    after_error,
    can_go_on_without,
    group_change,
    may_be_dismissed,
)
from torchelastic.rendezvous.records import NO_ROUND, Round, StateStatus

NEW, SMALLER = Reshaped.NEW_MEMBERS, Reshaped.SMALLER
JOINED, LOST, SAME = GroupChange((1,), 1, 2), GroupChange((), 2, 1), GroupChange((), 2, 2)


def round_of(number: int, *roster: str, stale: tuple[int, ...] = (), status: str = "COMPLETE") -> Round:
    return Round(number, roster=roster, stale=stale, state_status=StateStatus[status])


@pytest.mark.parametrize(
    ("former", "joined", "newcomers", "kind"),
    [
        (round_of(1, "a"), round_of(2, "a", "b", stale=(1,)), (1,), NEW),
        (round_of(1, "a", "b"), round_of(2, "a", "c", stale=(1,)), (1,), NEW),  # one of them replaced
        (round_of(1, "a", "b"), round_of(2, "a", "b", stale=(1,)), (), None),  # b lost the last step, and is not new
        (round_of(1, "a", "b", "c"), round_of(3, "a", "b"), (), SMALLER),
        (round_of(1, "a", "b"), round_of(2, "a", status="UNCOMMITTED"), (), SMALLER),
    ],
)
def test_who_is_new_is_known_from_the_last_round_in_which_a_step_has_succeeded(
    former: Round, joined: Round, newcomers: tuple[int, ...], kind: Reshaped | None
) -> None:
    change = group_change(former, joined, 0, in_sync=False)
    assert change is not None
    assert (change.newcomers, change.kind) == (newcomers, kind)


def test_in_a_sync_it_counts_who_lacks_the_state() -> None:
    change = group_change(round_of(1, "a", "b"), round_of(2, "a", "b", stale=(1,)), 0, in_sync=True)
    assert change == GroupChange((1,), 2, 2)


@pytest.mark.parametrize(
    ("former", "joined", "rank"),
    [
        (NO_ROUND, round_of(1, "a", "b", status="INITIAL"), 0),  # nobody has trained
        (NO_ROUND, round_of(2, "a", "b", stale=(1,)), 1),  # the newcomer itself
        (round_of(1, "b"), round_of(5, "a", "b", stale=(1,)), 1),  # it was a spare for long
        (round_of(2, "a", "b"), round_of(2, "a", "b"), 0),  # a step has succeeded in this one
        (round_of(1, "a", "b"), round_of(2, "a", "c", status="PARTIAL"), 0),  # there is no state left to keep
    ],
)
def test_nobody_is_new_to_one_that_does_not_hold_a_state_from_before(former: Round, joined: Round, rank: int) -> None:
    assert group_change(former, joined, rank, in_sync=False) is None


@pytest.mark.parametrize(
    ("change", "seen_in", "after"),
    [
        (None, (), AfterError.RAISED),
        (SAME, (), AfterError.RAISED),
        (JOINED, (), AfterError.WITHOUT_NEWCOMERS),
        (JOINED, (NEW,), AfterError.WITHOUT_NEWCOMERS),  # another one has joined
        (JOINED, (SMALLER,), AfterError.RAISED),  # the step itself fails, with whomever
        (LOST, (), AfterError.WITH_AS_MANY),
        (LOST, (SMALLER,), AfterError.WITH_AS_MANY),  # whoever came was lost again
        (LOST, (NEW,), AfterError.RAISED),
    ],
)
def test_an_error_that_would_end_a_holder_of_the_state_is_laid_to_what_has_changed(
    change: GroupChange | None, seen_in: Collection[Reshaped], after: AfterError
) -> None:
    assert after_error(change, is_over=True, may_be_theirs=True, seen_in=seen_in) is after


@pytest.mark.parametrize("change", [None, SAME, JOINED, LOST])
def test_what_is_tried_again_anyway_is_and_what_cannot_be_theirs_is_raised(change: GroupChange | None) -> None:
    assert after_error(change, is_over=False, may_be_theirs=True, seen_in=()) is AfterError.AGAIN
    assert after_error(change, is_over=True, may_be_theirs=False, seen_in=()) is AfterError.RAISED


@pytest.mark.parametrize(("min_workers", "may"), [(1, True), (2, False)])
def test_a_newcomer_is_not_wanted_back_only_where_the_others_are_enough(min_workers: int, may: bool) -> None:
    assert can_go_on_without(GroupChange((1,), 2, 2), min_workers) is may


@pytest.mark.parametrize(
    ("former", "joined", "rank", "may"),
    [
        (NO_ROUND, round_of(2, "a", "b", stale=(1,)), 1, True),
        (round_of(1, "a", "b"), round_of(3, "a", "b", stale=(1,)), 1, True),  # it lost the last step, or was a spare
        (round_of(1, "a", "b"), round_of(2, "a", "b"), 1, False),
        (NO_ROUND, round_of(1, "a", "b", status="INITIAL"), 1, False),
        (NO_ROUND, round_of(2, "a"), 0, False),
    ],
)
def test_only_who_lacked_a_state_that_others_had_looks_whether_they_go_on_without_it(
    former: Round, joined: Round, rank: int, may: bool
) -> None:
    assert may_be_dismissed(former, joined, rank) is may
