from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.checkpoint.policy.costs import Bound
from torchelastic.lifetime.decision import SaveTarget, decide
from torchelastic.lifetime.iteration_times import guess

DURABLE, DISK, MEMORY = (
    SaveTarget(name, guess(s, "given"), s / 2) for name, s in (("durable", 60), ("disk", 8), ("ram", 1))
)
STEP = guess(2.0, "given")

tiers = st.lists(st.floats(0.0, 1e4), min_size=1, max_size=4).map(
    lambda bounds: [SaveTarget(f"tier {number}", guess(bound, "given")) for number, bound in enumerate(bounds)]
)
times = st.floats(-1e4, 1e5)
steps = st.floats(0.0, 1e3).map(lambda seconds: guess(seconds, "given"))
reserves = st.floats(0.0, 100.0)


def test_too_late_for_the_most_durable_tier_it_takes_the_next_and_says_so() -> None:
    decision = decide(14.9, STEP, [DURABLE, DISK, MEMORY], reserve_s=5.0)
    assert (decision.action, decision.tier) == ("save and stop", "disk")
    assert "too late for 'durable', which takes at most 60 s" in decision.because
    on = decide(15.0, STEP, [DURABLE, DISK, MEMORY], reserve_s=5.0)
    assert (on.action, on.tier) == ("go on", "disk"), "the tier below has its own last safe step"


@pytest.mark.parametrize(
    ("step_margin_s", "save_margin_s", "needed_s"), [(0, 0, 67), (1, 0, 66), (1, 3, 63), (1, 9, 62)]
)
def test_the_margins_of_few_samples_are_part_of_the_reserve(
    step_margin_s: float, save_margin_s: float, needed_s: float
) -> None:
    step = Bound(2.0, 0.99, False, 3, "of a test", step_margin_s)
    tier = SaveTarget("durable", Bound(60.0, 0.99, False, 3, "of a test", save_margin_s))
    assert not decide(needed_s, step, [tier], reserve_s=5.0).stops
    assert decide(needed_s - 0.1, step, [tier], reserve_s=5.0).stops


@pytest.mark.parametrize(
    ("remaining_s", "is_saved", "action"),
    [
        (200.0, False, "go on"),
        (70.0, False, "save and go on"),
        (70.0, True, "go on"),
        (22.0, False, "save and go on"),
        (20.0, False, "save and stop"),
        (14.0, True, "go on"),
        (12.0, True, "save and stop"),
    ],
)
def test_where_only_the_first_steps_are_known_one_more_is_tried_once_all_is_saved(
    remaining_s: float, is_saved: bool, action: str
) -> None:
    """If it is quick there has to be time to save it: 8 s, 5 s in reserve, and 8 s more if nothing is saved yet."""
    first = guess(90.0, "it may have compiled")
    decision = decide(remaining_s, first, [DISK], reserve_s=5.0, may_try_step=True, is_saved=is_saved)
    assert (decision.action, decision.tier) == (action, "disk")
    assert ("only the first steps are known" in decision.because) is (remaining_s < 103.0 and not decision.stops)
    assert decide(remaining_s, first, [DISK], reserve_s=5.0, is_saved=is_saved).stops is (remaining_s < 103.0)


@pytest.mark.parametrize(("first_s", "pays"), [(9.9, False), (10.0, True)])
def test_a_trial_step_pays_where_the_first_ones_were_long(first_s: float, pays: bool) -> None:
    decision = decide(17.0, guess(first_s, "it may have compiled"), [DISK], may_try_step=True)
    assert decision.stops is not pays


def test_the_reserve_is_there_to_be_used() -> None:
    decision = decide(9.0, STEP, [DURABLE, DISK], reserve_s=5.0)
    assert (decision.action, decision.tier, decision.fits) == ("save and stop", "disk", True)
    assert "the reserve of 5 s is needed" in decision.because


@pytest.mark.parametrize(("remaining_s", "says"), [(0.5, "0.5 s are left"), (-3.0, "over since 3 s")])
def test_where_nothing_fits_it_takes_the_quickest_and_says_so(remaining_s: float, says: str) -> None:
    decision = decide(remaining_s, STEP, [DURABLE, MEMORY, DISK], reserve_s=5.0)
    assert (decision.action, decision.tier, decision.fits) == ("save and stop", "ram", False)
    assert says in decision.because
    assert "no save is sure to fit" in decision.because


@given(times, steps, tiers, reserves)
def test_going_on_always_leaves_time_for_the_save(
    remaining_s: float, step: object, some: list[SaveTarget], r: float
) -> None:
    decision = decide(remaining_s, step, some, reserve_s=r)  # type: ignore[arg-type]
    tier = next(tier for tier in some if tier.name == decision.tier)
    if not decision.stops:
        assert decision.numbers["step_s"] + tier.bound.seconds + r <= remaining_s
    assert decision.fits is (tier.bound.seconds <= remaining_s)
    assert 0.0 <= decision.given_up_s <= max(0.0, remaining_s)


@given(times, steps, tiers, reserves)
def test_no_tier_is_passed_over_that_fits(remaining_s: float, step: object, some: list[SaveTarget], r: float) -> None:
    decision = decide(remaining_s, step, some, reserve_s=r)  # type: ignore[arg-type]
    place = [tier.name for tier in some].index(decision.tier or "")
    room_s = remaining_s - r if any(tier.bound.seconds + r <= remaining_s for tier in some) else remaining_s
    if decision.fits:
        assert all(tier.bound.seconds + 1e-9 > room_s for tier in some[:place])
    else:
        assert some[place].bound.seconds == min(tier.bound.seconds for tier in some) > remaining_s


@given(times, st.floats(0.0, 1e3), steps, tiers, reserves)
def test_less_time_never_turns_stopping_into_going_on(
    remaining_s: float, less_s: float, step: object, some: list[SaveTarget], reserve_s: float
) -> None:
    """For one and the same tier; a tier below may have its own last safe step."""
    more = decide(remaining_s, step, some, reserve_s=reserve_s)  # type: ignore[arg-type]
    less = decide(remaining_s - less_s, step, some, reserve_s=reserve_s)  # type: ignore[arg-type]
    if more.stops and more.tier == less.tier:
        assert less.stops


def test_no_trial_is_made_while_the_deadline_is_far() -> None:
    unmeasured = SaveTarget("durable", guess(60.0, "a guess"))
    near = decide(1000.0, STEP, [unmeasured], may_try={"durable"})
    far = decide(10_000.0, STEP, [unmeasured], may_try={"durable"})
    assert (near.action, far.stops) == ("save and go on", False)
    assert far == decide(10_000.0, STEP, [unmeasured])
