"""What is known about the loss of a member: facts and guesses, as different types.

A process that has ended, or a connection that was closed, is a fact: nothing can bring it back. That a host is
silent, or that a member makes no progress, is a guess: it may be cut off, paused or only slow, and it may come back.
Who reads a `Fact` may act on it at once; who reads a `Guess` must expect to be wrong.

Pure but for `LossWitness`, which only remembers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from torchelastic.rendezvous.records import Round


@dataclass(frozen=True)
class Loss:
    """Something is known about a member.

    Attributes:
        member: its id; empty where only the fact or the guess is known and not whom it is about.
    """

    #: for names of metrics and for the ledger
    kind: ClassVar[str] = ""
    certainty: ClassVar[str] = ""
    sentence: ClassVar[str] = ""

    member: str

    def __str__(self) -> str:
        return f"{self.member or 'a member'} {self.sentence} ({self.certainty})"


class Fact(Loss):
    """It has happened, and stays so."""

    certainty: ClassVar[str] = "fact"


class Guess(Loss):
    """It looks like it."""

    certainty: ClassVar[str] = "guess"


class ProcessEnded(Fact):
    """Its agent, or the next agent on its host, has seen the end of its process."""

    kind: ClassVar[str] = "process_ended"
    sentence: ClassVar[str] = "has ended"


class ConnectionClosed(Fact):
    """A connection of the group was closed by its other end: that peer died, or gave the group up."""

    kind: ClassVar[str] = "connection_closed"
    sentence: ClassVar[str] = "closed its connection"


class Left(Fact):
    """It was asked to leave the run, and left at an agreed step."""

    kind: ClassVar[str] = "left"
    sentence: ClassVar[str] = "left the run as it was asked to"


class LeaseExpired(Guess):
    """Its record is gone from the store, and nobody has reported that its process ended: its host fell silent.

    It is a guess because a word of its end that the next round has overtaken reads the same.
    """

    kind: ClassVar[str] = "lease_expired"
    sentence: ClassVar[str] = "is gone from the store, as if its host were silent"


class MissedProgress(Guess):
    """It lives, and was not ready in time."""

    kind: ClassVar[str] = "missed_progress"
    sentence: ClassVar[str] = "made no progress in time"


def losses(
    joined: Round, now: Round, departed: Collection[str] = (), leaving: Collection[str] = ()
) -> tuple[Loss, ...]:
    """What is known about the members of one round that are not in a later one, in the order of their ranks.

    Args:
        joined: the round that was trained in.
        now: the newest one. If it is still the same one, broken, only those are named whose end it tells.
        departed: members of whom an edition of `joined` has said that their processes ended.
        leaving: members of whom one has said that they were to leave.
    """
    same, following = now.number == joined.number, now.number == joined.number + 1
    ended = {*departed, *joined.departed, *(now.departed if same else ()), *(now.lost if following else ())}
    here = now.members.union(now.spared) if following else now.members
    gone = [name for name in joined.roster if name not in here or name in ended]
    # the order counts: an evicted member's process is ended because it hung, that it has ended is no reason
    known = ((now.evicted, MissedProgress), (ended, ProcessEnded), (leaving, Left))
    return tuple(next((kind for names, kind in known if name in names), LeaseExpired)(name) for name in gone)


def loss_from_error(error: BaseException) -> Loss | None:
    """What the failure of a collective says about an unnamed peer; None: nothing.

    The words are those of gloo (torch 2.6 to 2.13) and of the C library.
    """
    text = str(error).lower()
    if any(words in text for words in ("closed by peer", "reset by peer", "broken pipe", "connection refused")):
        return ConnectionClosed("")
    if is_time_out(error):
        return MissedProgress("")
    return None


def is_of_group(error: BaseException) -> bool:
    """Whether an error speaks of the group, its store or a peer, so that somebody else's failure may be its cause.

    The words are those of `loss_from_error`, of the backends' own names in their messages, and of our own messages.
    """
    if any(
        kind.__module__ == "torch.distributed" for kind in type(error).__mro__
    ):  # DistError and what derives from it
        return True
    text = str(error).lower()
    return loss_from_error(error) is not None or any(words in text for words in ("gloo", "nccl", "another worker"))


def is_time_out(error: BaseException) -> bool:
    """Whether a collective, or a wait for the store, has given up waiting."""
    return any(words in str(error).lower() for words in ("timed out", "time-out", "timeout"))


class LossWitness:
    """Remembers what the editions of one round have said, which the next round does not repeat. One writer.

    Attributes:
        leaving: members of that round that were to leave.
    """

    def __init__(self) -> None:
        self._number = 0
        self._departed: frozenset[str] = frozenset()
        self.leaving: frozenset[str] = frozenset()
        self._error: Loss | None = None

    def sees(self, round_: Round) -> None:
        """Take in one edition of a round."""
        if round_.number == self._number:
            self._departed |= frozenset(round_.departed)
            self.leaving |= frozenset(round_.leaving)

    def sees_error(self, error: BaseException) -> None:
        """Take in the first failure in a round; what follows it is its consequence."""
        if self._error is None:
            self._error = loss_from_error(error)

    def begins(self, joined: Round) -> None:
        """Forget what was before: this round is trained in now."""
        self._number, self._departed, self._error = joined.number, frozenset(joined.departed), None
        self.leaving = frozenset(joined.leaving)

    def explains(self, joined: Round, now: Round) -> tuple[Loss, ...]:
        """Why `now` follows `joined`: who is lost; and what the error said, if that tells more."""
        named = losses(joined, now, self._departed, self.leaving)
        is_sure = bool(named) and all(isinstance(loss, (Fact, MissedProgress)) for loss in named)
        return named if is_sure or self._error is None else (*named, self._error)
