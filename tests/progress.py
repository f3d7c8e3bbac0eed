"""How far a run of the tests is and how long it still takes: `make test` runs pytest with `-p tests.progress`.

It replaces pytest's dot for each test that passes. Tests of the rings take very different times, so that the share of
tests that have ended says little: each counts with what a test of its ring takes on the average.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest

#: Mean seconds of a test of each ring, measured on two cores; only their ratios matter.
MEAN_S = {"pure": 0.065, "process": 0.5, "contracts": 1.1, "cluster": 2.1, "slurm": 4.0, "nemo": 2.0}
_OTHER_S = 0.5
_EVERY_S = 15.0


def work_s(names: Iterable[str]) -> float:
    """What tests take, one after the other, in seconds: as pytest names them, `tests/RING/FILE::TEST`."""
    return sum(MEAN_S.get(name.split("/")[1] if name.count("/") > 1 else "", _OTHER_S) for name in names)


def line(ended: int, tests: int, done_s: float, all_s: float, elapsed_s: float) -> str:
    """One line for the screen; `done_s` of `all_s` seconds of work are done after `elapsed_s`."""
    share = done_s / all_s if all_s else 1.0
    said = f"{share:4.0%}  {ended:,} of {tests:,} tests, {_clock(elapsed_s)} so far"
    return f"{said}, about {_clock(elapsed_s * (1 / share - 1))} left" if share else said


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Progress:
    """Counts tests as they end and says so at most every 15 s; with xdist, in the process that hands the tests out."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._names: frozenset[str] = frozenset()
        self._ended: set[str] = set()
        self._done_s = 0.0
        self._in_a_line = False
        self._started_s = self._said_s = time.monotonic()

    def _begin(self, names: Iterable[str]) -> None:
        """Collecting the tests is no part of the time that they take."""
        self._names = frozenset(names)
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

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if nodeid not in self._ended:
            self._ended.add(nodeid)
            self._done_s += work_s([nodeid])
        now_s = time.monotonic()
        if now_s - self._said_s >= _EVERY_S:
            self._said_s = now_s
            self._say(now_s - self._started_s)

    def _say(self, elapsed_s: float) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            said = line(len(self._ended), len(self._names), self._done_s, work_s(self._names), elapsed_s)
            reporter.write_line(f"\n{said}" if self._in_a_line else said)
            self._in_a_line = False


def pytest_configure(config: pytest.Config) -> None:
    """Workers of xdist report to the process that started them, and say nothing themselves."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config), "torchelastic-progress")
