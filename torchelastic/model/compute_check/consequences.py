"""What follows from a check: who is named, what is raised on which rank, and when a check switches itself off."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from torchelastic.errors import ComputeCheckError, ComputesWrongError, RetryableException
from torchelastic.group.rollback import Rollback
from torchelastic.metrics import publish_metric
from torchelastic.model.compute_check.members import CheckMembers, wait_for_verdict
from torchelastic.model.compute_check.options import ComputeCheck
from torchelastic.model.compute_check.verdict import CheckOutcome, CheckVerdict
from torchelastic.model.transfer import message_device
from torchelastic.text import shortlist

log = logging.getLogger("torchelastic.model_state")  # a part of it for those who filter the log

#: So many checks in a row that could compare nothing are enough.
MOST_NOT_COMPARABLE = 3
#: Numbers of `CheckRecord.words`.
WORDS = 4


class CheckRecord:
    """What the checks of a run have found so far; one per state, on the training thread.

    Args:
        options: as the user chose.

    Attributes:
        is_off: whether no more is checked, since the steps cannot be repeated to the last bit.
        agreed: checks in which all was equal.
        steps: by rank, the committed steps when the last of them was in which that rank took part; -1: there was none.
        rollback: with `on_wrong="restore"`; else None.
    """

    def __init__(self, options: ComputeCheck) -> None:
        self.options = options
        self.is_off = False
        self._not_comparable = 0  # in a row
        self.agreed = 0
        self.steps: tuple[int, ...] = ()
        self.rollback = Rollback() if options.on_wrong == "restore" else None
        self._own_step = self._came_step = -1
        self._came: tuple[int, ...] = ()  # by rank, the committed steps when it came

    @property
    def words(self) -> list[int]:
        """For a message to the other ranks; see `take`."""
        return [int(self.is_off), self.agreed, self._own_step, self._came_step]

    def take(self, rows: Sequence[Sequence[int]]) -> None:
        """Know what any rank knows: newcomers have seen no check."""
        off, self.agreed, *_ = (max(column) for column in zip(*rows, strict=True))
        self.steps, self._came = tuple(row[-2] for row in rows), tuple(row[-1] for row in rows)
        self.is_off = bool(off)

    def in_sync(self, step: int, times_gone_back: int) -> None:
        """A group is in sync after so many committed steps, in a run that has gone back so many times."""
        if self._came_step < 0:
            self._came_step = step
        rollback = self.rollback
        if rollback is not None and (rollback.at_most is not None or rollback.count < times_gone_back):
            rollback.ended(times_gone_back)
            # of what comes now nothing was checked yet
            self._own_step, self._came_step = min(self._own_step, step), min(self._came_step, step)

    @property
    def has_agreed(self) -> bool:
        """Whether a check has."""
        return self.agreed > 0

    def conclude(
        self,
        verdict: CheckVerdict,
        step: int,
        members: CheckMembers,
        what: str,
        *,
        where: str = "",
        parties: Sequence[int] = (),
    ) -> None:
        """Act on a verdict; called on every rank, in a step that can still be undone or after one.

        Args:
            verdict: the same on all ranks.
            step: committed steps before the one that was checked.
            members: of the group.
            what: what was compared.
            where: the first thing in the model that differs; empty: not known.
            parties: whose computations were compared.

        Raises:
            ComputesWrongError: this worker is wrong, and leaves.
            RetryableException: another one is: the step is undone, and repeated without it.
            ComputeCheckError: it is not known who is wrong, or another worker is, and the run is to stop.
        """
        rank = members.rank
        if verdict.outcome is CheckOutcome.AGREED:
            self.agreed += 1
            self._not_comparable = 0
            if rank in parties:
                self._own_step = step
            publish_metric("torchelastic", "compute_check.agreed", self.agreed)
            return
        if verdict.outcome is CheckOutcome.NOT_COMPARABLE:
            self._compared_nothing(step, rank)
            return
        publish_metric("torchelastic", "compute_check.differed", 1)
        wait_for_verdict(members, message_device())
        place = f"; the first difference: {where}" if where else ""
        who = shortlist([members.names[one] for one in verdict.ranks])
        if verdict.outcome is CheckOutcome.NOT_REPEATABLE:
            self.is_off = True
            if rank == 0:
                log.warning(
                    "step %d: the check of computations is off from here on: the same step gives other bits each time, "
                    "or on each worker (%s, on %s)%s; have torch.use_deterministic_algorithms(True), and random "
                    "numbers from torch alone", step + 1, what, who, place,
                )  # fmt: skip
            return
        if verdict.outcome is CheckOutcome.DOUBT:
            text = f"step {step + 1}: {what} differ on {who}, and it cannot be told who computes wrong{place}"
            self._doubt(f"{text}; {self._since(verdict.ranks)}", rank)
        else:
            text = f"step {step + 1}: {who} computes wrong: {what} differ{place}; {self._since(verdict.ranks)}"
            self._wrong(verdict, text, step, rank, who)

    def _compared_nothing(self, step: int, rank: int) -> None:
        self._not_comparable += 1
        if self._not_comparable < MOST_NOT_COMPARABLE:
            return
        self.is_off = True
        if rank == 0:
            log.warning(
                "step %d: the check of computations is off from here on: the model is given other data, or its loss "
                "gives other gradients, when a step is computed again; draw random numbers of the step from the "
                "generators of torch, numpy or random, and not from some of its own", step + 1,
            )  # fmt: skip

    def _doubt(self, text: str, rank: int) -> None:
        if self.options.on_doubt == "stop":
            raise ComputeCheckError(text)
        if rank == 0:
            log.error("%s", text)

    def _wrong(self, verdict: CheckVerdict, text: str, step: int, rank: int, who: str) -> None:
        if self._only_warns:
            if rank == 0:
                log.error("%s", text)
        elif rank in verdict.ranks:
            raise ComputesWrongError(text, step + 1)
        elif self.options.on_wrong == "stop":
            raise ComputeCheckError(text)
        else:
            goes_back = ""
            if self.rollback is not None:
                self.rollback.begin(self._trusted(verdict.ranks))
                goes_back = f", and the run goes back to a checkpoint of at most {self.rollback.at_most} steps"
            if rank == min(each for each in range(len(self.steps) or rank + 1) if each not in verdict.ranks):
                log.error("%s; it leaves the run%s", text, goes_back)
            raise RetryableException(
                f"{text.partition(':')[0]}: a worker computes wrong and leaves the run{goes_back}: {who}"
            )

    @property
    def _only_warns(self) -> bool:
        """A GPU's sums may differ without a fault, where torch was not asked for those that do not."""
        may_vary = torch.cuda.is_available() and not torch.are_deterministic_algorithms_enabled()
        return self.options.on_wrong == "warn" or may_vary

    def _trusted(self, ranks: Sequence[int]) -> int:
        """The newest step of which these ranks have computed nothing that no check has confirmed since."""
        known = [max(self.steps[rank], self._came[rank]) for rank in ranks if rank < len(self.steps)]
        return max(0, min(known, default=0))

    def _since(self, ranks: Sequence[int]) -> str:
        steps = [self.steps[rank] for rank in ranks if rank < len(self.steps)]
        if not steps or min(steps) < 0:
            return "no check with it has agreed before, so all that was trained with it may be wrong"
        since = f"the last check with it that agreed was in step {min(steps) + 1}, so weights may be wrong since then"
        if self.rollback is not None:
            return since
        command = f"torchelastic checkpoint rewind FOLDER --to {min(steps)}"
        return f"{since}: if that matters, go back to a checkpoint of at most {min(steps)} steps (`{command}`)"
