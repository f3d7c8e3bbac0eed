"""What failed first, and what failed because of it, in this order. Pure.

The first cause is what came first in time, not what was noticed first: a worker whose Python raised has failed when its
traceback began, and the others' broken connections come after that. Where clocks cannot tell (a process that tears
down for a second outlives those that saw its connections close), an error that speaks of a lost peer or of a time-out
is taken for a consequence of one, within `SAME_FAILURE_S`, that does not.
"""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchelastic.log_lines import NOWHERE, Position
from torchelastic.observe.ledger.accounts import Account
from torchelastic.observe.ledger.counters import Counters
from torchelastic.rendezvous.loss import loss_from_error
from torchelastic.rendezvous.worker_rules import signalled

#: Failures so close together have one cause.
SAME_FAILURE_S = 30.0
#: Of a worker that has said nothing of its end so many of its last lines are shown.
LAST_LINES = 20
#: What the end of rank 0 means where the others have finished: nobody takes its place any more.
LOST_RESULTS = " as rank 0 while the others finished: what a script saves there after training is missing"
#: Of an error so many characters stand in a line.
_MOST_ERROR = 300

_TRACEBACK = re.compile(r"(\[rank\d+\]: ?)?Traceback \(most recent call last\)")
_STACKS = re.compile(r"Fatal Python error|(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\)")
_RANK = re.compile(r"\[rank\d+\]: ?")


class Ended(enum.Enum):
    """What the end of a worker's process was to its run."""

    #: It has finished.
    FINISHED = enum.auto()
    #: It left the run in order, as it was asked to.
    LEFT = enum.auto()
    #: The others lost it.
    LOST = enum.auto()
    #: It was ended before it had asked for a group: nobody needed it any more.
    NOT_NEEDED = enum.auto()


@dataclass(frozen=True, kw_only=True)
class FailedWorker:
    """A worker of this host whose process has ended without having finished or left.

    Attributes:
        at_s: when it failed, in Unix seconds; see `failed_at_s`.
        worker: its number on this host.
        exit_code: as subprocess has it (negative: a signal); None: not known.
        position: where it stood.
        restarts: how often its process had been started again before.
        gave_up: whether it is not started again.
        is_hang: whether it was ended because it hung.
        had_finished: whether it had finished the run before, which was closed by then.
        was_first: whether it was rank 0 of the group in which the others finished.
        lines: the last lines of its standard error.
        log: path of its log; empty: there is none.
    """

    at_s: float
    worker: int
    exit_code: int | None
    position: Position = NOWHERE
    restarts: int = 0
    gave_up: bool = True
    is_hang: bool = False
    had_finished: bool = False
    was_first: bool = False
    lines: tuple[str, ...] = ()
    log: str = ""

    @property
    def who(self) -> str:
        """Its name in a line."""
        return f"worker {self.worker}"

    @property
    def how(self) -> str:
        """How it ended."""
        after = " after it had finished training" if self.had_finished else LOST_RESULTS if self.was_first else ""
        return "hung, and was ended" if self.is_hang else describe_exit(self.exit_code) + after

    @property
    def last_error(self) -> str:
        """The line that says what was raised; empty: a signal has ended it, or it said nothing."""
        said = [line for line in self.lines if line.strip()]
        if not said or self.is_hang or (self.exit_code is not None and self.exit_code < 0):
            return ""
        return raised_line(said)[:_MOST_ERROR]

    @property
    def is_consequence(self) -> bool:
        """Whether its error speaks of a peer, or of a time-out."""
        return bool(self.last_error) and loss_from_error(RuntimeError(self.last_error)) is not None

    @property
    def why(self) -> tuple[str, ...]:
        """Its last traceback, or the stacks it left, or else its last lines, unless a signal ended it."""
        found = last_account(self.lines)
        if found:
            return found
        ended_by_signal = self.exit_code is not None and self.exit_code < 0
        return () if ended_by_signal else self.lines[-LAST_LINES:]


@dataclass(frozen=True, kw_only=True)
class Undone:
    """A worker of this host lives, and its step has failed and was undone if it could be.

    Attributes:
        at_s: when it noticed.
        position: where it stood.
        error: what it raised.
        is_undone: whether its state went back to its snapshot.
    """

    at_s: float
    position: Position = NOWHERE
    error: str = ""
    is_undone: bool = True

    is_consequence = False

    @property
    def who(self) -> str:
        """Its name in a line."""
        return f"rank {self.position.rank}"

    @property
    def how(self) -> str:
        """What became of it."""
        what = "was undone" if self.is_undone else "failed and was not undone"
        return f"its step {what}: {self.error[:_MOST_ERROR]}"


