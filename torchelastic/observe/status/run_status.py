"""What a run looks like from outside, as values: the one source of `status`, `top`, the page and what they show.

Every agent writes a `HostStatus` into etcd; `combined` makes a `RunStatus` of all of them, the round and the members.
Pure: no clock, no store. Times are Unix seconds unless a name says otherwise; amounts are whole nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from torchelastic.foreign_json import MAX_TEXT, Amount, Count, CountIfAny, Finite, Text, UnixSeconds
from torchelastic.observe.ledger.accounts import NOTHING, Amounts
from torchelastic.observe.ledger.figures import Figures, Seen, figures_of, merged
from torchelastic.observe.status.run_progress import Progress
from torchelastic.rendezvous.records import KeptOut, Member, Round, RoundState
from torchelastic.text import age_text, shortlist

#: So many of the newest events a host shows.
MOST_EVENTS = 20
#: So many published values (such as the loss) of a worker are shown.
MOST_VALUES = 8
#: No host has more workers than that.
MOST_WORKERS = 4096
#: How events and notes are shown: of what went wrong, and of what may; anything else is as usual.
BAD, WARNING = "bad", "warning"
#: So many hosts are named in a note.
_MOST_NAMES = 12


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """One running worker.

    Attributes:
        worker: which process of which place, as the ledger has it (`host/0.1`).
        host: where; not written, for it is that of the status.
        pid: of its process.
        rank: in its round; -1: it has none.
        round: its round; -1: none.
        step: the number of steps that its state has seen; -1: not known.
        end_step: that number at the end of the run, where the sampler knows it; -1: not known.
        steps_per_s: of the last seconds, see `run_progress.Pace`; 0: no step, or not known yet.
        account: what it does now, by label.
        amounts: where its time went, by `Account`.
        restarts: processes in this place before it.
        began_s: when its process began.
        values: the newest of what it has published, such as the loss, by name.
    """

    worker: Text
    host: Text = ""
    pid: Count = 0
    rank: CountIfAny = -1
    round: CountIfAny = -1
    step: CountIfAny = -1
    end_step: CountIfAny = -1
    steps_per_s: Amount = 0.0
    account: Text = "start_up"
    amounts: Amounts = NOTHING
    restarts: Count = 0
    began_s: Amount = 0.0
    values: Annotated[Mapping[Text, Finite], Meta(max_length=MOST_VALUES)] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EventLine:
    """Something that happened, for people; see `torchelastic.observe.ledger.ledger_events`.

    Attributes:
        at_s: when.
        host: on which host it was written down; not written, for it is that of the status.
        kind: of the event.
        worker: who; empty: the host.
        rank: as in the ledger.
        round: as in the ledger.
        step: as in the ledger.
        text: one line for people, with cause and durations.
        grade: `BAD`, `WARNING` or empty; also empty where an earlier version has written it.
        world_size: of the group that is formed; 0: it is about something else.
    """

    at_s: UnixSeconds
    host: Text = ""
    kind: Text
    text: Text
    worker: Text = ""
    rank: CountIfAny = -1
    round: CountIfAny = -1
    step: CountIfAny = -1
    grade: Text = ""
    world_size: Count = 0


@dataclass(frozen=True)
class Note:
    """What a person who looks at a run should see at once.

    Attributes:
        text: one line, with the names that hosts give themselves.
        grade: as in `EventLine`.
    """

    text: str
    grade: str = ""


@dataclass(frozen=True, kw_only=True)
class HostStatus:
    """What one agent knows of its host.

    Attributes:
        host: its name.
        incarnation: of the agent.
        at_s: when this was written.
        began_s: when the agent's first worker began.
        every_s: the next one follows so long after this one.
        round, round_state: the round that its agent knows, by number and state; -1 and empty: none.
        round_since_s: when the agent learned of that state; 0: not known.
        version: of torchelastic.
        workers: those that run.
        seen: sums over all worker processes of this host, see `ledger.figures.Seen`; its `wall_ns` is this host's.
        events: the newest, oldest first.
        journal: path of the journal on that host; empty: none is written.
        address: URL of the page and the metrics of the agent; empty: none is served.
        is_etcd_away: whether etcd was unreachable from the host.
    """

    host: Text
    incarnation: Text
    at_s: Amount
    began_s: Amount = 0.0
    every_s: Amount = 1.0
    round: CountIfAny = -1
    round_state: Text = ""
    round_since_s: Amount = 0.0
    version: Text = ""
    workers: Annotated[tuple[WorkerStatus, ...], Meta(max_length=MOST_WORKERS)] = ()
    seen: Seen = field(default_factory=lambda: Seen(0, 0))
    events: Annotated[tuple[EventLine, ...], Meta(max_length=MOST_EVENTS)] = ()
    journal: Text = ""
    address: Text = ""
    is_etcd_away: bool = False


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A whole run.

    Attributes:
        run_id: its name.
        at_s: when this was put together.
        round: the round as etcd has it.
        members: of etcd, those that are alive.
        hosts: by name; those that have not written for too long are in `silent` instead.
        silent: hosts that have not written for too long.
        left: agents that are gone, as far as that is still known: `at_s` is when they last wrote, 0 where only the
            round's document still names their members. They are in no sum.
        kept_out: hosts that may not take part, by name, and why.
        events: of all hosts, oldest first.
        seen: of all hosts.
        figures: goodput and related figures.
    """

    run_id: str
    at_s: float
    round: Round
    members: tuple[Member, ...]
    hosts: tuple[HostStatus, ...]
    silent: tuple[HostStatus, ...]
    events: tuple[EventLine, ...]
    seen: Seen
    figures: Figures
    left: tuple[HostStatus, ...] = ()
    kept_out: Mapping[str, KeptOut] = field(default_factory=dict)

    @property
    def workers(self) -> tuple[WorkerStatus, ...]:
        """All workers, by rank; those without one last."""
        return by_rank(worker for host in self.hosts for worker in host.workers)

    @property
    def world_size(self) -> int:
        """Of the present round; 0: no group."""
        return len(self.round.roster) if self.round.state in (RoundState.RUNNING, RoundState.GATHERING) else 0

    @property
    def round_since_s(self) -> float:
        """Since when the round has been in its state, by the first agent that learned of it; 0: not known."""
        here = (self.round.number, self.round.state.value)
        known = [host.round_since_s for host in self.hosts if (host.round, host.round_state) == here]
        return min((since_s for since_s in known if since_s), default=0.0)

    @property
    def progress(self) -> Progress:
        """How far the group is."""
        return progress_of(self.workers)

    @property
    def step(self) -> int:
        """The newest step that a worker reports; -1: none does."""
        return self.progress.step

    @property
    def steps_per_s(self) -> float:
        """Of the group."""
        return self.progress.steps_per_s


