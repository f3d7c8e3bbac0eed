"""Simulated workers and their groups: a step is committed by all members of a group, or a failure is everybody's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from tests.simulation.engine import Engine
from torchelastic.rendezvous.records import NO_ROUND, JoinRequest, Member, Round, RoundState, StateStatus
from torchelastic.rendezvous.view import is_done
from torchelastic.rendezvous.worker_rules import (
    Contact,
    asks,
    asks_again,
    finishes,
    is_granted,
    is_over_for,
    is_replaced,
    may_go,
)


@dataclass(frozen=True)
class Pace:
    """How training goes.

    Attributes:
        step_s: of one step.
        form_s: of making a group and bringing all members level.
        notice_s: until a member notices that a connection to a peer was closed.
        collective_timeout_s: until it gives a peer up that does not answer; the patience is 5 s more.
        total_steps: after so many the run is done.
    """

    step_s: float = 0.2
    form_s: float = 0.02
    notice_s: float = 0.03
    collective_timeout_s: float = 10.0
    total_steps: int = 10**9


class Witness(Protocol):
    """Who is told of everything that the invariants are about."""

    def joined(self, worker: Worker, round_: Round) -> None:
        """A worker has entered a group."""

    def formed(self, group: Group) -> None:
        """All members are in the group and level."""

    def committed(self, worker: Worker, group: Group, step: int) -> None:
        """A worker has committed its step number `step` (from 1)."""

    def ended(self, worker: Worker) -> None:
        """A worker's process has ended."""


class Worker:
    """One worker process.

    Args:
        engine: time.
        pace: of the training.
        witness: told of what it does.
        groups: gives the group of a round.
        member: its first record.
        declare: tells its agent its record.
        clock: of its host.
        on_gone: called when it has left the run and its process is about to end.
    """

    def __init__(
        self,
        engine: Engine,
        pace: Pace,
        witness: Witness,
        groups: Callable[[Round], Group],
        member: Member,
        declare: Callable[[Member], None],
        clock: Callable[[], float],
        on_gone: Callable[[Worker], None] = lambda _worker: None,
    ) -> None:
        self.member, self.step, self.state_status = member, 0, StateStatus.INITIAL
        self.is_alive, self.is_over, self.is_asking = True, False, False
        #: it hangs by itself, or its whole host is stopped
        self.is_hung = self.is_stopped = False
        self.known = NO_ROUND
        self.contact = Contact()
        self.group: Group | None = None
        self._joined = NO_ROUND
        self._engine, self._pace, self._witness, self._groups = engine, pace, witness, groups
        self._declare, self._clock, self._on_gone = declare, clock, on_gone

    @property
    def name(self) -> str:
        """The member's id."""
        return self.member.member_id

    @property
    def runs(self) -> bool:
        """Whether it can do anything now."""
        return self.is_alive and not self.is_hung and not self.is_stopped

    def ask(self, *, failed: bool) -> None:
        """Leave the present group and ask for the next."""
        if not self.runs or self.is_over:
            return
        if self.group is not None:
            group, self.group = self.group, None
            group.left(self)
        if is_over_for(self.known, self.name, self.step):
            self.finish()
            return
        self.is_asking = True
        patience_s = self._pace.collective_timeout_s + 5.0
        request = JoinRequest(f"{self.member.host}:1", self.step, self.state_status, failed, patience_s)
        self.member = asks(self.member, self.known, request)
        self._engine.note(self.name, "asks for round", self.member.ready_for, "at step", self.step)
        if not self._goes():
            self._declare(self.member)

    def leave(self) -> None:
        """Its agent hears that it is to leave the run."""
        if self.is_over or not self.is_alive or self.member.leaving:
            return
        self._engine.note(self.name, "is to leave")
        self.member = replace(self.member, leaving=True)
        if self.is_asking or self.group is not None:
            self._declare(self.member)
        self._goes()

    def _goes(self) -> bool:
        """Go if it may: it has left the run, and its process ends."""
        waits = self.is_asking and not is_done(self.member, self.known)
        if not (self.member.leaving and waits and may_go(self.member, self.known)):
            return False
        self._engine.note(self.name, "has left")
        self._on_gone(self)
        return True

    def hear(self, round_: Round) -> None:
        """The agent tells of a change of the round."""
        self.known = round_
        if self.is_over or self.is_stopped or not self.is_alive:
            return
        if self.is_hung:
            self._goes()  # that is decided by its agent, which does not hang
            return
        if round_.state is RoundState.CLOSED:
            self.is_over, self.group = True, None
        elif is_over_for(round_, self.name, self.step):
            if self.member.done < max(1, round_.number):
                self.finish()
        elif self.is_asking:
            if is_granted(round_, self.name, self._joined.number if self.name in self._joined.members else 0):
                self.is_asking = False
                self._joined = round_
                self._witness.joined(self, round_)
                self.group = self._groups(round_)
                self.group.enter(self)
                return
            if self._goes():
                return
            again = asks_again(self.member, round_)
            if again is not None:
                self.member = again
                self._declare(again)
        elif self.group is not None and is_replaced(self._joined, round_):
            self.ask(failed=True)

    def go_on(self) -> None:
        """Act after having been hung or stopped, as far as it runs now."""
        self.hear(self.known)
        if self.group is None and not self.is_asking:
            self.ask(failed=True)  # whatever it was about to do when it was stopped led here

    def finish(self) -> None:
        """All steps are done: say so."""
        self.group = None
        self.member = finishes(self.member, self.known, self.step)
        self._declare(self.member)
        self.is_asking = True  # it waits for the end, or for one more round

    def may_commit(self) -> bool:
        """Whether a step may count; see `Contact`."""
        return self._clock() < self.contact.commit_until_s

    def should_pause(self) -> bool:
        """Whether to leave the group at the end of a step; see `Contact`."""
        return self._clock() > self.contact.leave_at_s

    def die(self) -> None:
        """The process ends."""
        self.is_alive = False
        self._witness.ended(self)
        if self.group is not None:
            group, self.group = self.group, None
            group.left(self)


