"""What is marked on the time line. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torchelastic.ledger.events import Drain, End, Join, Restore, StoreOutage, Straggler
from torchelastic.report.model import Mark
from torchelastic.report.part import Part, name_parts
from torchelastic.report.told import Told


def marks_of(told: Iterable[Told], parts: Sequence[Part]) -> tuple[Mark, ...]:
    """All marks, by time.

    Args:
        told: events of all journals.
        parts: an outage that nobody told the end of lasts to the end of its part.
    """
    events = [one for one in told if not isinstance(one.event, StoreOutage)]
    marks = [mark for one in events for mark in _mark(one)]
    marks += [mark for part in parts for mark in _outages(part)]
    return tuple(sorted(marks, key=lambda mark: mark.at_ns))


def _mark(one: Told) -> Iterator[Mark]:
    event = one.event
    if isinstance(event, Join) and event.is_first:
        rank = f" as rank {event.rank}" if event.rank >= 0 else ""
        yield _at(one, "join", f"joins round {event.round}{rank} of {event.world_size}")
    elif isinstance(event, End):
        how = event.cause or ("lost" if event.is_loss else "ended")
        yield _at(one, "loss" if event.is_loss else "end", f"{how}, after step {event.step}")
    elif isinstance(event, Drain):
        yield _at(one, "drain", f"left in order after step {event.step}")
    elif isinstance(event, Straggler):
        yield _at(one, "straggler", f"slow: {event.relative_percent:.0f} % of the best")
    elif isinstance(event, Restore) and event.source == "checkpoint":
        yield _at(one, "back", f"level at step {event.step} from a checkpoint")


def _at(one: Told, kind: str, text: str) -> Mark:
    host, place, _life = name_parts(one.name)
    return Mark(at_ns=one.at_ns, kind=kind, place=f"{host}/{place}" if one.name else "", text=f"{one.name} {text}")


def _outages(part: Part) -> Iterator[Mark]:
    began_ns: int | None = None
    for event in part.journal.events:
        if not isinstance(event, StoreOutage):
            continue
        if not event.is_over:
            began_ns = event.at_ns
            continue
        yield _outage(part, event.at_ns - event.away_ns if began_ns is None else began_ns, event.at_ns, "")
        began_ns = None
    if began_ns is not None:
        yield _outage(part, began_ns, part.now_ns, ", and not back as far as is known")


def _outage(part: Part, from_ns: int, to_ns: int, more: str) -> Mark:
    text = f"{part.host}: etcd out of sight{more}; training goes on"
    return Mark(at_ns=part.since_began(from_ns), kind="outage", place="", text=text, took_ns=to_ns - from_ns)
