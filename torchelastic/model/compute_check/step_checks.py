"""The checks of one state: when they are due, and what is compared before a step's optimizer changes the weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchelastic.data.shares import RankBatches
from torchelastic.inventory.names import named_parameters
from torchelastic.model.compute_check.consequences import WORDS, CheckRecord
from torchelastic.model.compute_check.members import CheckMembers, gather_members, gathered, gathered_texts
from torchelastic.model.compute_check.options import ComputeCheck, is_due
from torchelastic.model.compute_check.repeat_check import CheckPhase, RepeatCheck
from torchelastic.model.compute_check.shard_check import ShardCheck
from torchelastic.model.compute_check.verdict import NOT_COMPARABLE, CheckOutcome, judge_repeats, judge_replicas
from torchelastic.model.compute_check.worker_kind import number_of
from torchelastic.model.digest import ReplicaComparison, as_word, begun_digest, leaves_of
from torchelastic.model.transfer import message_device
from torchelastic.text import shortlist

log = logging.getLogger("torchelastic.model_state")  # a part of it for those who filter the log


class StepChecks:
    """One per state with a `ComputeCheck`; on the training thread of every rank.

    Args:
        options: as the user chose.
        module: the plain module.
        shards: of a global batch; None: without logical shards.
        are_views: see `RepeatCheck`.
    """

    def __init__(
        self, options: ComputeCheck, module: torch.nn.Module, shards: int | None, *, are_views: bool = False
    ) -> None:
        self.record = CheckRecord(options)
        self.repeats = RepeatCheck(module, are_views=are_views)
        self._module, self._shards = module, shards
        self._members: CheckMembers | None = None
        self._rank, self._world_size = 0, 1
        self._steps_of_group = self._step = 0
        self._is_checked = False
        self._of_shards: ShardCheck | None = None
        self._said_of: tuple[str, ...] = ()

    @property
    def kind(self) -> int:
        """What is to be the same on all ranks: else some would check, and the others go on."""
        return number_of(repr(self.record.options))

    # --- a group ----------------------------------------------------------------------------------

    def leave_group(self) -> None:
        """What was under way in it is void."""
        self.repeats.reset()
        self._members, self._steps_of_group, self._is_checked = None, 0, False

    def enter_group(self, rank: int, world_size: int, step: int, *, is_off: bool, times_gone_back: int) -> None:
        """All are in sync.

        Args:
            rank: of this process.
            world_size: of the group.
            step: committed steps.
            is_off: whether any rank knows that no more is checked.
            times_gone_back: what any rank knows of `Rollback.count`.
        """
        self._rank, self._world_size = rank, world_size
        self.record.is_off = is_off
        self.record.in_sync(step, times_gone_back)

    # --- a step -----------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """An attempt at a step begins, after so many committed ones."""
        self._step, self._of_shards = step, None
        self._is_checked = is_due(step, self._interval_steps) and self._steps_of_group > 0 and not self.record.is_off
        if self._shards is None:
            self.repeats.begin(is_due=self._is_checked)
            self._is_checked = self.repeats.phase is CheckPhase.REPEAT

    @property
    def rehearses(self) -> bool:
        """Whether this attempt is only to be compared with the next one."""
        return self.repeats.phase is CheckPhase.REHEARSAL

    def committed(self) -> None:
        """The step has succeeded, or was left out."""
        self._steps_of_group += 1
        self.repeats.differed = ()

    def shard_check(self) -> ShardCheck | None:
        """The check of this step, where it has logical shards; None: it is not checked. Raises RuntimeError."""
        if not self._is_checked:
            return None
        number = self._step // self._interval_steps
        device = message_device()
        self._of_shards = ShardCheck(self.record, self._known_members(), self._module, self._step, number, device)
        return self._of_shards

    def called(self, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Call the model in a step; what goes in and comes out is noted where it is compared."""
        trail = self.repeats.trail if self._of_shards is None else self._of_shards.trail
        return call(*args, **named) if trail is None else trail.called(call, args, named)

    def before_optimizer(self) -> None:
        """Compare what this rank has computed, and what all have, where this step is checked; on every rank.

        Raises:
            RehearsedError: it is to be computed again.
            Exception: what `CheckRecord.conclude` raises.
            RuntimeError: a peer is lost.
        """
        self.repeats.computed()
        if not self._is_checked:
            return
        self._is_checked = False
        if self._shards is None:
            self._compare_repeats()
        if self._world_size > 1 and not self.record.is_off:
            self._compare_replicas()

    def judge_comparison(self, comparison: ReplicaComparison) -> None:
        """Weights were found to have parted between two syncs; called on every rank. Raises what `conclude` raises."""
        odd = comparison.differing.get("module", comparison.differing.get("optimizer", ()))
        if odd:
            digests = [int(rank in odd) for rank in range(self._world_size)]
            what = "weights, or what optimizers keep,"
            members = self._known_members()
            self.record.take(gathered(self.record.words, members, message_device()))
            self.record.conclude(judge_replicas(digests), self._step, members, what)

    # --- inside -----------------------------------------------------------------------------------

    @property
    def _interval_steps(self) -> int:
        """A check adds one shard to those that a rank computes, or the whole step once more."""
        shards, workers = self._shards, self._world_size
        return self.record.options.interval_steps(1.0 if shards is None else 1 / max(1, -(-shards // workers)))

    def _known_members(self) -> CheckMembers:
        if self._members is None:
            self._members = gather_members(self._rank, self._world_size, message_device())
            self._say_who_has_no_match(self._members)
        return self._members

    def _say_who_has_no_match(self, members: CheckMembers) -> None:
        lonely = members.without_match
        if self._shards is None or members.world_size == 1 or self._rank or not lonely or lonely == self._said_of:
            return
        self._said_of = lonely
        log.warning(
            "%s: no other worker has the same processor, torch, GPU and number of threads, so what it computes is only "
            "compared with itself; as many threads everywhere are had by OMP_NUM_THREADS or torch.set_num_threads",
            shortlist(lonely),
        )

    def _compare_repeats(self) -> None:
        repeats, members, device = self.repeats, self._known_members(), message_device()
        own = [int(repeats.own_differ()), int(repeats.were_given_others())]
        rows = gathered([*self.record.words, *own], members, device)
        self.record.take([row[:WORDS] for row in rows])
        differs = [bool(row[WORDS]) for row in rows]
        if any(differs) and not repeats.differed:
            raise repeats.comes_again(differs)
        first = repeats.differed or differs
        repeats.differed = ()
        verdict = judge_repeats(first, differs, has_agreed=self.record.has_agreed)
        if verdict.outcome is CheckOutcome.AGREED and any(row[WORDS + 1] for row in rows):
            verdict = NOT_COMPARABLE
        where = ""
        if verdict.outcome not in (CheckOutcome.AGREED, CheckOutcome.NOT_COMPARABLE):
            texts = gathered_texts(repeats.where(), self._world_size, device)
            where = next((texts[rank] for rank in verdict.ranks if texts[rank]), "")
        what = "gradients, computed twice,"
        self.record.conclude(verdict, self._step, members, what, where=where, parties=range(self._world_size))

    def _compare_replicas(self) -> None:
        """Weights, and averaged gradients, are the same on all ranks."""
        parameters = named_parameters(self._module)
        gradients = {name: one.grad for name, one in parameters.items()}
        ends = [begun_digest(list(leaves_of(tree))) for tree in (parameters, gradients)]
        rows = gathered([as_word(end()) for end in ends], self._known_members(), message_device())
        for place, what in enumerate(("weights", "gradients after they were averaged")):
            verdict = judge_replicas([row[place] for row in rows])
            if verdict.outcome is not CheckOutcome.AGREED:
                self.record.conclude(verdict, self._step, self._known_members(), what)


def checks_of(
    options: ComputeCheck | None, module: torch.nn.Module, sampler: Any, shards: int | None, ddp: Mapping[str, Any]
) -> StepChecks | None:
    """The checks of a state; None: the user wants none. Raises ValueError: its steps cannot be repeated."""
    if options is None:
        return None
    if shards is None and not isinstance(sampler, RankBatches):
        raise ValueError(
            "check= computes steps a second time, with the same batch: it needs an ElasticBatchSampler or an "
            "ElasticStream as the sampler"
        )
    checks = StepChecks(options, module, shards, are_views=bool(ddp["gradient_as_bucket_view"]))
    if isinstance(sampler, RankBatches) and shards is None:
        sampler.on_batch = checks.repeats.batch
    return checks