class Group:
    """The process group of one round: forms when all of its members are there, and ends with the first that leaves."""

    def __init__(
        self, engine: Engine, pace: Pace, witness: Witness, round_: Round, connected: Callable[[str, str], bool]
    ) -> None:
        self.round = round_
        self.members: dict[str, Worker] = {}
        self.step = round_.step
        self.is_formed = self.is_broken = False
        #: which history of the store it belongs to; set by the witness
        self.lineage = 0
        #: a failure that strikes half of the members after the others have committed
        self.tears_next_step = False
        self.fails_next_step = False
        self._engine, self._pace, self._witness, self._connected = engine, pace, witness, connected
        self._stalled_s = 0.0

    def enter(self, worker: Worker) -> None:
        """A member has come; the group forms when all have."""
        if self.is_broken:
            self._engine.after(self._pace.notice_s, self._fail_one, worker)
            return
        self.members[worker.name] = worker
        self._engine.after(self._pace.collective_timeout_s, self._give_up_forming, worker)
        if len(self.members) == len(self.round.roster):
            self._engine.after(self._pace.form_s, self._form)

    def left(self, worker: Worker) -> None:
        """A member has gone: the others notice by their broken connections."""
        self.members.pop(worker.name, None)
        self._break()

    def _break(self) -> None:
        if not self.is_broken:
            self.is_broken = True
            for other in tuple(self.members.values()):
                self._engine.after(self._pace.notice_s, self._fail_one, other)

    def _fail_one(self, worker: Worker) -> None:
        if worker.is_alive and not worker.runs:
            self._engine.after(self._pace.notice_s * 10, self._fail_one, worker)  # it notices when it runs again
        elif worker.group is self:
            worker.ask(failed=True)

    def _give_up_forming(self, worker: Worker) -> None:
        if not self.is_formed and worker.group is self:
            self._fail_one(worker)

    def _form(self) -> None:
        if self.is_broken:
            return
        if any(not worker.runs for worker in self.members.values()):
            return  # the others give up after the collectives' time-out
        self.is_formed = True
        self._witness.formed(self)
        for worker in self.members.values():
            worker.step, worker.state_status = self.step, StateStatus.COMPLETE
        self._engine.after(self._pace.step_s, self._end_step)

    def _end_step(self) -> None:
        """All members have come to the end of a step, or cannot."""
        if self.is_broken:
            return
        workers = [self.members[name] for name in self.round.roster if name in self.members]
        if not all(worker.runs for worker in workers) or not self._all_connected(workers):
            self._stall()
            return
        self._stalled_s = 0.0
        if self.fails_next_step:
            self._break()
            return
        self.step += 1
        committing = [worker for worker in workers if worker.may_commit()]
        if self.tears_next_step and len(committing) > 1:
            committing = committing[: len(committing) // 2]
        for worker in committing:
            worker.step = self.step
            self._witness.committed(worker, self, self.step)
        if len(committing) < len(workers):
            self._break()
        elif any(worker.should_pause() for worker in workers) or self._is_asked_to_stop(workers):
            for worker in workers:
                worker.ask(failed=False)
        elif self.step >= self._pace.total_steps:
            for worker in workers:
                worker.finish()
        else:
            self._engine.after(self._pace.step_s, self._end_step)

    def _is_asked_to_stop(self, workers: list[Worker]) -> bool:
        return any(worker.known.state is RoundState.GATHERING for worker in workers)

    def _stall(self) -> None:
        self._stalled_s += self._pace.step_s
        if self._stalled_s >= self._pace.collective_timeout_s:
            self._break()
        else:
            self._engine.after(self._pace.step_s, self._end_step)

    def _all_connected(self, workers: list[Worker]) -> bool:
        first = workers[0].member.host
        return all(self._connected(first, worker.member.host) for worker in workers)


def fresh_member(name: str, host: str) -> Member:
    """The record of a process that has just started."""
    return replace(Member(name, host), patience_s=15.0)
