"""What happens in a run, as values: the lines of the journal, from which the ledger of a host is made.

Times are nanoseconds of the host's monotonic clock; a journal's head ties that clock to the time of the day.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from torchelastic.foreign_json import RecordError, converted
from torchelastic.observe.ledger.counters import Counters

#: Of a cause so many characters are kept.
MAX_CAUSE = 160


class LedgerFormatError(ValueError):
    """Something that should be a ledger's is not, or is that of a version which this one cannot read."""


@dataclass(frozen=True, kw_only=True)
class LedgerEvent:
    """Something that has happened to one worker, or on its host.

    Attributes:
        at_ns: when.
        worker: which process of which worker, unique in the run (`host/0.1`: the second process in place 0); empty: the
            host itself.
        rank: its rank at that time; -1: it had none.
        round: number of its round; -1: none.
        step: the number of steps that its state had seen; -1: not known.
        cause: why, for people.
    """

    kind: ClassVar[str] = ""

    at_ns: int
    worker: str = ""
    rank: int = -1
    round: int = -1
    step: int = -1
    cause: str = ""


@dataclass(frozen=True, kw_only=True)
class Start(LedgerEvent):
    """A worker's process began."""

    kind: ClassVar[str] = "start"


@dataclass(frozen=True, kw_only=True)
class Counted(LedgerEvent):
    """What a worker has counted of itself so far."""

    kind: ClassVar[str] = "counted"

    tally: Counters


@dataclass(frozen=True, kw_only=True)
class End(LedgerEvent):
    """A worker's process has ended.

    Attributes:
        exit_code: as subprocess has it (negative: a signal); None: not known.
        is_loss: whether the others lost it: it neither finished nor left in order.
    """

    kind: ClassVar[str] = "end"

    exit_code: int | None = None
    is_loss: bool = True


@dataclass(frozen=True, kw_only=True)
class Join(LedgerEvent):
    """A worker is in a group.

    Attributes:
        world_size: of the group.
        is_first: whether it was in none before.
    """

    kind: ClassVar[str] = "join"

    world_size: int = 0
    is_first: bool = False


@dataclass(frozen=True, kw_only=True)
class Failure(LedgerEvent):
    """A step failed, and was undone if it could be; `at_ns` is when this worker noticed.

    Attributes:
        began_ns: when the step before it had been committed.
        replayed_ns: what of the time since then was put down as replayed.
        is_undone: whether the state went back to its snapshot; false: it has none.
    """

    kind: ClassVar[str] = "failure"

    began_ns: int = 0
    replayed_ns: int = 0
    is_undone: bool = True


@dataclass(frozen=True, kw_only=True)
class Restore(LedgerEvent):
    """A worker's state is in sync with its group's, at `step`.

    Attributes:
        took_ns: since the group was formed.
        from_step: what its state had seen before; -1: nothing, or it is not known.
        productive_ns: the productive time that it had counted by then.
        source: "peer", "checkpoint", or empty: not known.
        end_step: the number of steps of the whole run; -1: not known.
    """

    kind: ClassVar[str] = "restore"

    took_ns: int = 0
    from_step: int = -1
    productive_ns: int = 0
    source: str = ""
    end_step: int = -1


@dataclass(frozen=True, kw_only=True)
class ReForm(LedgerEvent):
    """A worker has committed its first step after a group had to be formed anew.

    Attributes:
        phases_ns: nanoseconds by phase, in order; see `torchelastic.p2p.recovery_time.PHASES`.
        world_size: of the new group.
    """

    kind: ClassVar[str] = "re_form"

    phases_ns: Mapping[str, int] = field(default_factory=dict)
    world_size: int = 0


@dataclass(frozen=True, kw_only=True)
class FirstStep(LedgerEvent):
    """A worker's process has committed its first step: from here on a restart costs nothing more."""

    kind: ClassVar[str] = "first_step"


