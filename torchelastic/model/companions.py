"""What belongs to a state beside weights and optimizers, and is small: counters, sampler, the user's own values."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from torchelastic.data.shares import RankBatches
from torchelastic.errors import NonRetryableException
from torchelastic.group.step_course import StepCourse
from torchelastic.inventory.generators import Generators, generators
from torchelastic.inventory.module_structure import KeptStructure, ModuleStructure
from torchelastic.inventory.weights import KeptWeights
from torchelastic.model.extras import Copied, CopiedStates, Extras
from torchelastic.model.loss_counts import LossCounts
from torchelastic.model.one_or_many import OneOrMany, check_stateful
from torchelastic.model.optimizers import Optimizers, Settings
from torchelastic.model.world_change import WorldChange, WorldWatch

log = logging.getLogger(__name__)

#: So many steps in a row may be skipped: what makes more of them unfit is no bad batch.
MOST_SKIPS = 20
#: Types of immutable values.
_PLAIN = frozenset({int, float, bool, str, type(None)})


class Trained(NamedTuple):
    """What a step changes besides, as far as it is small: copied before each step.

    Attributes:
        buffers: those of the model, where its structure is not copied.
        structure: None: the model's structure is not undone.
    """

    buffers: Sequence[torch.Tensor]
    optimizers: Optimizers
    schedulers: OneOrMany
    structure: ModuleStructure | None = None


class Large(NamedTuple):
    """What else undoes a step where weights are copied before it: these, and the states of large objects of `extra`."""

    weights: KeptWeights
    states: CopiedStates


class Snapshot(NamedTuple):
    """What undoes a step. Its size does not grow with the weights, except for `large`."""

    step: int
    epoch: int
    buffers: tuple[torch.Tensor, ...]
    structure: KeptStructure | None
    members: tuple[tuple[list[Any], ...], ...]
    attributes: Sequence[Callable[[], object]]
    random: Generators
    groups: Settings
    scheduler: Any
    sampler: Any
    extra: Copied
    replaced: int
    large: Large | None

    def with_flags_of(self, earlier: Snapshot) -> Snapshot:
        """See `KeptStructure.with_flags_of`."""
        if self.structure is None or earlier.structure is None:
            return self
        return self._replace(structure=self.structure.with_flags_of(earlier.structure))


def copied(state: Any) -> Any:
    """A deep copy. Quick for a dict of plain values, as samplers' states are: it is made before every step."""
    if type(state) is dict and _PLAIN.issuperset(map(type, state.values())):
        return dict(state)
    return copy.deepcopy(state)