@dataclass(frozen=True, kw_only=True)
class LostElsewhere:
    """A member of another launcher, of another host or an earlier one of this host, is lost; the round reports it.

    Attributes:
        at_s: when this host heard of it.
        member: its id, which begins with its host's name.
        how: what is known.
        certainty: "fact" or "guess".
        position: its rank and round.
    """

    at_s: float
    member: str
    how: str
    certainty: str
    position: Position = NOWHERE

    is_consequence = False

    @property
    def who(self) -> str:
        """Its name in a line."""
        return f"{self.member} of another launcher"


Trouble = FailedWorker | Undone | LostElsewhere


@dataclass(frozen=True)
class FailureReport:
    """What failed, the first cause first.

    Attributes:
        first: the first cause.
        others: what came with it or after it, by time, one for each worker.
        is_over: whether the run is over for this host.
    """

    first: FailedWorker | LostElsewhere
    others: tuple[Trouble, ...] = field(default=())
    is_over: bool = False

    def text(self) -> str:
        """For people: the cause with its traceback, then one line for each of the others."""
        first = self.first
        where = f" ({first.position})" if str(first.position) else ""
        if isinstance(first, FailedWorker):
            log = f", log {first.log}" if first.log else ""
            lines = [f"{first.who} failed: {first.how}{where}{log}", *first.why]
        else:
            host_says = "see that launcher's output"
            lines = [f"first, {first.who} {first.how} ({first.certainty}){where}: {host_says}"]
        return "\n".join([*lines, *(_one_line(other) for other in self.others)])

    def to_plain(self) -> dict[str, Any]:
        """For JSON: the same."""
        return {
            "is_over": self.is_over,
            "first": _plain(self.first),
            "others": [_plain(other) for other in self.others],
        }


def report_of(troubles: Sequence[Trouble], *, is_over: bool = False) -> FailureReport | None:
    """What failed first, and what else did; None: nothing but steps that were undone, of which nobody here knows why.

    Args:
        troubles: in any order.
        is_over: as in `FailureReport`.
    """
    causes = [one for one in troubles if not isinstance(one, Undone)]
    if not causes:
        return None
    first = min(causes, key=lambda one: one.at_s)
    if first.is_consequence:
        near = [one for one in causes if not one.is_consequence and one.at_s - first.at_s <= SAME_FAILURE_S]
        first = min(near, key=lambda one: one.at_s, default=first)
    told: set[object] = {first.who, *map(_rank, causes)}
    others: list[Trouble] = []
    # a step that was undone in a round before it was made good by the round that followed
    later = [
        one
        for one in troubles
        if one is not first and not (isinstance(one, Undone) and one.position.round < first.position.round)
    ]
    for one in sorted(later, key=lambda one: one.at_s):
        if one.who not in told and not (isinstance(one, Undone) and _rank(one) in told):
            told.add(one.who)
            others.append(one)
    return FailureReport(first, tuple(others), is_over)


def end_of(exit_code: int | None, tally: Counters | None, *, was_asked: bool, has_joined: bool) -> Ended:
    """What an end was.

    To be asked to leave is not to have left: a worker that a signal ended in a step was lost, whoever sent it.

    Args:
        exit_code: as subprocess has it (negative: a signal); None: not known.
        tally: what the worker has counted; None: nothing is known.
        was_asked: whether it was asked to leave the run, or stopped before a deadline.
        has_joined: whether it has ever asked for a group.
    """
    if not was_asked:
        return Ended.FINISHED if exit_code == 0 else Ended.LOST
    if exit_code is None or exit_code >= 0:
        return Ended.LEFT
    if not has_joined:
        return Ended.NOT_NEEDED
    # after its last step it has left; what ended it then (a slow exit, a crash of the interpreter) cost nobody a step
    return Ended.LEFT if tally is not None and tally.account is Account.IDLE else Ended.LOST


