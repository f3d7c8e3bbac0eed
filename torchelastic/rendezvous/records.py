"""What is stored under a run's prefix: members, the round, and how both are written as JSON.

Nothing read from the store is trusted: a value that does not fit is a `RecordError` that names the key, never a crash.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from torchelastic.foreign_json import Amount, Count, Text, UnixSeconds, checked, decode_object
from torchelastic.foreign_json import RecordError as RecordError  # what every reader of records catches

#: etcd refuses requests above 1.5 MiB by default (--max-request-bytes); what is longer was not written by us.
MAX_VALUE_BYTES = 1_500_000
#: No name and no text in a record is longer (a host name has at most 253 characters).
MAX_TEXT = 1024
#: No member's id is longer, for a round has to hold three of them in one text (our own have at most 80 characters).
MAX_ID = 200
#: No counter of a member is larger; those of a round, which are one more than a member's, may be.
MAX_MEMBER_COUNT = 2**52
#: Nobody is waited for longer: no lock and no timer of Python takes more seconds (292 years).
MAX_SECONDS = 9e9

#: What the fields of a record hold.
Name = Annotated[str, Meta(max_length=MAX_TEXT)]
MemberCount = Annotated[int, Meta(ge=0, le=MAX_MEMBER_COUNT)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]


class RoundState(str, enum.Enum):
    """The phase of a round.

    RUNNING: the roster trains. GATHERING: it still trains, but is asked to stop at an agreed step because somebody
    wants in, or out. BROKEN: it cannot go on; whoever lives asks for the next round. CLOSING: somebody has finished;
    nobody starts a step any more. CLOSED: the run is over, late-comers are turned away.
    """

    RUNNING = "running"
    GATHERING = "gathering"
    BROKEN = "broken"
    CLOSING = "closing"
    CLOSED = "closed"


class StateStatus(enum.IntEnum):
    """How complete a member's state is; the larger, the better a source it is.

    PARTIAL: half-way through an optimizer step, nothing to give. INITIAL: what every new process starts with.
    UNCOMMITTED: the optimizer step was completed but the step failed afterwards; the weights are those after it, and
    they are used only where nobody has anything better. COMPLETE: exactly the state after `step` committed steps.
    """

    PARTIAL = 0
    INITIAL = 1
    UNCOMMITTED = 2
    COMPLETE = 3


class StateProgress(NamedTuple):
    """How good a state is as a source, among members that have not all trained together: the larger one is chosen.

    As `Member.progress`, but for a whole state of long ago, which a member that has waited as a spare may have: it
    counts less than the one after a newer step that was not committed.

    Attributes:
        kind: partial before initial before one that has progress.
        step: committed steps.
        state_status: decides at equal steps.
    """

    kind: StateStatus
    step: int
    state_status: StateStatus

    @classmethod
    def of(cls, state_status: StateStatus, step: int) -> StateProgress:
        """That of a state.

        >>> old, new = StateProgress.of(StateStatus.COMPLETE, 10), StateProgress.of(StateStatus.COMPLETE, 500)
        >>> old < StateProgress.of(StateStatus.UNCOMMITTED, 500) < new
        True
        """
        return cls(min(state_status, StateStatus.UNCOMMITTED), step, state_status)


@dataclass(frozen=True)
class Member:
    """One worker, as its own agent declares it.

    Attributes:
        member_id: unique for each process that ever takes part.
        host: ranks of one host stay adjacent.
        store_address: HOST:PORT where this member's TCPStore listens, used if it becomes rank 0.
        ready_for: number of the round that it wants, 0 while it wants none; above the present number it waits.
        step: committed steps.
        state_status: how complete its state is.
        failed: it asks because a step or a formation failed, not because it was asked to stop.
        done: the number of the round in which it finished (or closed) the run, 0 while it has not.
        patience_s: how long the others shall wait for a member that lives but does not get ready.
        departed: its process has ended: a fact, while a key that is merely gone may be that of a host cut off.
        gave_up: it has ended, and its host does not start it again: it has failed too often, or for good.
        leaving: it was asked to leave the run: it is put on no further roster unless nobody else has its state.
        needed: it wants no smaller roster: its step fails in a smaller one, and did not in one of this size.
        arrival: the key's create revision; the order of arrival. Not written, but read off the key.
    """

    member_id: str
    host: Name
    store_address: Name = ""
    ready_for: MemberCount = 0
    step: MemberCount = 0
    state_status: StateStatus = StateStatus.INITIAL
    failed: bool = False
    done: MemberCount = 0
    patience_s: Seconds = 15.0
    departed: bool = False
    gave_up: bool = False
    leaving: bool = False
    needed: MemberCount = 0
    arrival: int = 0

    @property
    def progress(self) -> tuple[StateStatus, int]:
        """The order in which members are chosen as the source of the state, of those that trained together."""
        return (self.state_status, self.step)


@dataclass(frozen=True)
class AgentRecord:
    """One host's agent, as it declares itself.

    Attributes:
        pid: of its process.
        started_with: by name, what is to be the same on every host of the run.
    """

    pid: Count = 0
    started_with: Mapping[Text, Text] = field(default_factory=dict)

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(msgspec.to_builtins(self), separators=(",", ":")).encode()

    @staticmethod
    def decode(key: str, value: bytes) -> AgentRecord:
        """The inverse of `encode`. Raises RecordError."""
        return checked(key, decode_object(key, value, most_bytes=MAX_VALUE_BYTES), AgentRecord)


@dataclass(frozen=True)
class KeptOut:
    """That a host does not take part in the run: its own agent writes it, and deletes it when the host may again.

    Attributes:
        at_s: since when, in Unix seconds.
        because: why, for people.
    """

    at_s: UnixSeconds = 0.0
    because: Name = ""

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(msgspec.to_builtins(self), separators=(",", ":")).encode()

    @staticmethod
    def decode(key: str, value: bytes) -> KeptOut:
        """The inverse of `encode`. Raises RecordError."""
        return checked(key, decode_object(key, value, most_bytes=MAX_VALUE_BYTES), KeptOut)


class JoinRequest(msgspec.Struct, frozen=True):
    """What a worker that wants the next round brings to it; see `Member`."""

    store_address: Name
    step: MemberCount
    state_status: StateStatus
    failed: bool
    patience_s: Amount
    needed: MemberCount = 0


def rank_members(members: Sequence[Member]) -> list[Member]:
    """Order members by rank: the first of those with the best state leads, the rest keep the given order, by host."""
    best = max(member.progress for member in members)
    first = next(member for member in members if member.progress == best)
    by_host: dict[str, list[Member]] = {first.host: [first]}
    for member in members:
        if member is not first:
            by_host.setdefault(member.host, []).append(member)
    return [member for group in by_host.values() for member in group]


@dataclass(frozen=True)
class Round:
    """The one document of a run, written by the leader alone.

    Attributes:
        number: rises by one with every roster; the fencing token of everything that a roster publishes.
        state: see `RoundState`.
        roster: member ids; the position is the rank.
        store_address: HOST:PORT of rank 0's TCPStore.
        step: committed steps of the source (rank 0) when the round began; while closing, of those who are done.
        state_status: of the source's state; at INITIAL or PARTIAL nobody has progress, as far as is known: the state of
            a source which has only waited while others trained may be old, and a checkpoint newer.
        stale: ranks whose state is less complete or older than the source's.
        waiting: how many newcomers the members shall stop for.
        evicted: members that were alive and did not get ready in time; their agents end them.
        because: why the round is in this state, for people.
        departed: those of the roster whose processes are known to have ended.
        edition: how often this document was written; of two with one number the one with the higher edition is newer.
        restored: put back by an agent after the store had lost it; nobody is lost yet who has not registered again.
        leaving: of the roster; while gathering, who leaves at the agreed step; while broken, who is free to go because
            no group can be formed without newcomers, the member with the best state first.
        lost: of the round before, members whose processes are known to have ended; not all of very many.
        orphaned: while broken: nobody of the roster is there, and none is known to have ended, so that they may still
            train without etcd: a new round begins only after the orphan timeout.
        hopeless: while broken: those that are left and those that may come back are too few, because others have failed
            for good: the run ends on the hosts of its members, unless hosts have come by then that are enough.
        spared: of the round before, members that live and wait as spares, as not all fit; not all of very many.
    """

    number: Count = 0
    state: RoundState = RoundState.BROKEN
    roster: tuple[Name, ...] = ()
    store_address: Name = ""
    step: Count = 0
    state_status: StateStatus = StateStatus.INITIAL
    stale: tuple[Count, ...] = ()
    waiting: Count = 0
    evicted: tuple[Name, ...] = ()
    because: Name = ""
    departed: tuple[Name, ...] = ()
    edition: Count = 0
    restored: bool = False
    leaving: tuple[Name, ...] = ()
    lost: tuple[Name, ...] = ()
    orphaned: bool = False
    hopeless: bool = False
    spared: tuple[Name, ...] = ()

    @cached_property
    def members(self) -> frozenset[str]:
        """The roster as a set: with 10,000 names nobody looks through all of them for its own."""
        return frozenset(self.roster)

    @property
    def released(self) -> frozenset[str]:
        """Who is asked to leave by this edition, and may have left."""
        return frozenset(self.leaving) if self.state is RoundState.BROKEN else frozenset()

    @property
    def age(self) -> tuple[int, int]:
        """Of two documents of one run the one with the larger age was written later."""
        return (self.number, self.edition)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended or is ending: no step starts any more."""
        return self.state in (RoundState.CLOSING, RoundState.CLOSED)


