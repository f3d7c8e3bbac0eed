"""Simulated jobs with deadlines: the same steps, saves and ends for every rule of `benchmarks.deadline_rules`.

A job lives several times; each life begins with its start-up, trains, and is killed at its end. What was trained after
the last save that was done by then is lost.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.deadline_rules import ONLY_TIER, RULES, End, Rule, Tally
from torchelastic.testing.clock import FakeClock

Times = Iterator[float]
#: The steps of one life: from its random numbers, and how long it is from its first step on.
Steps = Callable[[random.Random, float], Times]
#: Lives of one job.
LIVES = 6


@dataclass(frozen=True)
class Trace:
    """Jobs of one sort.

    Attributes:
        about: for people.
        steps: how long they take.
        saves_s: by tier, the most durable first, how long a save usually takes; they scatter around it.
        life_s: the shortest and the longest life.
        notice_s: the end becomes known so long before it; None: from the beginning.
        signal_grace_s: the end is told by a SIGTERM so long before it, and nobody has said how long that is.
    """

    about: str
    steps: Steps
    saves_s: Mapping[str, float]
    life_s: tuple[float, float]
    notice_s: float | None = None
    signal_grace_s: float | None = None

    def end(self, began_s: float, life_s: float) -> End:
        """The end of a life that has begun then."""
        at_s = began_s + life_s
        if self.signal_grace_s is not None:
            return End(at_s, at_s - self.signal_grace_s, is_signal=True)
        return End(at_s) if self.notice_s is None else End(at_s, at_s - self.notice_s)


def around(step_s: float) -> Steps:
    """Steps of nearly the same length."""

    def steps(draw: random.Random, _life_s: float) -> Times:
        while True:
            yield step_s * draw.uniform(0.95, 1.05)

    return steps


def slowing(draw: random.Random, life_s: float) -> Times:
    """5 ms each, until something happens in the last minute: then half a second each."""
    slow_from_s, at_s = life_s - draw.uniform(2.0, 60.0), 0.0
    while True:
        took_s = (0.5 if at_s >= slow_from_s else 0.005) * draw.uniform(0.9, 1.1)
        at_s += took_s
        yield took_s


def slow_with_outliers(draw: random.Random, _life_s: float) -> Times:
    """30 s each; one in 25 takes four to five times as long."""
    while True:
        yield 30.0 * draw.uniform(0.95, 1.05) * (draw.uniform(4.0, 5.0) if draw.random() < 1 / 25 else 1.0)


def heavy_tail(draw: random.Random, _life_s: float) -> Times:
    """Of any length, a few of them very long."""
    while True:
        yield 0.5 * draw.paretovariate(2.5)


def evaluations(draw: random.Random, _life_s: float) -> Times:
    """Every 40th step evaluates, which takes as long as 25 others."""
    step = draw.randrange(40)
    while True:
        step += 1
        yield draw.uniform(0.9, 1.1) + 25.0 * (step % 40 == 0)


def stalls(draw: random.Random, _life_s: float) -> Times:
    """Now and then the file system holds everything up."""
    while True:
        yield 12.0 if draw.random() < 0.01 else draw.uniform(0.9, 1.1)


def compiling(draw: random.Random, _life_s: float) -> Times:
    """The first step of each life compiles for a minute; the others take half a second."""
    yield 60.0 * draw.uniform(0.95, 1.05)
    yield from around(0.5)(draw, _life_s)


TRACES: Mapping[str, Trace] = {
    "slower": Trace("5 ms steps become 0.5 s", slowing, {ONLY_TIER: 2.0}, (70.0, 130.0)),
    "outliers": Trace("30 s steps, 1 in 25 takes 120 to 150 s", slow_with_outliers, {ONLY_TIER: 3.0}, (400.0, 900.0)),
    "steady": Trace("1 s steps", around(1.0), {ONLY_TIER: 3.0}, (150.0, 450.0)),
    "heavy tail": Trace("0.5 s steps with a heavy tail", heavy_tail, {ONLY_TIER: 3.0}, (150.0, 450.0)),
    "evaluations": Trace("1 s steps, every 40th evaluates for 25 s", evaluations, {ONLY_TIER: 3.0}, (150.0, 450.0)),
    "stalls": Trace("1 s steps, 1 in 100 stalls for 12 s", stalls, {ONLY_TIER: 3.0}, (150.0, 450.0)),
    "compiling": Trace("60 s to compile, then 0.5 s steps", compiling, {ONLY_TIER: 3.0}, (100.0, 165.0)),
    "slow save": Trace("1 s steps, saves of 60 s", around(1.0), {ONLY_TIER: 60.0}, (600.0, 1800.0)),
    "slow tier": Trace(
        "1 s steps, durable saves of 45 s, in memory 0.5 s, 30 s of notice",
        around(1.0), {"durable": 45.0, "memory": 0.5}, (150.0, 450.0), notice_s=30.0,
    ),
    "docker": Trace(
        "0.1 s steps, SIGTERM, SIGKILL after 10 s", around(0.1), {ONLY_TIER: 0.3}, (60.0, 180.0), signal_grace_s=10.0
    ),
    "spot pod": Trace(
        "0.1 s steps, SIGTERM, SIGKILL after 15 s", around(0.1), {ONLY_TIER: 0.3}, (60.0, 180.0), signal_grace_s=15.0
    ),
}  # fmt: skip


def live(rule: Rule, trace: Trace, clock: FakeClock, draw: random.Random, tally: Tally) -> None:
    """One life under one rule; the draws do not depend on what the rule does, step for step."""
    life_s, start_s, seed = draw.uniform(*trace.life_s), draw.uniform(5.0, 15.0), draw.random()
    began_s = clock()
    end = trace.end(began_s, life_s)
    steps, saves = trace.steps(random.Random(seed), life_s - start_s), random.Random(seed + 1.0)
    rule.begin_life(end)
    clock.advance(start_s)
    kept_s = unsaved_s = 0.0
    saved_s = -math.inf
    while True:
        action = rule.before_step()
        if action.tier is not None:
            took_s = trace.saves_s[action.tier] * saves.lognormvariate(0.0, 0.1)
            if clock() + took_s > end.at_s:
                break  # killed while it saves
            saved_s = clock()
            clock.advance(took_s)
            kept_s, unsaved_s = kept_s + unsaved_s, 0.0
            rule.is_saved()
        if action.stops:
            break
        took_s = next(steps)
        if clock() + took_s > end.at_s:
            unsaved_s += took_s
            break  # killed while it trains
        clock.advance(took_s)
        unsaved_s += took_s
        rule.step_took(took_s)
    clock.advance(max(0.0, end.at_s - clock()) + 60.0)  # until it is started again
    tally.lives += 1
    # whoever goes on after a SIGTERM with an unknown grace has saved at once, and loses no more than the grace
    tally.missed += unsaved_s > 0.0 and not (end.is_signal and saved_s >= end.told_s)
    tally.unused.append(1.0 - kept_s / life_s)


def simulate(trace: Trace, rule: str, jobs: int, seed: int, lives: int = LIVES) -> Tally:
    """What becomes of so many jobs of a trace, each of which lives so often, under the rule of that name."""
    tally = Tally()
    for job in range(jobs):
        draw, clock = random.Random(f"{seed} {job}"), FakeClock()
        with tempfile.TemporaryDirectory() as folder:
            ruled = RULES[rule](clock, Path(folder), tuple(trace.saves_s))
            for _ in range(lives):
                live(ruled, trace, clock, draw, tally)
    return tally


def table(jobs: int, seed: int, lives: int = LIVES, names: Collection[str] = tuple(TRACES)) -> Iterator[str]:
    """The traces of these names under all rules, as lines of Markdown."""
    yield "| " + " | ".join(["trace", *(f"{rule}: missed | wasted" for rule in RULES)]) + " |"
    yield "| --- " * (1 + 2 * len(RULES)) + "|"
    for trace in (TRACES[name] for name in names):
        found = [simulate(trace, rule, jobs, seed, lives) for rule in RULES]
        cells = [f"{100 * tally.missed_share:.1f} % | {100 * tally.wasted_share:.1f} %" for tally in found]
        yield "| " + " | ".join([trace.about, *cells]) + " |"