def failed_at_s(ended_s: float, exit_code: int | None, traceback_s: float | None) -> float:
    """When a worker failed: when its last traceback began, if that is what it ended with; else when it ended.

    >>> failed_at_s(100.0, 1, 98.5), failed_at_s(100.0, -9, 98.5), failed_at_s(100.0, 1, 20.0)
    (98.5, 100.0, 100.0)
    """
    raised = exit_code is None or exit_code > 0
    is_near = traceback_s is not None and 0.0 <= ended_s - traceback_s <= SAME_FAILURE_S
    return traceback_s if raised and is_near and traceback_s is not None else ended_s


def begins_traceback(line: str) -> bool:
    """Whether a traceback begins with this line."""
    return _TRACEBACK.match(line) is not None


def last_account(lines: Sequence[str]) -> tuple[str, ...]:
    """From the last traceback, or the stacks after it, on: what a person wants to see, not what came before."""
    starts = [number for number, line in enumerate(lines) if begins_traceback(line)]
    # a chained exception prints several tracebacks: all of one chain belong together
    while len(starts) > 1 and any("exception" in line for line in lines[starts[-2] : starts[-1]][-4:]):
        starts.pop()
    last = starts[-1] if starts else -1
    stacks = [number for number, line in enumerate(lines) if number > last and _STACKS.match(line)]
    if stacks:
        return tuple(lines[stacks[0] :])
    return tuple(lines[last:]) if starts else ()


def raised_line(lines: Sequence[str]) -> str:
    """What was raised, without what its message has beyond its first line.

    The last line if there is no traceback, or so much behind it that it may be one that was only logged.

    Args:
        lines: of standard error, none of them blank; at least one.

    >>> frame = ['Traceback (most recent call last):', '  File "a.py", line 1, in <module>', '    f()']
    >>> raised_line([*frame, "RuntimeError: sizes do not fit", "", "At:", "  a.py(1): <module>"])
    'RuntimeError: sizes do not fit'
    >>> raised_line(["[rank1]: no traceback"])
    'no traceback'
    """
    plain = [_RANK.sub("", line, count=1) for line in lines]
    starts = [number for number, line in enumerate(plain) if begins_traceback(line)]
    raised = [line for line in plain[starts[-1] + 1 :] if not line.startswith("  ")] if starts else []
    return raised[0] if 0 < len(raised) <= LAST_LINES else plain[-1]


def describe_exit(exit_code: int | None) -> str:
    """A sentence for people.

    >>> describe_exit(-9), describe_exit(137), describe_exit(3)
    ('killed by SIGKILL', 'exit code 137 (128 + SIGKILL)', 'exit code 3')
    """
    if exit_code is not None and signalled(exit_code) and exit_code > 0:
        return f"exit code {exit_code} (128 + {signal.Signals(exit_code - 128).name})"
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:  # most real-time signals have no name
        return f"killed by signal {-exit_code}"


def _rank(trouble: Trouble) -> tuple[int, int]:
    return (trouble.position.rank, trouble.position.round)


def _one_line(trouble: Trouble) -> str:
    if isinstance(trouble, Undone):
        return f"then {trouble.who} ({replace(trouble.position, rank=-1)}): {trouble.how}"
    where = f" ({trouble.position})" if str(trouble.position) else ""
    if isinstance(trouble, LostElsewhere):
        return f"then {trouble.who} {trouble.how} ({trouble.certainty}){where}"
    error = f": {trouble.last_error}" if trouble.last_error else ""
    return f"then {trouble.who} failed: {trouble.how}{where}{error}"


def _plain(trouble: Trouble) -> dict[str, Any]:
    position = trouble.position
    plain: dict[str, Any] = {"at_s": trouble.at_s, "rank": position.rank, "round": position.round}
    plain |= {"step": position.step, "how": trouble.how}
    if isinstance(trouble, FailedWorker):
        plain |= {
            "what": "failed", "local_rank": trouble.worker, "exit_code": trouble.exit_code,
            "restarts": trouble.restarts, "gave_up": trouble.gave_up, "is_hang": trouble.is_hang,
            "error": trouble.last_error, "lines": trouble.why, "log": trouble.log,
        }  # fmt: skip
    elif isinstance(trouble, Undone):
        plain |= {"what": "undone", "error": trouble.error}
    else:
        plain |= {"what": "lost", "member": trouble.member, "certainty": trouble.certainty}
    return plain