#: What is true before the leader has ever published: nobody is on the roster, so there is nobody to wait for.
NO_ROUND = Round(because="no group yet: it forms when enough workers have come and the last call is over")


class Keys:
    """Where a run's documents stand; `root` ends without a slash."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.round, self.leader, self.incarnation = f"{root}/round", f"{root}/leader", f"{root}/incarnation"
        self.members, self.agents, self.processes = f"{root}/members/", f"{root}/agents/", f"{root}/processes/"
        self.wrong = f"{root}/wrong/"
        self.drain, self.status, self.look = f"{root}/drain/", f"{root}/status/", f"{root}/look"
        self.kept_out = f"{root}/kept_out/"

    def member(self, member_id: str) -> str:
        """The key of one member."""
        return self.members + member_id

    def kept_out_of(self, host: str) -> str:
        """The key that says why a host does not take part."""
        return self.kept_out + host

    def drain_of_host(self, host: str) -> str:
        """The prefix under which a host's agent looks for requests to let one of its members leave."""
        return f"{self.drain}{host}/"

    def wrong_of_host(self, host: str) -> str:
        """The prefix of those places of a host that were found to compute wrong."""
        return f"{self.wrong}{host}/"

    def drain_of(self, member: Member) -> str:
        """The request that a member leaves: written by whoever wants it, deleted by the member's own agent."""
        return self.drain_of_host(member.host) + member.member_id


