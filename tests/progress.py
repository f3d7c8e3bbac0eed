"""How far a run of the tests is and how long it still takes: `make test` runs pytest with `-p tests.progress`.

It replaces pytest's dot for each test that passes. Tests take very different times, so that the share of tests that
have ended says little: each counts with what it took last time, which pytest's cache keeps, and one that is new there
with the mean of its ring.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping

import pytest

#: Mean seconds of a test of each ring, measured beside others on two cores.
MEAN_S = {"pure": 0.07, "process": 0.35, "contracts": 1.2, "cluster": 2.2, "slurm": 4.0, "nemo": 2.0}
_OTHER_S = 0.5
_EVERY_S = 15.0
_CACHE = "torchelastic/durations_s"
#: Before tests of so many seconds have ended, how fast this run is is not known.
_KNOWN_FROM_S = 10.0


def expected_s(name: str, durations_s: Mapping[str, float]) -> float:
    """What a test takes, as pytest names it (`tests/RING/FILE::TEST`): as last time, or as its ring on the average."""
    return durations_s.get(name, MEAN_S.get(name.split("/")[1] if name.count("/") > 1 else "", _OTHER_S))


def left_s(waiting_s: Collection[float], workers: int, expected_s: float, took_s: float) -> float:
    """How long a run still takes.

    Args:
        waiting_s: what each test is expected to take that has not ended.
        workers: how many processes run tests.
        expected_s: what those that have ended were expected to take, one after the other.
        took_s: what they took; the others are believed to be slower or faster by the same factor.

    >>> left_s([1.0, 1.0, 2.0], workers=2, expected_s=20.0, took_s=40.0)
    4.0
    >>> left_s([1.0, 30.0], workers=4, expected_s=0.0, took_s=0.0)  # one takes as long as it takes
    30.0
    """
    pace = took_s / expected_s if expected_s >= _KNOWN_FROM_S else 1.0
    return pace * max(sum(waiting_s) / workers, max(waiting_s, default=0.0))


def line(ended: int, tests: int, elapsed_s: float, left_s: float) -> str:
    """One line for the screen."""
    share = elapsed_s / (elapsed_s + left_s) if left_s else 1.0
    return f"{share:4.0%}  {ended:,} of {tests:,} tests, {_clock(elapsed_s)} so far, about {_clock(left_s)} left"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Progress:
    """Counts tests as they end and says so at most every 15 s; with xdist, in the process that hands the tests out."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._cache = cache = getattr(config, "cache", None)  # not there with `-p no:cacheprovider`
        self._durations_s: dict[str, float] = {} if cache is None else cache.get(_CACHE, {})
        self._waiting_s: dict[str, float] = {}
        self._took_s: dict[str, float] = {}
        self._tests = self._workers = 0
        self._expected_s = 0.0
        self._in_a_line = False
        self._started_s = self._said_s = time.monotonic()

    def _begin(self, names: Iterable[str]) -> None:
        """Collecting the tests is no part of the time that they take."""
        self._waiting_s = {name: expected_s(name, self._durations_s) for name in names}
        self._tests, self._workers = len(self._waiting_s), self._workers + 1
        self._started_s = self._said_s = time.monotonic()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Every worker of xdist has collected the same tests."""
        self._begin(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self._begin(item.nodeid for item in session.items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport, config: pytest.Config) -> tuple[str, str, str] | None:
        """No dot for what has passed; pytest's own letter and word for all else, and its own word with `-v`."""
        if config.get_verbosity() > 0:
            return None
        if report.when == "call" and report.passed and not hasattr(report, "wasxfail"):
            return "passed", "", "PASSED"
        self._in_a_line |= not report.passed  # pytest writes a letter
        return None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Three of each test: its fixtures, itself, and their end."""
        self._took_s[report.nodeid] = self._took_s.get(report.nodeid, 0.0) + report.duration

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._expected_s += self._waiting_s.pop(nodeid, 0.0)
        now_s = time.monotonic()
        if now_s - self._said_s >= _EVERY_S:
            self._said_s = now_s
            self._say(now_s - self._started_s)

    def pytest_sessionfinish(self) -> None:
        if self._cache is not None:
            took_s = {name: round(seconds, 3) for name, seconds in self._took_s.items()}
            self._cache.set(_CACHE, self._durations_s | took_s)

    def _say(self, elapsed_s: float) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            left = left_s(self._waiting_s.values(), max(1, self._workers), self._expected_s, sum(self._took_s.values()))
            said = line(self._tests - len(self._waiting_s), self._tests, elapsed_s, left)
            reporter.write_line(f"\n{said}" if self._in_a_line else said)
            self._in_a_line = False


def pytest_configure(config: pytest.Config) -> None:
    """Workers of xdist report to the process that started them, and say nothing themselves."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config), "torchelastic-progress")