class Companions:
    """The counters, the sampler and the user's own values of one state.

    Args:
        sampler: the user's; None: none.
        extra: the user's own values.

    Attributes:
        step: committed steps.
        epoch: where the sampler has none.
        skips_in_a_row: steps that were left out since one was not.
        counts: of losses that are sums.

    Raises:
        ValueError: the sampler cannot be kept, or `extra` is no dict.
    """

    def __init__(self, sampler: Any, extra: dict[str, Any] | None) -> None:
        check_stateful("sampler", sampler, instead="an ElasticBatchSampler or an ElasticStream (docs/data.md)")
        self.step = self.epoch = self.skips_in_a_row = 0
        self.sampler = sampler
        if extra is not None and not isinstance(extra, dict):
            raise ValueError(f"extra is a {type(extra).__name__}: give a dict of your own values by name")
        self.extras = Extras({} if extra is None else extra)
        self.counts = LossCounts(sampler)
        self._has_warned = False

    def batches(self) -> int:
        """How many global batches the step under way has drawn; 0: not known."""
        return len(self.sampler.pending) if isinstance(self.sampler, RankBatches) else 0

    def count_step(self) -> None:
        """A step has succeeded."""
        step = self.step + 1
        self._warn_of_unequal_batches(step)
        if hasattr(self.sampler, "commit"):
            self.sampler.commit()
        self.step, self.skips_in_a_row = step, 0

    def skip(self, snapshot: Snapshot, trained: Trained | None) -> int:
        """Undo the step that began with this snapshot, and count it: its batches are behind this state.

        Returns:
            How many samples they have, over all ranks; 0: not known.
        """
        skips, drawn = self.skips_in_a_row, self.sampler.pending if isinstance(self.sampler, RankBatches) else ()
        self.restore(snapshot, trained, keeps_sampler=True)
        self.count_step()
        self.skips_in_a_row = skips + 1
        return sum(share.global_samples for share in drawn)

    def _warn_of_unequal_batches(self, step: int) -> None:
        """Gradients that were accumulated are weighted as one: right only where this rank's parts are equally large."""
        if self._has_warned or self.counts.are_used_in_step or not isinstance(self.sampler, RankBatches):
            return
        pending = self.sampler.pending
        self._has_warned = len({share.weight for share in pending}) > 1
        if self._has_warned:
            parts = ", ".join(f"{share.local_samples} of {share.global_samples}" for share in pending)
            log.warning(
                "step %d has accumulated the gradients of global batches of which this rank had unequal parts (%s "
                "samples): at another world size their samples would count differently. Give the sampler "
                "drop_last=True, or draw one global batch in a step and cut it into micro batches (docs/state.md)",
                step, parts,
            )  # fmt: skip

    def sampler_state(self) -> Any:
        """The sampler's state; None: there is none."""
        return None if self.sampler is None else self.sampler.state_dict()

    # --- undoing a step -------------------------------------------------------------------------------------------

    def snapshot(
        self, trained: Trained | None, *, copy_large: Callable[[], Large | None] = lambda: None, replaced: int = 0
    ) -> Snapshot:
        """What undoes a step, but for large tensors: `copy_large` copies those, or they are undone otherwise."""
        return Snapshot(
            step=self.step,
            epoch=self.epoch,
            buffers=() if trained is None else tuple(buffer.clone() for buffer in trained.buffers),
            structure=None if trained is None or trained.structure is None else trained.structure.copy(),
            members=() if trained is None else trained.optimizers.members(),
            attributes=() if trained is None or trained.structure is None else trained.optimizers.attributes(),
            random=generators(),
            groups=() if trained is None else trained.optimizers.settings(),
            scheduler=None if trained is None else copied(trained.schedulers.state_dict()),
            sampler=copied(self.sampler_state()),
            extra=self.extras.capture(),
            replaced=replaced,
            large=copy_large(),
        )

    def restore(self, snapshot: Snapshot, trained: Trained | None, *, keeps_sampler: bool = False) -> None:
        """The inverse; `keeps_sampler`: but for the place in the data."""
        self.step, self.epoch = snapshot.step, snapshot.epoch
        snapshot.random.put()
        large = snapshot.large
        if snapshot.structure is not None:
            snapshot.structure.put()
            for restore in snapshot.attributes:
                restore()
            if trained is not None:
                trained.optimizers.put_members(snapshot.members)
        if trained is not None and large is not None:
            trained.optimizers.forget_added(snapshot.groups)
        is_whole = large is None or large.weights.put()
        if trained is not None and large is not None and trained.optimizers.left.put_back():
            is_whole = True
        if not is_whole:
            log.error(
                "step %d: gradients that were kept from the step before were changed in place by this one, for the "
                "first time in this run, and are dropped: give ModelState snapshot='full' where gradients are "
                "accumulated over several steps", snapshot.step + 1,
            )  # fmt: skip
        if trained is not None:
            with torch.no_grad():
                for buffer, value in zip(trained.buffers, snapshot.buffers, strict=True):
                    buffer.copy_(value)
            trained.optimizers.load_settings(snapshot.groups, undoes=True)
            trained.schedulers.load_state_dict(copied(snapshot.scheduler))
        if self.sampler is not None and not keeps_sampler:
            self.sampler.load_state_dict(copied(snapshot.sampler))
        self.extras.restore(snapshot.extra)
        if large is not None:
            self.extras.restore_large(large.states)

    # --- for other ranks, and for later ---------------------------------------------------------------------------

    def state_dict(self, trained: Trained) -> dict[str, Any]:
        """All of it, as plain values and tensors, which are not copied; without settings and buffers."""
        return {
            "optimizer_steps": trained.optimizers.usual,
            "scheduler": trained.schedulers.state_dict(),
            "sampler": self.sampler_state(),
            "extra": self.extras.state_dict(),
            "step": self.step,
            "epoch": self.epoch,
            "random": torch.get_rng_state(),
        }

    def load_state_dict(
        self, tree: dict[str, Any], trained: Trained, *, with_random: bool, is_stored: bool = False
    ) -> None:
        """The inverse.

        Args:
            tree: of this rank or of another one; may hold more.
            trained: what is trained here.
            with_random: whether it is this rank's: another one's random numbers are not taken, or two would draw alike.
            is_stored: whether it is a checkpoint's, though not this rank's; see `Extras.load_state_dict`.
        """
        trained.optimizers.usual = tree.get("optimizer_steps", ())
        schedulers = trained.schedulers if trained.schedulers.objects else None
        for name, own in (("scheduler", schedulers), ("sampler", self.sampler)):
            if own is not None and tree[name] is None:
                log.warning("the state that is loaded has no %s: this one begins as it was built", name)
            elif own is not None:
                own.load_state_dict(tree[name])
        self.extras.load_state_dict(tree["extra"], is_own=with_random or is_stored)
        self.step, self.epoch = int(tree["step"]), int(tree["epoch"])
        if with_random:
            torch.set_rng_state(tree["random"].cpu())

    def synchronize(self, trained: Trained, equals: Sequence[int], move: Callable[..., Any]) -> None:
        """Synchronize settings, schedulers and objects after a failed step whose weights are final, on every rank.

        All optimizers had stepped, so the weights are equal; but the steps failed at different places after that: one
        rank may have stepped its scheduler, or updated its EMA, where another had not. Plain values of `extra` stay
        each rank's own.

        Args:
            trained: what is trained here; the optimizers' tensors are in sync.
            equals: ranks that take the source's; equal on all ranks; may be empty.
            move: `transfer.synchronize`, from the source in this group.

        Raises:
            RuntimeError: a peer is lost; nothing has changed here.
        """
        if not equals:
            return
        tree = {
            "settings": trained.optimizers.settings(),
            "scheduler": trained.schedulers.state_dict(),
            "objects": self.extras.states(),
        }
        received = move(tree, stale=equals)
        if received is not None:
            trained.optimizers.load_settings(received["settings"])
            trained.schedulers.load_state_dict(received["scheduler"])
            self.extras.load_states(received["objects"])


