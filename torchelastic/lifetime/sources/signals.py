"""Signals that announce the end: SIGTERM, and those that a scheduler sends (`sbatch --signal`).

A handler here only records the time. The training loop, which samples the deadline, decides what to do.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from types import FrameType
from typing import Any

from torchelastic.checkpoint.policy.arguments import real_number
from torchelastic.lifetime.deadline import Deadline
from torchelastic.lifetime.grace import TERM_GRACE_S
from torchelastic.lifetime.sources.notice import Notice, Notices

log = logging.getLogger(__name__)

#: sbatch(1): a signal of `--signal` comes 60 s before the end if no time is given, and up to 60 s earlier than set.
USER_GRACE_S = 60.0
#: A scheduler signals every process of a job, and a launcher forwards its own: all that is one notice.
SAME_WITHIN_S = 5.0
#: An end that the scheduler knows of is what a signal announces, if it is no farther than this.
ANNOUNCED_WITHIN_S = 900.0
#: The second of these ends the process, as it would without this.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: The scheduler knows the reason of these.
FROM_SCHEDULER = (signal.SIGUSR1, signal.SIGUSR2)

_ORDINARY = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)
_live: weakref.WeakSet[SignalNotices] = weakref.WeakSet()


def parse_signals(text: str, term_grace_s: float = TERM_GRACE_S) -> dict[signal.Signals, float]:
    """Signals with their grace in seconds, from `SIGTERM=30,SIGUSR1`; `none` for none.

    Those without a grace have `term_grace_s`, except SIGUSR1 and SIGUSR2, which have `USER_GRACE_S`.

    Raises:
        ValueError: a name or a number is none; or the signal cannot be handled.

    >>> parse_signals("SIGTERM=30,SIGUSR1")
    {<Signals.SIGTERM: 15>: 30.0, <Signals.SIGUSR1: 10>: 60.0}
    """
    if text.strip().lower() == "none":
        return {}
    remedy = f"{text!r}: give signals with seconds of grace, like SIGTERM=30,SIGUSR1=60, or none"
    graces = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            number = signal.Signals[name.strip()]
            default_s = USER_GRACE_S if number in FROM_SCHEDULER else term_grace_s
            graces[number] = _seconds(value) if value else default_s
        except (KeyError, ValueError):
            raise ValueError(f"{part.strip()!r} is no signal with seconds in {remedy}") from None
    _check(graces)
    return graces


def signals_with_grace(text: str) -> set[signal.Signals]:
    """The signals whose grace is in the text of `parse_signals`.

    >>> signals_with_grace("SIGTERM=30,SIGUSR1")
    {<Signals.SIGTERM: 15>}
    """
    parts = (part.partition("=") for part in text.split(","))
    return {signal.Signals[name.strip()] for name, _, grace in parts if grace}


def _seconds(text: str) -> float:
    return real_number("grace", float(text), remedy="give seconds, 0 or more")


def _check(graces: Mapping[signal.Signals, float]) -> None:
    for number, grace_s in graces.items():
        if number in (signal.SIGKILL, signal.SIGSTOP):
            raise ValueError(f"{number.name} cannot be handled: take SIGTERM")
        real_number(f"the grace of {number.name}", grace_s, remedy="give seconds, 0 or more")


def signal_notice(
    source: str, number: signal.Signals, at_s: float, grace_s: float, known_end_s: float | None, *, is_sure: bool = True
) -> Notice | None:
    """The notice of a signal; None if it announces an end that is known exactly.

    Args:
        source: of the notice.
        number: the signal.
        at_s: when it was received, monotonic.
        grace_s: after which the process is killed.
        known_end_s: the end of the job as the scheduler knows it, monotonic; None: not known.
        is_sure: whether the grace was given, and is no guess.
    """
    if number in FROM_SCHEDULER and known_end_s is not None and known_end_s - at_s <= ANNOUNCED_WITHIN_S:
        return None
    of_grace = "of grace" if is_sure else "of grace are a guess: nobody has said how many there are"
    return Notice(
        source, "signal", at_s + grace_s, f"{number.name}, {grace_s:g} s {of_grace}", None if is_sure else at_s
    )


class SignalNotices(Notices):
    """Signals to this process, each with a grace after which it will be killed.

    The previous handler is called too. A second SIGTERM, SIGINT or SIGHUP does what it would have done without this: a
    SIGINT at once, the others if they come `SAME_WITHIN_S` after the first or later. Forked children (data loaders,
    pools) have the previous handlers.

    Args:
        graces_s: by signal, the seconds from it to the end.
        scheduler: knows the end of the job: SIGUSR1 and SIGUSR2 then only say that it is near. It is polled again
            when a signal comes (`look_again`, if it has that): a job that is preempted has another end.
        clock: monotonic seconds; that of the deadline.
        gives_way: whether the signals are handled only by default: a later handler may be put on top, and call this one
            where it has nothing to do.
        guessed: the signals whose grace is a guess: the process may be killed earlier.

    Raises:
        ValueError: this is not the main thread, a signal cannot be handled, or a grace is none.
    """

    def __init__(
        self,
        graces_s: Mapping[signal.Signals, float],
        *,
        scheduler: Deadline | None = None,
        clock: Callable[[], float] = time.monotonic,
        gives_way: bool = False,
        guessed: Collection[signal.Signals] = (),
    ) -> None:
        names = ", ".join(number.name for number in graces_s)
        super().__init__("signal", f"none came of {names}")
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("signals are handled on the main thread: make SignalNotices there")
        _check(graces_s)
        self._graces_s, self._scheduler, self._clock = dict(graces_s), scheduler, clock
        self.gives_way = gives_way
        self._guessed = frozenset(guessed)
        self._came_s: dict[signal.Signals, float] = {}
        self._seen: set[tuple[signal.Signals, float]] = set()
        self._explained: set[tuple[signal.Signals, float]] = set()
        self._is_closed = False
        self._previous: dict[signal.Signals, Any] = {}
        for number in graces_s:
            if signal.getsignal(number) is None:
                log.warning("%s is handled outside of Python: left alone", number.name)
            else:
                self._previous[number] = signal.signal(number, self._handle)
        _live.add(self)

    @property
    def graces_s(self) -> dict[signal.Signals, float]:
        """The signals that are handled here, each with its grace in seconds."""
        return {number: self._graces_s[number] for number in self._previous}

    def remaining_s(self, now_s: float) -> float | None:
        """See `Deadline`."""
        if not self._came_s:
            return None
        came = tuple(self._came_s.items())
        for number, at_s in came:
            if (number, at_s) not in self._seen:  # not in the handler: it may have interrupted whoever holds a lock
                self._seen.add((number, at_s))
                log.warning("received %s", number.name)
                getattr(self._scheduler, "look_again", lambda: None)()
        notices = self._notices_of(came, now_s)
        if notices != self._notices:
            self.tell(notices)
        return super().remaining_s(now_s)

    def _notices_of(self, came: Iterable[tuple[signal.Signals, float]], now_s: float) -> tuple[Notice, ...]:
        """A signal that has once announced the known end of the job stays explained, wherever that end is moved to."""
        left_s = None if self._scheduler is None else self._scheduler.remaining_s(now_s)
        end_s = None if left_s is None else now_s + left_s
        notices = []
        for number, at_s in came:
            if (number, at_s) in self._explained:
                continue
            is_sure = number not in self._guessed
            notice = signal_notice(self.name, number, at_s, self._graces_s[number], end_s, is_sure=is_sure)
            if notice is None:
                self._explained.add((number, at_s))
            else:
                notices.append(notice)
        return tuple(notices)

    def close(self) -> None:
        """Restore the previous handlers, unless another one is on top. Idempotent.

        On another thread than the main one, or below a handler on top, the next signal does so.
        """
        super().close()
        self._is_closed = True
        if threading.current_thread() is threading.main_thread():
            self._restore()

    def _restore(self) -> None:
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, previous)

    def _handle(self, value: int, frame: FrameType | None) -> None:
        """Runs between any two instructions of the main thread: no lock, no log."""
        number = signal.Signals(value)
        now_s = self._clock()
        first_s = self._came_s.get(number)
        previous = self._previous[number]
        is_again = first_s is not None and (number is signal.SIGINT or now_s - first_s >= SAME_WITHIN_S)
        if self._is_closed or (is_again and number in ENDING):
            signal.signal(number, previous)
            if callable(previous):
                previous(value, frame)
            else:
                os.kill(os.getpid(), value)
            return
        if first_s is not None and number in ENDING:
            return  # the same notice again; or the handler below wants what the system does by default
        if first_s is None or (number in FROM_SCHEDULER and now_s - first_s >= SAME_WITHIN_S):
            self._came_s[number] = now_s
        if callable(previous) and previous not in _ORDINARY:
            previous(value, frame)


def notices_instead_of_default(number: signal.Signals) -> SignalNotices | None:
    """The source that handles a signal in place of the default action; None: another handler, or none."""
    owner = getattr(signal.getsignal(number), "__self__", None)
    if not isinstance(owner, SignalNotices):
        return None
    below: Any = owner
    while isinstance(below, SignalNotices):
        below = below._previous.get(number)
        below = getattr(below, "__self__", below)
    return owner if below is signal.SIG_DFL else None


def _restore_in_child() -> None:
    for source in tuple(_live):
        source._restore()


def _outlive_late_notices() -> None:
    """While the interpreter ends it restores default actions: a late notice would kill the process."""
    for source in tuple(_live):
        for number in source.graces_s:
            if number in FROM_SCHEDULER and signal.getsignal(number) == source._handle:
                signal.signal(number, signal.SIG_IGN)


os.register_at_fork(after_in_child=_restore_in_child)
atexit.register(_outlive_late_notices)
