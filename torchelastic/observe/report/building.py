"""Makes a report of journals: all hosts on one clock. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torchelastic.observe.ledger.figures import Seen, figures_of, seen
from torchelastic.observe.ledger.host_ledger import HostLedger
from torchelastic.observe.ledger.journal import Journal
from torchelastic.observe.ledger.ledger_events import (
    ComputesWrong,
    Counted,
    Drain,
    End,
    Failure,
    Join,
    LedgerEvent,
    Restore,
    Save,
    Skipped,
    StoreOutage,
    Straggler,
)
from torchelastic.observe.ledger.worker_lifetime import WorkerLifetime
from torchelastic.observe.report.gaps import gaps_of
from torchelastic.observe.report.incidents import incidents_of
from torchelastic.observe.report.losses import LossCurve
from torchelastic.observe.report.model import AttemptRow, HostPart, Incident, Mark, Report, SaveRow
from torchelastic.observe.report.part import Part, RunEvent, name_parts, parts_of
from torchelastic.observe.report.segments import Segment, segments_of
from torchelastic.observe.status.event_lines import lines_of, sentence
from torchelastic.observe.status.run_status import EventLine

#: The time line is cut into so many cells, or into fewer where there are more lives than that.
CELLS, FEW_CELLS, MANY_LIVES = 360, 200, 24
#: So many of the newest lines about what has happened are kept.
MOST_LINES = 2000


class NoRunError(ValueError):
    """There is no run to report of; the message says why, and what to do."""


def report_of(
    journals: Mapping[str, Journal],
    *,
    lacks: Sequence[str] = (),
    losses: LossCurve | None = None,
) -> Report:
    """The report of a run.

    Args:
        journals: of all its agents, by name; see `of_one_run`.
        lacks: what is known to be missing, as sentences.
        losses: the loss curve.

    Raises:
        NoRunError: none has a worker.
    """
    nonempty = {name: one for name, one in journals.items() if one.events or one.before.counts.first_ns is not None}
    parts, began_ns = parts_of(nonempty)
    if not parts:
        raise NoRunError("no worker has started yet, according to the journals")
    until_ns = max(part.until_ns for part in parts)
    count = CELLS if sum(len(part.book.lives) for part in parts) <= MANY_LIVES else FEW_CELLS
    edges = [until_ns * number // count for number in range(1, count)]
    workers = tuple(row for part in parts for row in _rows(part, edges))
    events = sorted(_events(parts), key=lambda one: one.at_ns)
    incidents = incidents_of(events, workers)
    run = _seen(parts, until_ns, incidents)
    silent = [f"The journal {name} contains no worker." for name in journals if name not in {one.name for one in parts}]
    return Report(
        run_id=parts[0].journal.head.run_id,
        began_ns=began_ns,
        until_ns=until_ns,
        is_over=all(row.is_ended for row in workers),
        hosts=tuple(_host(part) for part in parts),
        seen=run,
        figures=figures_of(run),
        lives=tuple(sorted(workers, key=_order)),
        earlier={part.host: part.book.earlier for part in parts if part.book.earlier.lives},
        incidents=incidents,
        saves=_saves(events),
        marks=_marks(events, parts),
        events=_lines(parts)[-MOST_LINES:],
        event_counts=_counts(events),
        losses=losses,
        lacks=(*lacks, *silent, *gaps_of(parts, workers, events, until_ns, began_ns)),
    )


def of_one_run(journals: Mapping[str, Journal], run_id: str | None, option: str) -> dict[str, Journal]:
    """The journals of a run.

    Args:
        journals: by name.
        run_id: of which run; None: there is only one.
        option: with which a person says so.

    Raises:
        NoRunError: there is no journal of it, or of several runs.
    """
    runs = sorted({journal.head.run_id for journal in journals.values()})
    if not runs:
        raise NoRunError("there is no journal that can be read: give the --log-dir of `torchelastic run`")
    if run_id is None and len(runs) > 1:
        raise NoRunError(f"there are journals of several runs: say which with {option}: {', '.join(runs)}")
    chosen = {name: one for name, one in journals.items() if one.head.run_id == (run_id or runs[0])}
    if not chosen:
        raise NoRunError(f"there is no journal of the run {run_id}, but of {', '.join(runs)}")
    return chosen


def _seen(parts: Sequence[Part], until_ns: int, incidents: Sequence[Incident]) -> Seen:
    """The sums.

    A book knows the failures of its agent's time, also those whose events are gone. Incidents are of all agents, also
    of agents that were there one after the other.
    """
    configured = max(part.journal.head.configured_workers for part in parts)
    run = seen([part.book for part in parts], [part.now_ns for part in parts], until_ns, configured)
    from_checkpoint = sum(one.restored_from == "checkpoint" for one in incidents)
    return replace(
        run,
        failures=max(run.failures, len(incidents)),
        restores_from_checkpoint=max(run.restores_from_checkpoint, from_checkpoint),
    )


def _host(part: Part) -> HostPart:
    return HostPart(
        host=part.host,
        journal=part.name,
        began_ns=part.since_began(part.first_ns),
        until_ns=part.until_ns,
        is_open=any(life.ended_ns is None for life in part.book.lives.values()),
    )


# --- workers ----------------------------------------------------------------------------------------------------------


def _rows(part: Part, edges: Sequence[int]) -> Iterator[AttemptRow]:
    ahead_ns = part.since_began(0)
    segments = segments_of(part.journal, part.book, part.now_ns, [edge_ns - ahead_ns for edge_ns in edges])
    ends = {event.worker: event for event in part.journal.events if isinstance(event, End)}
    for life in part.book.lives.values():
        cells = tuple(
            Segment(one.from_ns + ahead_ns, one.to_ns + ahead_ns, one.amounts) for one in segments[life.worker]
        )
        yield _row(part, life, ends.get(life.worker), cells)


def _row(part: Part, life: WorkerLifetime, end: End | None, parts: tuple[Segment, ...]) -> AttemptRow:
    is_ended = life.ended_ns is not None
    how = life.cause or ("" if life.exit_code is None else f"exit code {life.exit_code}")
    return AttemptRow(
        worker=life.worker,
        name=part.name_of(life.worker),
        host=part.host,
        place=part.place_of(life.worker),
        began_ns=part.since_began(life.started_ns),
        until_ns=part.since_began(life.until_ns(part.now_ns)),
        is_ended=is_ended,
        end=how if is_ended else "",
        is_loss=is_ended and (life.exit_code != 0 if end is None else end.is_loss),
        step=life.tally.step,
        committed=life.tally.committed,
        undone=life.tally.undone,
        amounts=life.amounts(part.now_ns),
        cells=parts,
    )


def _order(row: AttemptRow) -> tuple[str, tuple[int, int | str], int, str]:
    host, place, _life = name_parts(row.name)
    return host, (0, int(place)) if place.isascii() and place.isdigit() else (1, place), row.began_ns, row.worker


# --- what has happened ------------------------------------------------------------------------------------------------


def _events(parts: Iterable[Part]) -> Iterator[RunEvent]:
    for part in parts:
        detected = _detected(part.book)
        for event in part.journal.events:
            if not isinstance(event, Counted):
                detect_ns = detected.get((event.worker, event.at_ns), 0) if isinstance(event, Failure) else 0
                yield RunEvent(part.since_began(event.at_ns), event, part.name_of(event.worker), detect_ns)
        written = {event.worker for event in part.journal.events if isinstance(event, End)}
        for life in part.book.lives.values():
            is_known = life.worker in written or life.worker in part.journal.before.lives
            if life.ended_ns is not None and not is_known:  # other hosts know that it was lost with its agent
                tally = life.tally
                end = End(
                    at_ns=life.ended_ns, worker=life.worker, rank=tally.rank, round=tally.round, step=tally.step,
                    cause=life.cause,
                )  # fmt: skip
                yield RunEvent(part.since_began(end.at_ns), end, part.name_of(life.worker))


def _detected(book: HostLedger) -> dict[tuple[str, int], int]:
    return {(one.failure.worker, one.failure.at_ns): one.detect_ns for one in book.noticed}


def _saves(events: Iterable[RunEvent]) -> tuple[SaveRow, ...]:
    """What several workers did for one checkpoint is one row."""
    together: dict[tuple[int, int, str, int], list[tuple[int, Save]]] = {}
    before: Counter[tuple[int, int, str, str]] = Counter()
    for one in events:
        if isinstance(one.event, Save):
            save = one.event
            mine = (save.round, save.step, save.tier, save.worker)
            together.setdefault((save.round, save.step, save.tier, before[mine]), []).append((one.at_ns, save))
            before[mine] += 1  # of a state that counts no steps all saves are at -1
    rows = [
        SaveRow(
            at_ns=max(at_ns for at_ns, _ in saves),
            step=step,
            tier=tier,
            workers=len(saves),
            mean_ns=sum(save.stall_ns for _, save in saves) // len(saves),
            longest_ns=max(save.stall_ns for _, save in saves),
        )
        for (_round, step, tier, _number), saves in together.items()
    ]
    return tuple(sorted(rows, key=lambda row: row.at_ns))


def _counts(events: Iterable[RunEvent]) -> dict[str, int]:
    return dict(sorted(Counter(one.event.kind for one in events).items()))


def _lines(parts: Iterable[Part]) -> tuple[EventLine, ...]:
    lines = [
        line
        for part in parts
        for line in lines_of(
            part.host, ((part.journal.head.wall_ns_of(event.at_ns) / 1e9, event) for event in part.journal.events)
        )
    ]
    return tuple(sorted(lines, key=lambda line: (line.at_s, line.host)))


# --- marks on the time line -------------------------------------------------------------------------------------------


def _marks(events: Iterable[RunEvent], parts: Sequence[Part]) -> tuple[Mark, ...]:
    """What is marked on the time line; an outage without an end lasts to the end of its part."""
    marks = [_mark(one, kind) for one in events if (kind := _kind_of(one.event))]
    marks += [mark for part in parts for mark in _outages(part)]
    return tuple(sorted(marks, key=lambda mark: mark.at_ns))


def _kind_of(event: LedgerEvent) -> str:
    """Of its mark; empty: it has none."""
    match event:
        case Join(is_first=True) | Drain() | Straggler():
            return event.kind
        case End(is_loss=True) | ComputesWrong():
            return "loss"
        case End():
            return "end"
        case Skipped():
            return "skip"
        case Restore(source="checkpoint"):
            return "back"
    return ""


def _mark(one: RunEvent, kind: str) -> Mark:
    host, place, _life = name_parts(one.name)
    step = f" (step {one.event.step})" if isinstance(one.event, End) and one.event.step >= 0 else ""
    text = f"{one.name} {sentence(one.event)}{step}"
    return Mark(at_ns=one.at_ns, kind=kind, place=f"{host}/{place}" if one.name else "", text=text)


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
        yield _outage(part, began_ns, part.now_ns, ", and is not back as far as is known")


def _outage(part: Part, from_ns: int, to_ns: int, more: str) -> Mark:
    text = f"{part.host}: {sentence(StoreOutage(at_ns=from_ns))}{more}"
    return Mark(at_ns=part.since_began(from_ns), kind="outage", place="", text=text, took_ns=to_ns - from_ns)
