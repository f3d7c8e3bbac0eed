"""The same simulated deadlines for our rule and for those of velastic and PyRecover: `benchmarks.deadline_traces`.

The numbers of jobs are small, so that the test is quick; `python -m benchmarks.deadlines` takes more.
"""

from __future__ import annotations

import functools
import logging

import pytest

from benchmarks.deadline_rules import RULES, Tally
from benchmarks.deadline_traces import TRACES, simulate, table
from tests.few_examples import some_daily

SEED, JOBS, LIVES = 1, 3, 4


@pytest.fixture(autouse=True)
def quietly(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # each decision is a warning


@functools.cache
def of(trace: str, rule: str) -> Tally:
    return simulate(TRACES[trace], rule, JOBS, SEED, LIVES)


@pytest.mark.parametrize("trace", some_daily(TRACES, {"stalls", "docker"}.__contains__))
def test_no_trace_is_missed_more_often_than_by_the_peers(trace: str) -> None:
    ours = of(trace, "torchelastic")
    assert ours.lives == JOBS * LIVES
    assert ours.missed <= min(of(trace, rule).missed for rule in RULES)
    assert ours.missed == 0


@pytest.mark.long
@pytest.mark.parametrize("trace", [name for name in TRACES if name != "outliers"])
def test_no_more_is_wasted_than_by_velastic(trace: str) -> None:
    """But for steps of which few are known: its margin is the longest of them, and so it misses more of many jobs."""
    assert of(trace, "torchelastic").wasted_share <= of(trace, "velastic").wasted_share + 0.002


@pytest.mark.long
@pytest.mark.parametrize("trace", ["slower", "outliers", "steady", "heavy tail", "evaluations", "stalls", "compiling"])
def test_less_is_wasted_than_by_the_peer_that_misses_as_seldom(trace: str) -> None:
    """PyRecover stops six of the longest steps before the end."""
    assert of(trace, "torchelastic").wasted_share < of(trace, "PyRecover").wasted_share


@pytest.mark.parametrize("trace", some_daily(["docker", "spot pod"], "docker".__eq__))
def test_after_a_sigterm_with_an_unknown_grace_no_more_than_the_grace_is_lost(trace: str) -> None:
    grace_s = TRACES[trace].signal_grace_s
    assert grace_s is not None
    shortest_s, _ = TRACES[trace].life_s
    assert of(trace, "velastic").missed == JOBS * LIVES, "it handles no signal"
    assert max(of(trace, "torchelastic").unused) < (15.0 + grace_s + 2.0) / shortest_s, "the start, and the grace"


def test_the_table_has_a_line_for_each_trace() -> None:
    lines = list(table(1, SEED, 1))
    assert len(lines) == 2 + len(TRACES)
    assert {line.count("|") for line in lines} == {2 + 2 * len(RULES)}
