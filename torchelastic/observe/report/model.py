"""A report as values, before it is a page or JSON. Times are whole nanoseconds since the run began, unless said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchelastic.observe.ledger.accounts import NOTHING, Amounts
from torchelastic.observe.ledger.figures import Figures, Seen
from torchelastic.observe.ledger.host_ledger import Earlier
from torchelastic.observe.report.losses import LossCurve
from torchelastic.observe.report.segments import Segment
from torchelastic.observe.status.run_status import EventLine

#: What happens from a failure to the next committed step, in order; "detect" is the ledger's, see docs/ledger.md, and
#: "restart" is that of a whole group: until its new processes are in a group.
PHASES = ("detect", "agree", "restart", "re_form", "sync", "step")


@dataclass(frozen=True, kw_only=True)
class HostPart:
    """What one journal covers.

    Attributes:
        host: its name.
        journal: name of the journal.
        began_ns, until_ns: the time that it covers.
        is_open: whether workers in it have no end: the run goes on, or its agent is gone.
    """

    host: str
    journal: str
    began_ns: int
    until_ns: int
    is_open: bool


@dataclass(frozen=True, kw_only=True)
class AttemptRow:
    """One process of one worker.

    Attributes:
        worker: unique in the run, as the ledger has it.
        name: the same for people: host, place and number of the life, as `node-7/0.1`.
        host: for people.
        place: what its lives have in common, unique in the run.
        began_ns, until_ns: its wall time, exactly.
        is_ended: whether its end is known.
        end: how it ended, for people.
        is_loss: whether the others lost it.
        step: the newest of its state; -1: not known.
        committed, undone: steps of its own.
        amounts: by account; they sum to the wall time.
        cells: where on the time line it spent them, in order, without gaps; as exact as that is known.
    """

    worker: str
    name: str
    host: str
    place: str
    began_ns: int
    until_ns: int
    is_ended: bool
    end: str = ""
    is_loss: bool = False
    step: int = -1
    committed: int = 0
    undone: int = 0
    amounts: Amounts = NOTHING
    cells: tuple[Segment, ...] = ()

    @property
    def wall_ns(self) -> int:
        """How long it has lasted."""
        return self.until_ns - self.began_ns


@dataclass(frozen=True, kw_only=True)
class LostWorker:
    """A worker that a failure is about.

    Attributes:
        name: for people.
        at_ns: when it ended.
        how: for people.
    """

    name: str
    at_ns: int
    how: str


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One failure of the group, or one loss of a worker.

    Attributes:
        number: from 1, by time.
        at_ns: when it began, as far as that is known: the first death, else when it was first noticed.
        round: the one that broke; -1: not known.
        step: the newest that was committed; -1: not known.
        lost: who was lost.
        causes: what is said of the cause, each once: facts and guesses of the re-form, then what workers noticed.
        noticed_by: how many workers had to undo a step.
        replayed_ns: their time in it that did not last, added up, without time to detect.
        detect_ns: their time to detect, added up.
        steps_back: committed steps that were lost, since the group went back to a checkpoint.
        restored_from: "peer", "checkpoint" or empty: not known.
        re_formed_by: how many workers trained again.
        outlived_by: how many workers had trained before, lived on, and did not have to form a group anew.
        phases_ns: of the worker that took longest, in order of `PHASES`.
        world_size: of the next group; 0: not known.
    """

    number: int
    at_ns: int
    round: int
    step: int = -1
    lost: tuple[LostWorker, ...] = ()
    causes: tuple[str, ...] = ()
    noticed_by: int = 0
    replayed_ns: int = 0
    detect_ns: int = 0
    steps_back: int = 0
    restored_from: str = ""
    re_formed_by: int = 0
    outlived_by: int = 0
    phases_ns: Mapping[str, int] = field(default_factory=dict)
    world_size: int = 0

    @property
    def down_ns(self) -> int:
        """From the failure to the next committed step, of the worker that took longest; 0: not known."""
        return sum(self.phases_ns.values())

    @property
    def who(self) -> str:
        """Who was lost, for people."""
        return ", ".join(f"{one.name}: {one.how}" for one in self.lost)

    @property
    def why(self) -> str:
        """Who was lost, or else what was noticed first, for people."""
        return self.who or next(iter(self.causes), "nothing is known of the cause")


@dataclass(frozen=True, kw_only=True)
class SaveRow:
    """One checkpoint.

    Attributes:
        at_ns: when its last worker went on.
        step: after which it was taken.
        tier: where to; empty: the manager's choice.
        workers: how many took part.
        mean_ns, longest_ns: how long training stood still for it.
    """

    at_ns: int
    step: int
    tier: str
    workers: int
    mean_ns: int
    longest_ns: int


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Something on the timeline of a place; of the whole run where the place is empty.

    Attributes:
        at_ns: when.
        kind: "join", "loss", "end", "drain", "skip", "straggler", "outage" or "back" (to a checkpoint).
        place: see `AttemptRow`.
        text: for people.
        took_ns: how long, of an outage that is over.
    """

    at_ns: int
    kind: str
    place: str
    text: str
    took_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class Report:
    """A run.

    Attributes:
        run_id: its name.
        began_ns: nanoseconds since 1970, by the clock of the day of the host that began.
        until_ns: how long the journals cover.
        is_over: whether every worker's end is known.
        hosts: by journal.
        seen: sums.
        figures: goodput and related figures.
        lives: a row per process, by place and time.
        earlier: sums of older lives, by host.
        incidents: by time.
        saves: by time.
        marks: by time.
        events: the newest lines for people, oldest first.
        event_counts: how many events of which kind there are in the journals.
        losses: the loss curve; None: none was given.
        lacks: what is missing, as sentences.
    """

    run_id: str
    began_ns: int
    until_ns: int
    is_over: bool
    hosts: tuple[HostPart, ...]
    seen: Seen
    figures: Figures
    lives: tuple[AttemptRow, ...]
    earlier: Mapping[str, Earlier] = field(default_factory=dict)
    incidents: tuple[Incident, ...] = ()
    saves: tuple[SaveRow, ...] = ()
    marks: tuple[Mark, ...] = ()
    events: tuple[EventLine, ...] = ()
    event_counts: Mapping[str, int] = field(default_factory=dict)
    losses: LossCurve | None = None
    lacks: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """The newest step that any worker has seen; -1: not known."""
        return max((life.step for life in self.lives), default=-1)

    @property
    def downs_ns(self) -> list[int]:
        """`down_ns` of the incidents of which it is known."""
        return [one.down_ns for one in self.incidents if one.down_ns]

    def why_wrong(self) -> str:
        """Whose accounts do not sum to its wall time; empty: nobody's. It never should be."""
        for life in self.lives:
            if sum(life.amounts) != life.wall_ns or min(life.amounts) < 0:
                return life.name
        return next(
            (f"{host}, earlier" for host, sums in self.earlier.items() if sum(sums.amounts) != sums.wall_ns), ""
        )