class WithCompanions:
    """What users see of the companions of a state; a part of `ModelState` and `ShardedState`."""

    _own: Companions
    _world: WorldWatch
    step_course: StepCourse | None

    def skip_step(self, reason: str, *, most_in_a_row: int = MOST_SKIPS) -> NoReturn:
        """Leave this train step out, on all ranks, and go on behind its batches: for a loss that is no number, say.

        Call it in the train step, on the training thread, before `backward()`; on one rank, or on several. Nothing that
        the step has done counts, on any rank: weights, buffers, random numbers, scheduler and `extra` are as before it.
        `step` counts it, and its samples are trained no more in this epoch; the report and the ledger count them. Where
        not all ranks call it, the others learn of it within half a second, and the group is formed anew.

        Args:
            reason: for the log and the report.
            most_in_a_row: so many steps may be skipped in a row.

        Raises:
            NonRetryableException: so many were.
            RuntimeError: the step has stepped an optimizer, or changed weights, already.
        """
        if self._own.skips_in_a_row >= most_in_a_row:
            raise NonRetryableException(
                f"{self._own.skips_in_a_row} steps in a row were skipped ({reason}): training does not recover by "
                "itself; start again from an earlier checkpoint with a lower learning rate, or give skip_step "
                "most_in_a_row"
            )
        if not self._is_untouched():
            raise RuntimeError(
                f"skip_step({reason!r}) comes after this step has stepped an optimizer or changed weights: call it "
                "before backward()"
            )
        if self.step_course is None:
            raise NotImplementedError(f"{type(self).__name__} cannot leave a step out")
        raise self.step_course.wish_skip(reason, self._rank())

    def _is_untouched(self) -> bool:
        """Whether the step under way has changed no weight yet."""
        raise NotImplementedError

    def _rank(self) -> int:
        """Of this process in the present group."""
        raise NotImplementedError

    _backward: Callable[[Any, Any], None]

    def backward(self, loss_sum: torch.Tensor, count: float | torch.Tensor) -> None:
        """The backward pass of a loss that is no mean over samples: divides by the count of the whole global batch.

        In place of `loss.backward()`, for a sum, or a mean over something else than samples, such as tokens. Gradients
        are then those of the mean over the global batch, at any world size. What is called several times up to an
        optimizer's step (micro batches, all but the last under `no_sync()`) has the sum of all counts as divisor. What
        a worker without a part of the batch has loaded counts nothing.

        Every rank calls it equally often, and no other backward pass beside it, up to an optimizer's step.

        Args:
            loss_sum: the sum over this rank's batch; a tensor of one number. With a GradScaler: what `scale` returned.
            count: of what it is the sum, or the sum of weights: a number from 0 up, best one on the CPU.

        Raises:
            UnfitError: (of `torchelastic.errors`: a NonRetryableException) on every rank: the count is 0 on all ranks,
                or none on one; another backward pass has given gradients too.
            RuntimeError: a peer was lost.
        """
        self._backward(loss_sum, count)

    @property
    def step(self) -> int:
        """Committed steps."""
        return self._own.step

    @property
    def sampler(self) -> Any:
        """As given."""
        return self._own.sampler

    @property
    def extra(self) -> dict[str, Any]:
        """Your own values."""
        return self._own.extras.values

    @extra.setter
    def extra(self, values: dict[str, Any]) -> None:
        self._own.extras.values = values

    @property
    def epoch(self) -> int:
        """The sampler's epoch where it has one, else what was set."""
        return int(getattr(self.sampler, "epoch", self._own.epoch))

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._own.epoch = value

    @property
    def end_step(self) -> int | None:
        """`step` at the end of the run, as far as the sampler knows; None: it does not. Any time."""
        left = getattr(self.sampler, "batches_left", None)
        return None if left is None else self.step + int(left)

    def on_world_change(self, callback: Callable[[WorldChange], Any]) -> Callable[[WorldChange], Any]:
        """Have it called at the end of `sync` on every rank whose group has another size than its last one had.

        A process's first group counts too. What the callback raises, `sync` raises. Returns the callback.
        """
        self._world.add(callback)
        return callback
