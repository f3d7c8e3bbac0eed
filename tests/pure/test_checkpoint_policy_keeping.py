"""What to keep: tables of checkpoints in, what stays out."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.checkpoint.policy import (
    KeepAll,
    KeepBest,
    KeepDecision,
    KeepEvery,
    KeepEverySeconds,
    KeepLast,
    KeepPolicy,
    KeptCheckpoint,
    prunable,
)
from torchelastic.checkpoint.policy.keeping import KeepIfAll, KeepIfAny
from torchelastic.checkpoint.store.inventory import CheckpointInfo, prunable_checkpoints
from torchelastic.checkpoint.store.manifest import Manifest
from torchelastic.checkpoint.store.save_id import SaveId


def at(*steps: int, every_s: float = 60.0) -> list[KeptCheckpoint]:
    return [KeptCheckpoint(step, place * every_s) for place, step in enumerate(steps)]


def rated(*losses: float | None) -> list[KeptCheckpoint]:
    return [
        KeptCheckpoint(place + 1, float(place), metrics={} if loss is None else {"loss": loss})
        for place, loss in enumerate(losses)
    ]


def steps_kept(policy: KeepPolicy, checkpoints: Sequence[KeptCheckpoint]) -> list[int]:
    return [there.step for there, keep in zip(checkpoints, policy.kept(checkpoints), strict=True) if keep]


def streamed(policy: KeepPolicy, checkpoints: Sequence[KeptCheckpoint]) -> list[int]:
    """What is there in the end, if after each save what may be deleted is deleted."""
    there: list[KeptCheckpoint] = []
    for checkpoint in checkpoints:
        there.append(checkpoint)
        gone = prunable(policy, there)
        there = [candidate for candidate in there if candidate not in gone]
    return [checkpoint.step for checkpoint in there]


@dataclass(frozen=True)
class KeepNothing(KeepPolicy):
    def wanted(self, checkpoints: Sequence[KeptCheckpoint]) -> Sequence[str | None]:
        return [None] * len(checkpoints)


@dataclass(frozen=True)
class Forgetful(KeepPolicy):
    def wanted(self, checkpoints: Sequence[KeptCheckpoint]) -> Sequence[str | None]:
        return []


@pytest.mark.parametrize(
    ("policy", "there", "kept"),
    [
        (KeepAll(), at(1, 2, 3), [1, 2, 3]),
        (KeepLast(2), at(10, 20, 30, 40), [30, 40]),
        (KeepLast(9), at(10, 20), [10, 20]),
        (KeepEvery(100), at(50, 100, 150, 200, 250), [100, 200, 250]),
        (KeepEvery(100), at(0, 50, 90, 130, 190, 210, 250), [0, 130, 210, 250]),
        (KeepEvery(1), at(3, 4, 5), [3, 4, 5]),
        (KeepEverySeconds(120.0), at(1, 2, 3, 4, 5, 6), [1, 3, 5, 6]),
        (KeepEverySeconds(61.0), at(1, 2, 3, 4), [1, 3, 4]),
        (KeepBest("loss"), rated(3.0, 1.0, 2.0), [2, 3]),
        (KeepBest("loss", n=2), rated(3.0, 1.0, 2.0, 9.0), [2, 3, 4]),
        (KeepBest("loss", mode="max"), rated(3.0, 1.0, 2.0), [1, 3]),
        (KeepBest("loss"), rated(1.0, 1.0, 2.0), [2, 3]),
        (KeepBest("loss"), rated(math.nan, None, 5.0, math.inf), [3, 4]),
        (KeepBest("loss", mode="max"), rated(-math.inf, 5.0, math.nan), [2, 3]),
        (KeepBest("loss"), rated(None, None), [2]),
        (KeepLast(1) | KeepEvery(100), at(100, 110, 200, 210), [100, 200, 210]),
        (KeepLast(3) & KeepEvery(100), at(100, 110, 200, 210), [200, 210]),
        (KeepNothing(), at(1, 2, 3), [3]),
        (KeepAll(), [], []),
    ],
    ids=str,
)
def test_what_is_kept(policy: KeepPolicy, there: list[KeptCheckpoint], kept: list[int]) -> None:
    assert steps_kept(policy, there) == kept
    assert [checkpoint.step for checkpoint in prunable(policy, there)] == [c.step for c in there if c.step not in kept]


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (KeepLast(3), [0, 3, 4]),
        (KeepLast(2), [3, 4]),
        (KeepEvery(20), [3, 4]),
        (KeepBest("loss", n=2), [3, 4]),
        (KeepLast(2) & KeepEvery(20), [3, 4]),
        (KeepAll(), [0, 1, 2, 3, 4]),
    ],
    ids=str,
)
def test_a_step_that_was_saved_again_counts_once_and_its_last_save_stays(policy: KeepPolicy, kept: list[int]) -> None:
    """The run has gone back from 30 to 10: 20 was saved again, and 40 twice, the second time since it was stopped."""
    there = [
        KeptCheckpoint(step, float(place), {"loss": 60.0 - step}) for place, step in enumerate((10, 20, 40, 20, 40))
    ]
    assert [place for place, keep in enumerate(policy.kept(there)) if keep] == kept


def test_the_best_step_stays_where_it_was_saved_again_without_its_metric() -> None:
    there = [KeptCheckpoint(10, 0.0, {"loss": 0.1}), KeptCheckpoint(10, 1.0), KeptCheckpoint(20, 2.0, {"loss": 0.2})]
    assert KeepBest("loss").kept(there) == [True, False, True]


def test_each_decision_has_its_reason() -> None:
    there = [replace(at(100)[0], pinned=True), *at(100, 150, 200, 250, 300)[1:]]
    policy = KeepLast(2) | KeepEvery(150)
    assert [str(decision) for decision in policy.decide(there)] == [
        "keep: pinned",
        "keep: the first from step 150 on",
        "delete: not wanted by KeepLast(n=2) | KeepEvery(n_steps=150)",
        "keep: one of the 2 newest",
        "keep: one of the 2 newest; the first from step 300 on",
    ]
    assert not KeepDecision(False, "x")
    assert KeepBest("loss", n=2).decide(rated(0.5, 0.25))[0].because == "number 2 by min loss (0.5)"
    assert KeepNothing().decide(at(1))[0].because == "the newest"


def test_a_misspelt_metric_deletes_nothing_that_was_rated() -> None:
    there = [*rated(0.5, 0.2, 0.3), KeptCheckpoint(4, 4.0), KeptCheckpoint(5, 5.0)]
    assert steps_kept(KeepBest("los"), there) == [1, 2, 3, 5]
    assert "no metric 'los'" in KeepBest("los").decide(there)[0].because


CHECKPOINTS = st.lists(
    st.builds(
        KeptCheckpoint,
        step=st.integers(0, 60),
        saved_s=st.floats(0.0, 1e4),
        metrics=st.dictionaries(st.sampled_from(["loss", "accuracy"]), st.floats(allow_nan=True), max_size=2),
        pinned=st.booleans(),
    ),
    min_size=1,
    max_size=12,
).filter(
    lambda there: len(there) == 1 or not all(a.step > b.step and a.saved_s > b.saved_s for a, b in pairwise(there))
)
PLAIN: st.SearchStrategy[KeepPolicy] = st.one_of(
    st.just(KeepAll()),
    st.just(KeepNothing()),
    st.builds(KeepLast, st.integers(1, 5)),
    st.builds(KeepEvery, st.integers(1, 30)),
    st.builds(KeepEverySeconds, st.floats(0.1, 1e4)),
    st.builds(KeepBest, st.sampled_from(["loss", "accuracy"]), st.integers(1, 3), st.sampled_from(["min", "max"])),
)
POLICIES = st.recursive(
    PLAIN,
    lambda inner: st.builds(lambda a, b: a | b, inner, inner) | st.builds(lambda a, b: a & b, inner, inner),
    max_leaves=5,
)


@given(POLICIES, CHECKPOINTS)
def test_no_policy_deletes_the_newest_or_a_pinned_one(policy: KeepPolicy, there: list[KeptCheckpoint]) -> None:
    kept = policy.kept(there)
    assert kept[-1], "the last that was saved"
    assert kept[max(range(len(there)), key=lambda place: there[place].saved_s)], "the latest by its time"
    assert all(keep for keep, checkpoint in zip(kept, there, strict=True) if checkpoint.pinned)
    assert prunable(policy, there) == [c for c, keep in zip(there, kept, strict=True) if not keep]


@given(POLICIES, POLICIES, POLICIES, CHECKPOINTS)
def test_or_and_and_obey_their_laws(a: KeepPolicy, b: KeepPolicy, c: KeepPolicy, there: list[KeptCheckpoint]) -> None:
    either = [x or y for x, y in zip(a.kept(there), b.kept(there), strict=True)]
    both = [x and y for x, y in zip(a.kept(there), b.kept(there), strict=True)]
    assert (a | b).kept(there) == (b | a).kept(there) == either
    assert (a & b).kept(there) == (b & a).kept(there) == both
    assert (a | b) | c == a | (b | c)
    assert (a & b) & c == a & (b & c)
    assert a | a == a == a & a
    assert (a & (b | c)).kept(there) == ((a & b) | (a & c)).kept(there)


@given(st.integers(1, 20), st.lists(st.integers(1, 9), min_size=1, max_size=30))
def test_what_every_n_steps_keeps_does_not_depend_on_when_the_rest_is_deleted(n: int, gaps: list[int]) -> None:
    steps = [sum(gaps[: place + 1]) for place in range(len(gaps))]
    there = at(*steps)
    assert streamed(KeepEvery(n), there) == steps_kept(KeepEvery(n), there)
    kept = streamed(KeepEvery(n), there)[:-1]
    assert len({step // n for step in kept}) == len(kept), "one of each n steps"


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=30), st.integers(1, 4))
def test_the_best_of_all_survive_every_deletion_on_the_way(losses: list[float], n: int) -> None:
    there = rated(*losses)
    best = sorted(range(len(losses)), key=lambda place: (losses[place], -place))[:n]
    assert {place + 1 for place in best} | {len(losses)} == set(streamed(KeepBest("loss", n=n), there))


def test_a_list_that_is_the_wrong_way_round_is_refused_before_anything_is_deleted() -> None:
    with pytest.raises(ValueError, match="newest first: give them oldest first"):
        prunable(KeepLast(1), at(1, 2, 3)[::-1])
    went_back = at(300, 100, 200)  # a run that was restored from step 90
    assert steps_kept(KeepLast(1), went_back) == [200]


def in_a_place(step: int, saved_s: float) -> CheckpointInfo:
    name = SaveId(epoch=1, round=1, generation=step, step=step)
    return CheckpointInfo(step=step, saved_s=saved_s, name=name, folder=Path(), manifest=cast(Manifest, object()))


@pytest.mark.parametrize("wrong_s", [1e9, -1e9, 40_000.0], ids=["ahead", "behind", "some hours ahead"])
@pytest.mark.parametrize("until", [21, 60], ids=["once", "for ever"])
def test_a_clock_that_was_wrong_stops_no_hourly_checkpoints(wrong_s: float, until: int) -> None:
    policy = KeepLast(1) | KeepEverySeconds(3600.0)
    there: list[CheckpointInfo] = []
    for step in range(60):  # every ten minutes
        there.append(in_a_place(step, 2e9 + 600.0 * step + (wrong_s if 20 <= step < until else 0.0)))
        gone = {one.name for one in prunable_checkpoints(policy, there)}
        there = [one for one in there if one.name not in gone]
    kept = [checkpoint.step for checkpoint in there]
    assert all(later - earlier <= 6 for earlier, later in pairwise(kept))
    assert len(kept) <= 60 / 6 + 4, kept


def test_an_own_policy_must_answer_for_each_checkpoint() -> None:
    with pytest.raises(ValueError, match=r"Forgetful\(\) gave 0 answers for 2 checkpoints"):
        Forgetful().decide(at(1, 2))


def test_an_own_policy_may_want_something_without_a_word() -> None:
    @dataclass(frozen=True)
    class Silent(KeepPolicy):
        def wanted(self, checkpoints: Sequence[KeptCheckpoint]) -> Sequence[str | None]:
            return [""] * len(checkpoints)

    assert Silent().kept(at(1, 2)) == (Silent() | KeepNothing()).kept(at(1, 2)) == [True, True]
    assert Silent().decide(at(1, 2))[0] == KeepDecision(True, "")


def test_policies_and_checkpoints_are_values() -> None:
    policy = KeepLast(3) | KeepEvery(1000) & KeepBest("loss", mode="max")
    assert pickle.loads(pickle.dumps(policy)) == policy == copy.deepcopy(policy)
    names = {"KeepLast": KeepLast, "KeepEvery": KeepEvery, "KeepBest": KeepBest}
    assert eval(repr(policy), names) == policy
    assert eval(repr((KeepLast(3) | KeepEvery(1000)) & KeepBest("loss")), names) != policy
    checkpoint = KeptCheckpoint(1, 2.0, {"loss": 0.5})
    assert len({checkpoint, copy.deepcopy(checkpoint)}) == 1
    with pytest.raises(TypeError):
        cast(Any, checkpoint.metrics)["loss"] = 0.0


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: KeepLast(0), ValueError, "n is 0: give how many of the newest"),
        (lambda: KeepLast(cast(int, 1.5)), TypeError, "n is 1.5, which is no whole number"),
        (lambda: KeepEvery(0), ValueError, "n_steps is 0"),
        (lambda: KeepEverySeconds(math.nan), ValueError, "seconds is nan"),
        (lambda: KeepBest(""), ValueError, "metric is empty"),
        (lambda: KeepBest("loss", n=0), ValueError, "n is 0"),
        (lambda: KeepBest("loss", mode=cast(Any, "lowest")), ValueError, "mode is 'lowest': give 'min'"),
        (lambda: KeepIfAny(()), ValueError, "KeepIfAny was given no policies"),
        (lambda: KeepIfAll(cast(Any, [KeepAll(), 3])), TypeError, "KeepIfAll was given 3"),
        (lambda: KeepLast(1) and KeepAll(), TypeError, r"combine policies with \| and &"),
        (lambda: KeepLast(1) | cast(Any, 3), TypeError, "unsupported operand"),
        (lambda: KeepLast(1) & cast(Any, 3), TypeError, "unsupported operand"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    build: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build()
