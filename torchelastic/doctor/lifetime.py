"""Which sources of a deadline apply here, and what they say: each is asked once. No signal is handled, none is sent."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchelastic.doctor.findings import Finding, Level
from torchelastic.lifetime.deadline import Deadline
from torchelastic.lifetime.sources.detection import SIGNALS_VARIABLE, close_all, detect, term_grace_s
from torchelastic.lifetime.sources.notice import Notices
from torchelastic.lifetime.sources.poller import Poll, Poller
from torchelastic.lifetime.sources.signals import parse_signals

NAME = "deadlines"
#: With an end that is nearer than this there is a warning: hardly any time to start and to save.
NEAR_S = 300.0
_REMEDY = "see docs/lifetime.md for the variables and what they hold"


@dataclass(frozen=True)
class DeadlineSource:
    """One source of a deadline.

    Attributes:
        name: of it.
        reason: where it is known from.
        remaining_s: seconds until then; None: it knows of none at present.
    """

    name: str
    reason: str
    remaining_s: float | None


@dataclass(frozen=True)
class LifetimeFacts:
    """What was found.

    Attributes:
        sources: those that apply here.
        grace_s: from SIGTERM to SIGKILL, as far as is known; None: see `failure`.
        complaints: warnings of the sources.
        failure: why none could be detected; "" if they could.
    """

    sources: tuple[DeadlineSource, ...] = ()
    grace_s: float | None = None
    complaints: tuple[str, ...] = ()
    failure: str = ""


def judge_lifetime(facts: LifetimeFacts) -> list[Finding]:
    """What a run on this host will know of its end. Pure."""
    if facts.failure:
        return [Finding(NAME, Level.ERROR, "a variable is wrong", facts.failure, _REMEDY)]
    found = [Finding(NAME, Level.WARNING, complaint, "", _REMEDY) for complaint in facts.complaints]
    for source in facts.sources:
        found.append(_judge_source(source))
    if not facts.sources:
        grace = "" if facts.grace_s is None else f", with {facts.grace_s:g} s of grace"
        found.append(Finding(NAME, Level.NOTE, f"none is known here but SIGTERM{grace}", "", _REMEDY))
    return found


def _judge_source(source: DeadlineSource) -> Finding:
    if source.remaining_s is None:
        return Finding(NAME, Level.OK, f"{source.name}: no end is known at present", source.reason)
    if source.remaining_s < NEAR_S:
        what = f"{source.name}: this host ends in {max(source.remaining_s, 0.0):.0f} s"
        return Finding(NAME, Level.WARNING, what, source.reason, "ask for more time, or begin on another host")
    return Finding(NAME, Level.OK, f"{source.name}: {source.remaining_s / 60:.0f} min are left", source.reason)


def gather_lifetime(environment: Mapping[str, str]) -> LifetimeFacts:
    """Detect the sources and ask each once. Not on the main thread: there `detect` would handle signals.

    Raises:
        RuntimeError: this is the main thread.
    """
    if threading.current_thread() is threading.main_thread():
        raise RuntimeError("ask for deadlines on another thread: on the main one they handle signals")
    polls = _AskedOnce()
    with _Warnings() as complaints:
        try:
            grace_s = term_grace_s(environment)
            _check_signals(environment.get(SIGNALS_VARIABLE, "").strip(), grace_s)
            without_signals = {name: value for name, value in environment.items() if name != SIGNALS_VARIABLE}
            deadlines = detect(without_signals, poller=polls)
        except ValueError as error:
            return LifetimeFacts(failure=str(error))
        try:
            for poll in polls.added:
                poll()
            sources = tuple(_source(deadline) for deadline in deadlines)
        finally:
            close_all(deadlines)
    return LifetimeFacts(sources, grace_s, tuple(complaints.texts))


def _check_signals(text: str, grace_s: float) -> None:
    try:
        if text:
            parse_signals(text, grace_s)
    except ValueError as error:
        raise ValueError(f"{SIGNALS_VARIABLE}: {error}") from None


def _source(deadline: Deadline) -> DeadlineSource:
    return DeadlineSource(deadline.name, deadline.reason, deadline.remaining_s(time.monotonic()))


class _AskedOnce(Poller):
    """Starts no thread: keeps what is to be asked, to be asked once."""

    def __init__(self) -> None:
        super().__init__()
        self.added: list[Poll] = []

    def add(self, poll: Poll, after_s: float = 0.0) -> None:
        if after_s == 0.0:
            self.added.append(poll)

    def remove(self, poll: Poll) -> None:
        pass


class _Warnings(logging.Handler):
    """Collects what the sources warn of on this thread, inside of a `with` block."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self._thread = threading.get_ident()
        self._logger = logging.getLogger("torchelastic.lifetime")
        self._level, self._propagates = self._logger.level, self._logger.propagate

    def __enter__(self) -> _Warnings:
        self._logger.addHandler(self)
        self._logger.setLevel(logging.WARNING)
        self._logger.propagate = False
        return self

    def __exit__(self, *_error: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)
        self._logger.propagate = self._propagates

    def emit(self, record: logging.LogRecord) -> None:
        # what a source announces is shown with the source
        if record.thread == self._thread and record.name != Notices.__module__:
            self.texts.append(record.getMessage())


def check() -> Sequence[Finding]:
    """Ask the sources of this process."""
    return judge_lifetime(gather_lifetime(os.environ))