#: What a document may lack: these are left out where they are false or empty.
_SELDOM = ("gave_up", "leaving", "needed", "lost", "orphaned", "hopeless", "spared")
#: Of a member, these are not written but read off the key.
_OF_THE_KEY = ("member_id", "arrival")
_NEEDED = {
    kind: [one.name for one in fields(kind) if one.name not in (*_SELDOM, *_OF_THE_KEY)] for kind in (Member, Round)
}


def encode_member(member: Member) -> bytes:
    """Member as JSON, without what the store itself knows: its id, which is in the key, and `arrival`."""
    document = {name: value for name, value in _plain(member).items() if name not in _OF_THE_KEY}
    return json.dumps(document, separators=(",", ":")).encode()


def decode_member(key: str, value: bytes, arrival: int) -> Member:
    """The inverse of `encode_member`; the id is the last part of the key. Raises RecordError."""
    member_id = key.rsplit("/", 1)[-1]
    if len(member_id) > MAX_ID or not member_id.isprintable():
        raise RecordError(f"{key}: it ends with no id of a member, a printable text of at most {MAX_ID} characters")
    document = {**decode_object(key, value, most_bytes=MAX_VALUE_BYTES), "member_id": member_id, "arrival": arrival}
    return checked(key, document, Member, needed=_NEEDED[Member])


def round_to_dict(round_: Round) -> dict[str, Any]:
    """Round as JSON types; also what an agent sends to its workers."""
    return _plain(round_)


def encode_round(round_: Round) -> bytes:
    """Round as JSON."""
    return json.dumps(round_to_dict(round_), separators=(",", ":")).encode()


def round_from_dict(source: str, document: object) -> Round:
    """The inverse of `round_to_dict`; `source` is named in a RecordError."""
    round_ = checked(source, document, Round, needed=_NEEDED[Round])
    if round_.stale and max(round_.stale) >= len(round_.roster):
        raise RecordError(f"{source}: field 'stale' names a rank that the roster does not have")
    if len(set(round_.roster)) < len(round_.roster):
        raise RecordError(f"{source}: a member is on the roster twice")
    if not round_.members.issuperset(round_.leaving):
        raise RecordError(f"{source}: field 'leaving' names somebody who is not on the roster")
    return round_


@lru_cache(maxsize=8)
def decode_round(key: str, value: bytes) -> Round:
    """The inverse of `encode_round`. Raises RecordError.

    The last few are remembered: one document comes from the watch and from the store, and to all hosts of a simulation.
    """
    return round_from_dict(key, decode_object(key, value, most_bytes=MAX_VALUE_BYTES))


def _plain(record: Member | Round) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(record)
    return {name: value for name, value in plain.items() if value or name not in _SELDOM}
