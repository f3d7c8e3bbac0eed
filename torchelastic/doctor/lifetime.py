"""Which sources of a deadline apply here, and what they say: each is asked once. No signal is handled, none is sent."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torchelastic.doctor.findings import Finding, Level
from torchelastic.lifetime.deadline import Deadline
from torchelastic.lifetime.grace import term_grace_s
from torchelastic.lifetime.sources.detection import SIGNALS_VARIABLE, close_all, detect
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
    """Detect the sources and ask each once. Not on the main thread: there `detect` would handle signals."""
    with _complaints() as complaints:
        try:
            grace_s = term_grace_s(environment)
            _check_signals(environment.get(SIGNALS_VARIABLE, "").strip(), grace_s)
            without_signals = {name: value for name, value in environment.items() if name != SIGNALS_VARIABLE}
            deadlines = detect(without_signals, poller=_AskedOnce())
        except ValueError as error:
            return LifetimeFacts(failure=str(error))
        sources = tuple(_source(deadline) for deadline in deadlines)
        close_all(deadlines)
    return LifetimeFacts(sources, grace_s, tuple(complaints))


def _check_signals(text: str, grace_s: float) -> None:
    try:
        if text:
            parse_signals(text, grace_s)
    except ValueError as error:
        raise ValueError(f"{SIGNALS_VARIABLE}: {error}") from None


def _source(deadline: Deadline) -> DeadlineSource:
    return DeadlineSource(deadline.name, deadline.reason, deadline.remaining_s(time.monotonic()))


class _AskedOnce(Poller):
    """Starts no thread: what is to be asked now is asked, once."""

    def add(self, poll: Poll, after_s: float = 0.0) -> None:
        if after_s == 0.0:
            poll()


class _Collected(logging.Handler):
    """Keeps what the sources warn of; what one announces is shown with the source."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != Notices.__module__:
            self.texts.append(record.getMessage())


@contextmanager
def _complaints() -> Iterator[list[str]]:
    logger, collected = logging.getLogger("torchelastic.lifetime"), _Collected()
    level = logger.level
    logger.addHandler(collected)
    logger.setLevel(logging.WARNING)
    try:
        yield collected.texts
    finally:
        logger.removeHandler(collected)
        logger.setLevel(level)


def check() -> Sequence[Finding]:
    """Ask the sources of this process."""
    return judge_lifetime(gather_lifetime(os.environ))
