"""What a `ModelState` does to see whether its replicas are equal: after each sync, and now and then between."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from torchelastic.errors import NonRetryableException, RetryableException
from torchelastic.group.rollback import Rollback
from torchelastic.inventory.module_values import buffers_of
from torchelastic.inventory.names import named_parameters
from torchelastic.metrics import publish_metric
from torchelastic.model import digest
from torchelastic.model.companions import Companions, Snapshot, Trained
from torchelastic.model.one_or_many import OneOrMany
from torchelastic.model.optimizers import Optimizers
from torchelastic.model.rolled_back import standing_after
from torchelastic.model.step_gradients import StepGradients
from torchelastic.model.transfer import all_gathered, message_device
from torchelastic.rendezvous.records import StateProgress, StateStatus

log = logging.getLogger("torchelastic.model_state")  # a part of it for those who filter the log

#: Of ranks whose weights are equal.
_DIVIDED = (
    ". If the optimizer divides its state among the ranks (ZeroRedundancyOptimizer, a Muon that gathers what others "
    "have made), a lost rank takes its part along: take one that keeps all on every rank (torch.optim.Muon), or a "
    "ShardedState (docs/sharded.md)"
)


class ComparesReplicas:
    """A part of `ModelState`.

    Attributes:
        module: the user's module.
        replica_comparison: what the comparison after the last sync has found; None before the first.
    """

    module: torch.nn.Module
    replica_comparison: digest.ReplicaComparison | None
    _own: Companions
    _optimizers: Optimizers
    _schedulers: OneOrMany
    _on_out_of_sync: str
    #: The generators from which all ranks drew the same when it was seen last.
    _drawn_alike: Collection[str] = frozenset()
    _gradients: StepGradients
    _status: StateStatus
    rollback: Rollback | None

    @property
    def _trained(self) -> Trained:
        """What a step changes besides."""
        raise NotImplementedError

    def _compare(self, world_size: int, device: torch.device, *, thorough: bool, when: str) -> None:
        """Whether all really are in sync now; a sample is enough where nothing was sent."""
        self.replica_comparison = digest.compare(self._parts(), world_size=world_size, device=device, thorough=thorough)
        publish_metric("torchelastic", "sync.out_of_sync.parts", len(self.replica_comparison.wrong))
        if self.replica_comparison.is_in_sync:
            return
        found = f"step {self._own.step}, {when}: {self.replica_comparison}"
        if set(self.replica_comparison.wrong) == {"optimizer"}:
            found += _DIVIDED
        log.error("%s", found)
        if self._on_out_of_sync == "raise":
            raise NonRetryableException(found)

    def _begun_digest(self) -> Callable[[], int]:
        weights = [parameter for parameter in self.module.parameters() if not is_lazy(parameter)]
        begun = digest.begun_digest(list(digest.leaves_of(weights)), digest.PIECE_BYTES)
        of_form = self._optimizers.digest_of_form()
        return lambda: begun() ^ of_form

    def end_replica_comparison(self, *, are_equal: bool, draw_alike: Collection[str]) -> None:
        """See `State`.

        Raises:
            NonRetryableException: they have parted, and `on_out_of_sync` is "raise"; or see `ComputeCheck`.
            RetryableException: the state of another rank has parted, and it leaves the run.
        """
        self._drawn_alike = draw_alike
        if not are_equal:
            when = "ranks have parted since the last sync"
            self._compare(dist.get_world_size(), message_device(), thorough=True, when=when)
            if self._gradients.checks is not None and self.replica_comparison is not None:
                try:
                    self._gradients.checks.judge_comparison(self.replica_comparison)
                finally:
                    self._forget_if_wrong()

    @property
    def _is_to_go_back(self) -> bool:
        return self.rollback is not None and self.rollback.at_most is not None

    def _forget_if_wrong(self) -> None:
        """Where the run goes back to a checkpoint, what this rank has is nothing to go on from."""
        if self._is_to_go_back:
            self._status = StateStatus.PARTIAL
            self._gradients.forget()

    def _standing(self, said: Sequence[StateProgress], gone_back: Sequence[int], rank: int) -> list[StateProgress]:
        """By rank: what its state counts as a source; see `standing_after`.

        Raises:
            RetryableException: the run has gone back and has not loaded its checkpoint yet, as this group has a rank
                that was away meanwhile, and seemed to have progress.
        """
        progress = standing_after(said, gone_back)
        if progress[rank] != said[rank]:
            log.warning("this worker was away when the run went back to a checkpoint: its state is not used")
            self._status = StateStatus.PARTIAL
        if progress != said and max(progress).kind < StateStatus.UNCOMMITTED:
            raise RetryableException("the run goes back to a checkpoint, and this group was formed without one")
        return progress

    def rehearsed(self, snapshot: Snapshot) -> None:
        """See `State`: called where no optimizer has begun."""
        self._own.restore(snapshot, self._trained)
        if self._gradients.checks is not None:
            self._gradients.checks.repeats.undone()

    def _freeze_as(self, source: int, world_size: int, device: torch.device) -> None:
        """Have the source's parameters require a gradient on all ranks: DDP ends processes that differ in these."""
        parameters = named_parameters(self.module).values()
        mine = torch.tensor([one.requires_grad for one in parameters], dtype=torch.uint8, device=device)
        for parameter, requires_grad in zip(parameters, all_gathered(mine, world_size)[source].tolist(), strict=True):
            parameter.requires_grad_(bool(requires_grad))
        log.error(
            "step %d: the same parameters require a gradient on all ranks now as on rank %d", self._own.step, source
        )

    def _parts(self) -> dict[str, Any]:
        parameters = named_parameters(self.module)
        return {
            "module": parameters,
            "frozen": {name: not parameter.requires_grad for name, parameter in parameters.items()},
            "buffers": buffers_of(self.module),
            "optimizer": self._optimizers.named_state(parameters),
            "scheduler": self._schedulers.state_dict(),
            "sampler": self._own.sampler_state(),
            "extra": self._own.extras.states(),
        }
