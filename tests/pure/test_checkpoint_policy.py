"""When to save: each policy by itself, how they combine, and what no clock and no start can do to them."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.public_names import exported
from torchelastic.checkpoint.policy import (
    AtSteps,
    EverySeconds,
    EverySteps,
    FailureRate,
    Never,
    OnEnd,
    OnSignal,
    SaveDecision,
    SaveMoment,
    SavePolicy,
    YoungDaly,
)
from torchelastic.checkpoint.policy.saving import SaveIfAll, SaveIfAny

BEGAN = SaveMoment(step=1, now_s=10.0, last_saved_step=None, last_saved_s=None, began_s=10.0)
SAVED = SaveMoment(step=101, now_s=60.0, last_saved_step=100, last_saved_s=50.0, began_s=0.0)


def steps_saved(
    policy: SavePolicy, first: SaveMoment, steps: int, step_s: float = 1.0, save_steps: int = 0
) -> list[int]:
    """The steps at which a loop saves that asks after each, and skips while a save runs, for `save_steps` steps."""
    saved: list[int] = []
    moment = first
    for _ in range(steps):
        saving = moment.last_saved_step is not None and moment.step - moment.last_saved_step < save_steps
        moment = replace(moment, saving=saving)
        if policy.decide(moment) and not saving:
            saved.append(moment.step)
            moment = replace(moment, last_saved_step=moment.step, last_saved_s=moment.now_s)
        moment = replace(moment, step=moment.step + 1, now_s=moment.now_s + step_s)
    return saved


# --- every n steps ----------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.data(), st.integers(0, 500), st.integers(0, 200))
def test_every_steps_from_any_start_saves_each_of_its_steps_and_no_other(
    n: int, data: st.DataObject, start: int, steps: int
) -> None:
    offset = data.draw(st.integers(0, n - 1))
    first = replace(BEGAN, step=start + 1, began_step=start)
    expected = [step for step in range(start + 1, start + 1 + steps) if step % n == offset]
    assert steps_saved(EverySteps(n, offset), first, steps) == expected


@given(st.integers(1, 40), st.integers(1, 100), st.integers(1, 300))
def test_a_run_that_went_back_behind_its_last_save_still_saves(n: int, step: int, ahead: int) -> None:
    back = replace(SAVED, step=step, last_saved_step=step + ahead)
    assert EverySteps(n).decide(back).save == (step % n == 0)
    assert AtSteps([step]).decide(back).save


# --- at given steps ---------------------------------------------------------------------------------------------------


def test_at_steps_saves_at_these_steps_in_any_order_each_once() -> None:
    assert AtSteps([7, 3, 3]) == AtSteps((3, 7))
    assert steps_saved(AtSteps([7, 3, 12]), BEGAN, 30) == [3, 7, 12]
    assert steps_saved(AtSteps([3, 4, 9]), BEGAN, 30, save_steps=3) == [3, 6, 9]


# --- every so many seconds --------------------------------------------------------------------------------------------


def test_every_seconds_counts_from_the_last_save_and_before_it_from_the_beginning() -> None:
    assert steps_saved(EverySeconds(10.0), BEGAN, 31, step_s=4.0) == [4, 7, 10, 13, 16, 19, 22, 25, 28, 31]
    assert EverySeconds(10.0).decide(SAVED).save
    assert not EverySeconds(10.1).decide(SAVED).save
    assert EverySeconds(14.0).decide(SAVED).numbers == {"due_in_s": 4.0}
    assert EverySeconds(10.0).decide(replace(SAVED, last_saved_s=None)).because.startswith("60 s since training began")


@given(st.floats(0.5, 100.0), st.floats(-1e6, 1e6), st.floats(0.1, 5.0))
def test_a_clock_that_was_set_neither_stops_the_saves_nor_causes_one_after_each_step(
    seconds: float, shift_s: float, step_s: float
) -> None:
    set_back = replace(SAVED, now_s=SAVED.now_s + shift_s)
    steps = math.ceil(4.0 * seconds / step_s) + 5
    saved = steps_saved(EverySeconds(seconds), set_back, steps, step_s)
    assert saved, "blocked for four periods"
    assert saved[0] <= set_back.step + 2.0 * seconds / step_s + 1, "blocked for more than two periods"
    gaps = [later - earlier for earlier, later in pairwise(saved)]
    assert all(gap >= seconds / step_s * (1 - 1e-6) for gap in gaps)


# --- on request, and never --------------------------------------------------------------------------------------------


def test_on_signal_saves_when_a_stop_is_requested_unless_this_step_is_saved() -> None:
    assert not OnSignal().decide(SAVED)
    asked = replace(SAVED, stop_requested=True)
    assert OnSignal().decide(asked).save
    saved = OnSignal().decide(replace(asked, last_saved_step=101, last_saved_s=60.0))
    assert (saved.save, saved.because) == (False, "step 101 is saved already")


def test_on_end_saves_when_no_step_follows_unless_this_step_is_saved() -> None:
    assert not OnEnd().decide(SAVED)
    ends = replace(SAVED, run_ends=True)
    assert OnEnd().decide(ends).save
    assert not OnEnd().decide(replace(ends, last_saved_step=101, last_saved_s=60.0))
    assert not (OnEnd() & Never()).decide(ends)
    assert not (EverySteps(1000) | OnSignal()).decide(ends), "only what says so saves at the end"


# --- what all of them share -------------------------------------------------------------------------------------------

ALL = [
    EverySteps(1),
    AtSteps([101]),
    EverySeconds(5.0),
    OnSignal(),
    OnEnd(),
    YoungDaly(min_s=0.0, max_s=5.0),
]
DUE = replace(SAVED, stop_requested=True, run_ends=True)


@pytest.mark.parametrize("policy", ALL, ids=repr)
def test_a_policy_stays_due_while_the_previous_save_is_running_and_says_so(policy: SavePolicy) -> None:
    assert policy.decide(DUE).save
    assert "still running" not in policy.decide(DUE).because
    busy = policy.decide(replace(DUE, saving=True))
    assert busy.save
    assert busy.because.endswith("while the previous save is still running")


@pytest.mark.parametrize("policy", ALL, ids=repr)
def test_no_policy_saves_a_step_twice(policy: SavePolicy) -> None:
    assert not policy.decide(replace(DUE, last_saved_step=DUE.step))


MOMENTS = st.builds(
    SaveMoment,
    step=st.integers(1, 300),
    now_s=st.floats(0.0, 1e4),
    last_saved_step=st.none() | st.integers(0, 300),
    last_saved_s=st.none() | st.floats(0.0, 1e4),
    began_s=st.floats(0.0, 1e4),
    saving=st.booleans(),
    stop_requested=st.booleans(),
    run_ends=st.booleans(),
    failures=st.builds(FailureRate, seconds=st.floats(0.0, 1e6)),
    began_step=st.integers(0, 300),
)
PLAIN: st.SearchStrategy[SavePolicy] = st.one_of(
    st.builds(EverySteps, st.integers(1, 50)),
    st.builds(AtSteps, st.lists(st.integers(0, 300), min_size=1, max_size=5)),
    st.builds(EverySeconds, st.floats(0.1, 1e4)),
    st.builds(YoungDaly, max_s=st.floats(1.0, 1e4)),
    st.just(OnSignal()),
    st.just(OnEnd()),
    st.just(Never()),
)
POLICIES = st.recursive(
    PLAIN,
    lambda inner: st.builds(lambda a, b: a | b, inner, inner) | st.builds(lambda a, b: a & b, inner, inner),
    max_leaves=6,
)


@given(MOMENTS, POLICIES, POLICIES, POLICIES)
def test_or_and_and_obey_their_laws(moment: SaveMoment, a: SavePolicy, b: SavePolicy, c: SavePolicy) -> None:
    def saves(policy: SavePolicy) -> bool:
        return policy.decide(moment).save

    assert saves(a | b) == saves(b | a) == (saves(a) or saves(b))
    assert saves(a & b) == saves(b & a) == (saves(a) and saves(b))
    assert (a | b) | c == a | (b | c)
    assert (a & b) & c == a & (b & c)
    assert saves(a & (b | c)) == saves((a & b) | (a & c))
    assert saves(a | (b & c)) == saves((a | b) & (a | c))
    assert a | a == a == a & a
    assert saves(a | (a & b)) == saves(a) == saves(a & (a | b))


def test_a_combination_is_written_as_one_would_type_it() -> None:
    names = {"EverySteps": EverySteps, "OnSignal": OnSignal, "Never": Never}
    for policy in (EverySteps(5) | OnSignal() & Never(), (EverySteps(5) | OnSignal()) & Never(), Never() & OnSignal()):
        assert eval(repr(policy), names) == policy
    assert repr((EverySteps(5) | OnSignal()) & Never()) == "(EverySteps(n=5, offset=0) | OnSignal()) & Never()"


def test_a_combination_gives_the_reasons_that_decided_and_keeps_all_answers() -> None:
    either = (EverySteps(100) | EverySeconds(10.0)).decide(SAVED)
    assert (either.save, either.because) == (True, "10 s since the last save (every 10 s)")
    assert either.numbers == {"due_in_s": 0.0, "due_in_steps": 99.0}
    assert [part.save for part in either.parts] == [False, True]
    both = (EverySteps(100) & EverySeconds(10.0)).decide(SAVED)
    assert (both.save, both.because) == (False, "the next is step 200 (every 100 steps)")


def test_a_decision_is_as_true_as_it_says_and_its_numbers_are_frozen() -> None:
    decision = SaveDecision(False, "no reason", {"due_in_s": 3.0})
    assert not decision
    assert str(decision) == "no save: no reason"
    assert SaveDecision(True, "x")
    with pytest.raises(TypeError):
        cast(Any, decision.numbers)["due_in_s"] = 0.0
    assert pickle.loads(pickle.dumps(decision)) == decision
    assert len({decision, copy.deepcopy(decision)}) == 1


# --- wrong arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: EverySteps(0), ValueError, "n is 0: .*1 or more.*Never"),
        (lambda: EverySteps(cast(int, 2.5)), TypeError, "n is 2.5, which is no whole number"),
        (lambda: EverySteps(10, offset=10), ValueError, "offset is 10: .*less than n=10"),
        (lambda: EverySteps(10, offset=-1), ValueError, "offset is -1"),
        (lambda: AtSteps([]), ValueError, "steps is empty: .*Never"),
        (lambda: AtSteps([5, -1]), ValueError, "steps is -1"),
        (lambda: EverySeconds(0.0), ValueError, "seconds is 0.0: .*above 0"),
        (lambda: EverySeconds(math.nan), ValueError, "seconds is nan"),
        (lambda: EverySeconds(math.inf), ValueError, "seconds is inf: .*Never"),
        (lambda: EverySeconds(cast(float, "60")), TypeError, "seconds is '60', which is no number"),
        (lambda: YoungDaly(tier=""), ValueError, "tier is empty"),
        (lambda: YoungDaly(tier=cast(str, 5)), TypeError, "tier is 5"),
        (lambda: YoungDaly(min_s=-1.0), ValueError, "min_s is -1.0"),
        (lambda: YoungDaly(max_s=math.nan), ValueError, "max_s is nan"),
        (lambda: YoungDaly(min_s=10.0, max_s=5.0), ValueError, "min_s is 10.0: .*max_s=5.0"),
        (lambda: YoungDaly(prior_cost_s=-0.1), ValueError, "prior_cost_s is -0.1"),
        (lambda: YoungDaly(failure_classes="job"), TypeError, "failure_classes is 'job': give a set"),
        (lambda: YoungDaly(prior=cast(Any, 3600)), TypeError, "prior is 3600: give a FailurePrior"),
        (lambda: SaveIfAny(()), ValueError, "SaveIfAny was given no policies"),
        (lambda: SaveIfAll(cast(Any, [Never(), 5])), TypeError, "SaveIfAll was given 5"),
        (lambda: Never() | cast(Any, 5), TypeError, "unsupported operand"),
        (lambda: Never() & cast(Any, 5), TypeError, "unsupported operand"),
        (lambda: replace(SAVED, step=-1), ValueError, "step is -1"),
        (lambda: replace(SAVED, now_s=math.nan), ValueError, "now_s is nan"),
        (lambda: replace(SAVED, last_saved_s=math.inf), ValueError, "last_saved_s is inf"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    build: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build()


def test_every_policy_of_the_page_on_checkpoints_is_behind_its_front_door() -> None:
    page = (Path(__file__).parents[2] / "docs" / "checkpoint.md").read_text(encoding="utf-8")
    names = set(re.findall(r"^\| `(\w+)\(", page, flags=re.MULTILINE)) & set(exported("torchelastic.checkpoint.policy"))
    assert len(names) > 10
    assert names - set(exported("torchelastic.checkpoint")) == set()