def progress_of(workers: Iterable[WorkerStatus]) -> Progress:
    """How far a group is: as its fastest member, since all commit together and statuses come at different times.

    Args:
        workers: of the group, by rank: the loss is that of the first that has published one.
    """
    group = tuple(workers)
    return Progress(
        step=max((worker.step for worker in group), default=-1),
        end_step=max((worker.end_step for worker in group), default=-1),
        steps_per_s=max((worker.steps_per_s for worker in group), default=0.0),
        loss=next((worker.values["loss"] for worker in group if "loss" in worker.values), None),
    )


def by_rank(workers: Iterable[WorkerStatus]) -> tuple[WorkerStatus, ...]:
    """By rank; those without one last."""
    return tuple(sorted(workers, key=lambda worker: (worker.rank < 0, worker.rank, worker.worker)))


def is_stale(status: HostStatus, now_s: float) -> bool:
    """Whether a host has not written for too long: three of its periods, and at least 5 s."""
    return now_s - status.at_s > max(5.0, 3.0 * status.every_s)


def every_s(hosts: int) -> float:
    """Seconds between two statuses of a host: one, and for many hosts so long that etcd gets 64 of them in a second.

    >>> every_s(4), every_s(640)
    (1.0, 10.0)
    """
    return max(1.0, hosts / 64)