@dataclass(frozen=True, kw_only=True)
class Save(LedgerEvent):
    """A checkpoint was taken after `step`.

    Attributes:
        stall_ns: how long training stood still for it.
        productive_ns: the productive time that the worker had counted by then; -1: not known.
        tier: where to; empty: the manager's choice.
    """

    kind: ClassVar[str] = "save"

    stall_ns: int = 0
    productive_ns: int = -1
    tier: str = ""


@dataclass(frozen=True, kw_only=True)
class Drain(LedgerEvent):
    """A worker has left the run in order, as it was asked to."""

    kind: ClassVar[str] = "drain"


@dataclass(frozen=True, kw_only=True)
class Skipped(LedgerEvent):
    """A step was left out by all ranks, because one has called `skip_step`; `step` is the one behind it.

    Attributes:
        samples: that are trained no more in this epoch, over all ranks; 0: not known.
    """

    kind: ClassVar[str] = "skipped"

    samples: int = 0


@dataclass(frozen=True, kw_only=True)
class Straggler(LedgerEvent):
    """A worker was found to be slower than the others.

    Attributes:
        relative_percent: its progress rate, the best worker's being 100.
    """

    kind: ClassVar[str] = "straggler"

    relative_percent: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MayHang(LedgerEvent):
    """A worker is in its own code, and nothing shows that it works: a guess, of which nothing has followed yet.

    Attributes:
        for_s: for how long its step has taken by now.
        bound_s: after how long it is taken for a hang.
    """

    kind: ClassVar[str] = "may_hang"

    for_s: float = 0.0
    bound_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ComputesWrong(LedgerEvent):
    """A worker was found to compute wrong: it leaves the run, and is not started again on its host."""

    kind: ClassVar[str] = "computes_wrong"


@dataclass(frozen=True, kw_only=True)
class StoreOutage(LedgerEvent):
    """etcd is unreachable from the host, or reachable again. No account: training goes on.

    Attributes:
        is_over: whether it is back.
        away_ns: how long it was away, once it is back.
    """

    kind: ClassVar[str] = "store_outage"

    is_over: bool = False
    away_ns: int = 0


KINDS: dict[str, type[LedgerEvent]] = {
    kind.kind: kind
    for kind in (
        Start, Counted, End, Join, Failure, Restore, ReForm, FirstStep, Save, Drain, Skipped, Straggler, MayHang,
        ComputesWrong, StoreOutage,
    )
}  # fmt: skip


def is_failure(event: LedgerEvent) -> bool:
    """Whether it reports that a group broke or a worker was lost. Reports of the same round are of one failure."""
    return isinstance(event, Failure) or (isinstance(event, End) and event.is_loss)


def to_dict(event: LedgerEvent) -> dict[str, Any]:
    """For JSON: the kind, the time, and whatever is not as usual."""
    usual = {one.name: one.default for one in dataclasses.fields(event)}
    plain: dict[str, Any] = msgspec.to_builtins(event)
    return {"kind": event.kind, **{name: value for name, value in plain.items() if value != usual[name]}}


def from_dict(fields: Mapping[str, Any]) -> LedgerEvent | None:
    """What `to_dict` made; None: an event of a kind that this version does not know. Unknown fields are left out.

    Raises:
        LedgerFormatError: it is no event, a field has another type than it should, or counts do not sum up.
    """
    if not isinstance(fields, Mapping) or not isinstance(fields.get("kind"), str):
        raise LedgerFormatError(f"no event: {fields!r}"[:200])
    kind = KINDS.get(fields["kind"])
    if kind is None:
        return None
    try:
        event = converted("an event", fields, kind)
    except RecordError as error:
        raise LedgerFormatError(str(error)) from error
    if isinstance(event, Counted) and event.tally.why_wrong():
        raise LedgerFormatError(f"no counts of a worker: {event.tally.why_wrong()}")
    return event


def short(text: str) -> str:
    r"""A cause as it is kept: one printable line of at most `MAX_CAUSE` characters.

    >>> short("a\nb")
    'a b'
    """
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:MAX_CAUSE]
