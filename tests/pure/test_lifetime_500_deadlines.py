"""500 deadlines of an `IterManager`, by a clock that is moved: iterations and saves of many sorts, and no reserve.

The seeds are fixed; `LIFETIME_SEED=7 pytest ...` takes others.
"""

from __future__ import annotations

import os
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from torchelastic.lifetime import IterManager, time_limit_s
from torchelastic.testing.clock import FakeClock

SEED = int(os.environ.get("LIFETIME_SEED", "1"))
DEADLINES, START_S = 500, 1000.0
Times = Iterator[float]


def steady(draw: random.Random) -> Times:
    while True:
        yield draw.uniform(0.95, 1.05)


def heavy_tail(draw: random.Random) -> Times:
    while True:
        yield 0.5 * draw.paretovariate(2.5)


def lognormal(draw: random.Random) -> Times:
    while True:
        yield draw.lognormvariate(0.0, 0.5)


def evaluation_pauses(draw: random.Random) -> Times:
    """Every 40th iteration evaluates, which takes as long as 25 others."""
    iteration = draw.randrange(40)
    while True:
        iteration += 1
        yield draw.uniform(0.9, 1.1) + 25.0 * (iteration % 40 == 0)


def stalls(draw: random.Random) -> Times:
    """Now and then the file system, or a neighbour, holds everything up."""
    while True:
        yield 12.0 if draw.random() < 0.01 else draw.uniform(0.9, 1.1)


def drifting(draw: random.Random) -> Times:
    """Longer and longer sequences: twice as slow after 400 iterations."""
    iteration = 0
    while True:
        iteration += 1
        yield (1.0 + iteration / 400.0) * draw.uniform(0.95, 1.05)


def two_speeds(draw: random.Random) -> Times:
    """A machine that is throttled for a while, again and again."""
    while True:
        speed, length = draw.choice([1.0, 1.0, 1.8]), draw.randrange(20, 80)
        for _ in range(length):
            yield speed * draw.uniform(0.95, 1.05)


KINDS: tuple[Callable[[random.Random], Times], ...] = (
    steady, heavy_tail, lognormal, evaluation_pauses, stalls, drifting, two_speeds,
)  # fmt: skip


@dataclass(frozen=True)
class End:
    """How one job met its deadline.

    Attributes:
        seed: of its random numbers.
        kind: of its iterations.
        left_s: seconds before the deadline at which its save was done; negative: too late.
        planned_s: what one more iteration and the save take at most, as far as it was known.
        decision: in words.
    """

    seed: int
    kind: str
    left_s: float
    planned_s: float
    decision: str


def one_deadline(seed: int, kind: Callable[[random.Random], Times], folder: Path) -> End:
    draw, clock = random.Random(seed), FakeClock(START_S)
    life_s = draw.uniform(150.0, 450.0)
    deadline = time_limit_s(life_s, began_s=START_S)
    manager = IterManager(velastic_dir=folder, deadline=deadline, clock=clock, redundant_time=0)
    for _ in range(200):  # saves of the lives before
        manager.save_took(4.0 * draw.lognormvariate(0.0, 0.4))
    took_s = kind(draw)
    clock.advance(draw.uniform(0.0, 20.0))
    while True:
        manager.iter()
        if manager.should_save_ckpt():
            with manager.saving():
                clock.advance(4.0 * draw.lognormvariate(0.0, 0.4))
        if manager.should_stop:
            break
        clock.advance(next(took_s))
    decision = manager.decision
    assert decision is not None
    planned_s = decision.numbers["step_s"] + decision.numbers["save_checkpoint_s"]
    return End(seed, kind.__name__, START_S + life_s - clock(), planned_s, str(decision))


@pytest.mark.long
def test_of_500_deadlines_of_many_sorts_at_least_99_in_100_are_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(IterManager, "save_manager_state", lambda *_: None)  # 60,000 files
    seeds = range(DEADLINES * SEED, DEADLINES * (SEED + 1))
    ends = [one_deadline(seed, KINDS[seed % len(KINDS)], tmp_path) for seed in seeds]
    misses = [end for end in ends if end.left_s < 0.0]
    print(f"\nLIFETIME_SEED={SEED}: {len(misses)} of {len(ends)} deadlines missed", Counter(end.kind for end in misses))
    for miss in misses:
        print(f"seed {miss.seed} ({miss.kind}): {-miss.left_s:.2f} s too late; {miss.decision}")
    assert len(misses) <= DEADLINES // 100
    for kind in (kind.__name__ for kind in KINDS):
        given_up_s = [end.left_s for end in ends if end.kind == kind]
        print(f"{kind}: given up {statistics.median(given_up_s):.1f} s in the median, {max(given_up_s):.1f} s at most")
    assert not [end for end in ends if end.left_s >= end.planned_s], "one more would have fitted"