def combined(
    run_id: str,
    at_s: float,
    round_: Round,
    members: Sequence[Member],
    hosts: Sequence[HostStatus],
    left: Sequence[HostStatus] = (),
    kept_out: Mapping[str, KeptOut] | None = None,
) -> RunStatus:
    """One status of all.

    Args:
        run_id: of the run.
        at_s: now.
        round_: as etcd has it.
        members: as etcd has them.
        hosts: as etcd has them; several of one host are kept, they are of different agents.
        left: agents that were there.
        kept_out: as in `RunStatus`.
    """
    fresh = tuple(sorted((h for h in hosts if not is_stale(h, at_s)), key=lambda h: (h.host, h.incarnation)))
    silent = tuple(sorted((h for h in hosts if is_stale(h, at_s)), key=lambda h: (h.host, h.incarnation)))
    refused = [_kept_out(host, record) for host, record in (kept_out or {}).items()]
    lines = [*refused, *(line for host in hosts for line in host.events)]
    events = sorted(lines, key=lambda line: (line.at_s, line.host))
    wanted = [host.seen.configured_workers for host in hosts]
    began_s = min((host.began_s for host in hosts if host.began_s), default=at_s)
    wall_ns = max(0, int((at_s - began_s) * 1e9))
    seen = merged([host.seen for host in hosts], wall_ns, sum(wanted) if all(wanted) else 0)
    alive = tuple(member for member in members if not member.departed)
    return RunStatus(
        run_id=run_id,
        at_s=at_s,
        round=round_,
        members=alive,
        hosts=fresh,
        silent=silent,
        events=tuple(events),
        seen=seen,
        figures=figures_of(seen),
        left=tuple(sorted(left, key=lambda h: (h.host, h.incarnation))),
        kept_out=dict(sorted((kept_out or {}).items())),
    )


def _kept_out(host: str, record: KeptOut) -> EventLine:
    text = f"kept out of the run: {record.because}"
    return EventLine(at_s=record.at_s, host=host, kind="kept_out", text=text[:MAX_TEXT], grade=WARNING)


def notes_of(status: RunStatus, *, is_etcd_away: bool = False) -> tuple[Note, ...]:
    """What every screen says of a run besides how far it is.

    Args:
        status: of the run.
        is_etcd_away: whether the screen says itself that etcd does not answer.
    """
    notes = []
    if status.silent:
        names = [_since(host, status.at_s, "for {}") or f"{host.host} (has reported nothing)" for host in status.silent]
        notes.append(Note(f"silent: {shortlist(names, _MOST_NAMES)}", BAD))
    notes += [Note(f"kept out of the run: {host}: {one.because}", WARNING) for host, one in status.kept_out.items()]
    away = [host.host for host in status.hosts if host.is_etcd_away]
    if away and not is_etcd_away:
        notes.append(Note(f"etcd is unreachable from: {shortlist(away, _MOST_NAMES)}", WARNING))
    if status.left and status.round.state is not RoundState.CLOSED:
        newest = sorted(status.left, key=lambda host: -host.at_s)
        left = shortlist([_since(host, status.at_s, "{} ago") or host.host for host in newest], _MOST_NAMES)
        notes.append(Note(f"left: {left}; journals have what they did"))
        if not (status.hosts or status.silent or status.members):
            notes.append(Note("nobody is there: the run goes on when its launchers are started again", WARNING))
    return tuple(notes)


def _since(host: HostStatus, now_s: float, how: str) -> str:
    """A host, with how long ago it has written; empty: it never has."""
    return f"{host.host} {how.format(age_text(now_s - host.at_s))}" if host.at_s else ""
