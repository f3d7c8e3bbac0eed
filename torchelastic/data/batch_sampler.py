"""Which samples this rank trains on in the next step, and which ones all ranks together have trained on.

The order of an epoch is fixed by (seed, epoch) alone and cut into global batches of a constant size. A rank takes its
share of each global batch; after a resize the shares change and the batches do not. Drawing a batch moves nothing for
good: only `commit` does, so a step that failed is drawn again.

A step of which a part of the gradients was saved is assigned a second time: see `deal_again`. Samples that such a step
leaves out come back in batches of their own at the end of the epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils.data import Sampler

from torchelastic.data.epoch_progress import EpochProgress, Position
from torchelastic.data.order import epoch_order
from torchelastic.data.shares import (
    PADDING_SAMPLES,
    BatchShare,
    RankBatches,
    SecondDeal,
    Share,
    pick,
    places_of_unit,
    places_of_units,
    require_rank,
    units_of_rank,
)
from torchelastic.errors import UnfitStateError

log = logging.getLogger(__name__)

_UNCOUNTED_STEPS = 3  # of which nothing was counted, before that is said
_CACHED_EPOCHS = 2  # while one epoch ends, prefetching is already in the next


class Load(NamedTuple):
    """What a rank loads of one global batch.

    Attributes:
        epoch: from 0 up.
        keys: what the dataset is asked for.
        sizes: how many of them each logical shard has; empty: they are not of logical shards.
    """

    epoch: int
    keys: list[int]
    sizes: tuple[int, ...] = ()


class ElasticBatchSampler(RankBatches[BatchShare], Sampler[list[int]]):
    """Cuts epochs into global batches, returns this rank's local batches, and remembers what was committed.

    Use it through `ElasticLoader`, which calls `consume` with every batch that it hands out; the train loop calls
    `commit` after a good step and `rollback` after a failed one. With a loader of your own
    (`DataLoader(dataset, batch_sampler=sampler)`, one iterator per epoch), call `consume` for each batch yourself.

    Every rank holds its own copy. All copies with equal constructor arguments, state and number of `consume` calls
    agree; nothing is communicated. Use it from the training thread only. Memory: 8 bytes per sample and epoch in use.

    Args:
        dataset_size: number of samples, or the dataset itself.
        global_batch_size: samples per batch over all ranks; stays the same whatever the world size.
        epochs: how many epochs the run has.
        shuffle: a new order each epoch; False for the dataset's own.
        seed: equal on all ranks.
        drop_last: leave out an epoch's last batch if it is not full.
        min_local_batch: how many samples of a global batch a rank has at least; where they are too few for all ranks,
            high ranks have none, and load padding. None: as the model needs it: 2 where it has a BatchNorm in training
            mode, else 1.

    Raises:
        ValueError: a size is not positive, or `min_local_batch` larger than a global batch; the dataset has none, or
            with `drop_last` no batch is left.
    """

    def __init__(
        self,
        dataset_size: int | Sized,
        global_batch_size: int,
        *,
        epochs: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        min_local_batch: int | None = None,
    ) -> None:
        super().__init__(global_batch_size, min_local_batch)
        if not hasattr(dataset_size, "__len__") and not isinstance(dataset_size, int):
            raise ValueError(
                f"a {type(dataset_size).__name__} has no length to be divided by: write __len__ and __getitem__, "
                "or use ElasticStream, which takes data without an index"
            )
        self.dataset_size = dataset_size if isinstance(dataset_size, int) else len(dataset_size)
        self.epochs = epochs
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        if self.dataset_size < 1 or global_batch_size < 1 or epochs < 0:
            raise ValueError(
                "dataset_size and global_batch_size start at 1 and epochs at 0, got "
                f"dataset_size={self.dataset_size}, global_batch_size={global_batch_size}, epochs={epochs}"
            )
        full, left_over = divmod(self.dataset_size, global_batch_size)
        self.batches_per_epoch = full + (1 if left_over and not drop_last else 0)
        if self.batches_per_epoch == 0:
            raise ValueError(
                f"drop_last leaves no batch: {self.dataset_size} samples are fewer than "
                f"global_batch_size={global_batch_size}; make that smaller, or give drop_last=False"
            )
        self._progress = EpochProgress(self.batches_per_epoch, global_batch_size)
        self._next: Position = (0, 0)  # of the first global batch that is not consumed
        self._orders: dict[int, torch.Tensor] = {}
        self._logical_shards: int | None = None
        self._is_taken = False  # whether a batch was, by iterating over this
        self._uncounted_steps = 0

    @property
    def global_batch_size(self) -> int:
        """Samples per batch over all ranks. It cannot be changed: epochs are cut by it, and positions count in it."""
        return self._global_batch_size

    # Where we are

    @property
    def epoch(self) -> int:
        """The epoch of the next uncommitted batch; equals `epochs` when the run is finished."""
        return self._progress.epoch

    @property
    def cursor(self) -> int:
        """Committed batches of the present epoch times `global_batch_size`: samples, but for those postponed."""
        return self._progress.number * self.global_batch_size

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and number of the batch that the next `consume` returns: behind the pending ones."""
        return self._next

    @property
    def finished(self) -> bool:
        """True when all epochs are committed."""
        return self.epoch >= self.epochs

    @property
    def postponed(self) -> tuple[int, ...]:
        """Dataset indices that committed steps of this epoch have left out, and that are trained at its end."""
        return self._progress.postponed

    @property
    def units(self) -> int:
        """Into how many units a global batch is cut: logical shards, or places of samples."""
        return self._logical_shards or self.global_batch_size

    @property
    def present_units(self) -> tuple[int, ...]:
        """The units of the next uncommitted batch with samples: all, where it is a full one."""
        samples = 0 if self.finished else len(self._batch(self._progress.position))
        return tuple(unit for unit in range(self.units) if self._places_of_unit(samples, unit))

    @property
    def least_units(self) -> int:
        """How many units a rank computes at least, if any: a logical shard has enough samples, or none."""
        return self._min_local_batch if self._logical_shards is None else 1

    @property
    def smallest_batch(self) -> int:
        """Samples of the smallest global batch of an undisturbed epoch: of the last one, if that is not full."""
        left_over = 0 if self.drop_last else self.dataset_size % self._global_batch_size
        return left_over or self._global_batch_size

    def __len__(self) -> int:
        """Uncommitted global batches of the present epoch."""
        return 0 if self.finished else self._progress.batches_in(self.epoch) - self._progress.number

    @property
    def batches_left(self) -> int:
        """Uncommitted global batches of the whole run, as far as is known now."""
        return self._progress.batches_left(self.epochs)

    # What there is to load

    def set_world(self, rank: int, world_size: int) -> None:
        """Take a place in a (new) world. What was consumed and not committed is forgotten, as by `rollback`.

        Args:
            rank: 0 to world_size - 1.
            world_size: number of ranks that share each global batch.

        Raises:
            ValueError: `rank` is not in that range.
        """
        require_rank(rank, world_size)
        self._reassignment = None
        self.rollback()
        self._rank, self._world_size, self._has_place = rank, world_size, True
        self._say_if_ranks_are_idle()

    def set_logical_shards(self, shards: int | None) -> None:
        """Cut every global batch into this many logical shards, of which each rank has a contiguous range.

        Args:
            shards: the same on all ranks and for the whole run, whatever the world size; None: ranks share samples.

        Raises:
            ValueError: `shards` is below 1 or above `global_batch_size`.
        """
        if shards is not None and not 1 <= shards <= self.global_batch_size:
            raise ValueError(
                f"logical_shards={shards} must lie between 1 and global_batch_size={self.global_batch_size}: "
                "a shard has at least one sample"
            )
        self._logical_shards = shards

    def pending_units(self) -> tuple[tuple[int, int], ...]:
        """The units of the one batch that is pending, with their numbers of samples, in the order of what was loaded.

        Units without samples are left out.
        """
        samples = len(self._batch(self._progress.position))
        deal = self._reassignment
        units = self._units_of(samples, self._rank, self._world_size) if deal is None else deal.compute
        return self._sizes(samples, units)

    def _sizes(self, samples: int, units: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Those of these units that have any of so many samples, and how many each."""
        sizes = ((unit, len(self._places_of_unit(samples, unit))) for unit in units)
        return tuple((unit, size) for unit, size in sizes if size)

    def shares(self, batch_number: int) -> Share:
        """Return what this rank loads of one global batch of the present epoch.

        Args:
            batch_number: 0 to batches_per_epoch - 1, or more where samples were postponed.

        Raises:
            ValueError: there is no such batch.
        """
        batches = self._progress.batches_in(self.epoch)
        if not 0 <= batch_number < batches:
            raise ValueError(f"batch {batch_number} does not exist: epoch {self.epoch} has {batches}, from 0 on")
        return self._share((self.epoch, batch_number))

    def keys(self, epoch: int, indices: Sequence[int]) -> list[int]:
        """What the dataset is asked for in place of these indices; to be overridden where it wants to know the epoch.

        Loader processes run ahead, over the end of the epoch too, so "the present epoch" means nothing to them.
        """
        del epoch
        return list(indices)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield what this rank loads, batch by batch, from the committed cursor to the end of the present epoch.

        The position and the world are those of this call; a running iterator does not notice later changes.
        """
        loads = self._loads(self._progress.position, (min(self.epoch + 1, self.epochs), 0))

        def taken() -> Iterator[list[int]]:
            for load in loads:
                self._is_taken = True
                yield load.keys

        return taken()

    def upcoming(self) -> Iterator[list[int]]:
        """Like iterating, but from `position` (behind the pending batches) and on to the end of the last epoch."""
        return (load.keys for load in self.upcoming_loads())

    def upcoming_loads(self) -> Iterator[Load]:
        """As `upcoming`, with the epoch of each."""
        return self._loads(self._next, (self.epochs, 0))

    def _loads(self, start: Position, end: Position) -> Iterator[Load]:
        # what may change is taken down here: a generator begins to run with its first `next`
        begun, rank, world_size, deal = self._progress, self._rank, self._world_size, self._reassignment

        def load(epoch: int, batch: tuple[int, ...], indices: Sequence[int], units: Sequence[int]) -> Load:
            of_shards = () if self._logical_shards is None else self._sizes(len(batch), units)
            return Load(epoch, self.keys(epoch, indices), tuple(size for _, size in of_shards))

        def loads() -> Iterator[Load]:
            progress, at = begun, start
            if deal is not None and at == progress.position and at < end:
                batch = progress.batch(self._order(at[0]), at)
                yield load(at[0], batch, self._reassigned(deal, batch, at).load, deal.compute)
                progress = progress.advanced(progress.following(at), self._of(batch, deal.postponed))
                at = progress.position
            while at < end:
                order = self._order(at[0])  # held over the epoch, even when the cache has moved on
                for number in range(at[1], progress.batches_in(at[0])):
                    batch = progress.batch(order, (at[0], number))
                    units = self._units_of(len(batch), rank, world_size)
                    yield load(at[0], batch, self._to_load(batch, rank, world_size), units)
                at = (at[0] + 1, 0)

        return loads()

    def _batch(self, position: Position) -> tuple[int, ...]:
        """The dataset indices of one global batch."""
        return self._progress.batch(self._order(position[0]), position)

    def _of(self, batch: tuple[int, ...], units: Sequence[int]) -> tuple[int, ...]:
        """The dataset indices of these units of a batch."""
        return pick(batch, self._places_of_units(len(batch), units))

    def _places_of_unit(self, samples: int, unit: int) -> range:
        return places_of_unit(samples, unit, self._logical_shards, self._min_local_batch)

    def _places_of_units(self, samples: int, units: Sequence[int]) -> list[int]:
        return places_of_units(samples, units, self._logical_shards, self._min_local_batch)

    def _share(self, position: Position) -> Share:
        batch = self._batch(position)
        if self._reassignment is not None and position == self._progress.position:
            return self._reassigned(self._reassignment, batch, position)
        load = self._to_load(batch, self._rank, self._world_size)
        own = load if self._places(len(batch), self._rank, self._world_size) else ()
        return Share(load, BatchShare(*position, own, len(own), len(batch)))

    def _reassigned(self, deal: SecondDeal, batch: tuple[int, ...], position: Position) -> Share:
        own = self._of(batch, deal.compute)
        total = len(batch) - len(self._of(batch, deal.postponed))
        share = BatchShare(*position, own, len(own), total, carried=self._of(batch, deal.carried))
        return Share(own or batch[: max(PADDING_SAMPLES, self._min_local_batch)], share)

    def _units_of(self, samples: int, rank: int, world_size: int) -> range:
        """The units that are this rank's in a global batch: logical shards, or places of the samples there are."""
        return units_of_rank(self._logical_shards or samples, rank, world_size, self.least_units)

    def _places(self, samples: int, rank: int, world_size: int) -> Sequence[int]:
        """The places of this rank's samples in a global batch."""
        units = self._units_of(samples, rank, world_size)
        return units if self._logical_shards is None else self._places_of_units(samples, units)

    def largest_share(self, samples: int) -> int:
        """How many samples of a global batch of so many the rank has that has most."""
        return max(len(self._places(samples, rank, self._world_size)) for rank in range(self._world_size))

    def _to_load(self, batch: tuple[int, ...], rank: int, world_size: int) -> tuple[int, ...]:
        """This rank's share; where there are fewer samples than ranks, those without any copy rank 0's."""
        places = self._places(len(batch), rank, world_size) or self._places(len(batch), 0, world_size)
        return pick(batch, places) or batch[:1]  # with logical shards rank 0 may have none either

    def _order(self, epoch: int) -> torch.Tensor:
        order = self._orders.get(epoch)
        if order is None:
            order = epoch_order(self.dataset_size, self.seed, epoch, shuffle=self.shuffle)
            while len(self._orders) >= _CACHED_EPOCHS:
                self._orders.pop(next(iter(self._orders)))  # the one that was made first
            self._orders[epoch] = order
        return order

    # What happened

    def consume(self) -> BatchShare:
        """Count the next batch as drawn in this step. Called by whoever hands it to the train step, on every rank.

        May be called several times per step (gradient accumulation), across the end of an epoch too.

        Returns:
            What of that batch counts for this rank.

        Raises:
            StopIteration: the last epoch has been consumed.
            NonRetryableException: so it had been in the steps before, which drew nothing and went on.
        """
        if self._next[0] >= self.epochs:
            self._raise_end()
        counted = self._share(self._next).counted
        self._count(counted)
        self._next = self._progress.following(self._next)
        return counted

    def commit(self) -> None:
        """The step succeeded: move the cursor past all that was consumed, over the ends of epochs as needed.

        Raises:
            NonRetryableException: it was consumed on another thread, and so ahead of the step.
        """
        self._require_drawn_here()
        deferred: tuple[int, ...] = ()
        if self._is_taken and not self._has_drawn:
            self._uncounted_steps += 1
            if self._uncounted_steps == _UNCOUNTED_STEPS:
                log.error(
                    "%d train steps have succeeded, and none of the batches that were taken from this sampler is "
                    "counted, so after a failure or a restart others are lost or come again: use ElasticLoader("
                    "dataset, sampler), or call sampler.consume() for each batch that your DataLoader hands out",
                    self._uncounted_steps,
                )
        if self._reassignment is not None and self._pending:
            deferred = self._of(self._batch(self._progress.position), self._reassignment.postponed)
            self._reassignment = None
        self._progress = self._progress.advanced(self._next, deferred)
        self._next = self._progress.position
        self._step_is_over(committed=True)

    def rollback(self) -> None:
        """The step failed: forget what was consumed since the last commit, so that it is drawn again."""
        self._next = self._progress.position
        self._step_is_over(committed=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the committed position and what it depends on, as plain integers; nothing of a running step."""
        postponed = {"postponed": list(self.postponed)} if self.postponed else {}
        return {"epoch": self.epoch, "cursor": self.cursor, **postponed, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position, whatever the world was there. What was consumed and not committed is forgotten.

        Args:
            state: from `state_dict` of a sampler over the same data; `epochs` may differ.

        Raises:
            ValueError: a field is missing or invalid, or dataset size, batch size, seed, shuffle or drop_last differ:
                "the first n samples" would not be the same samples. Nothing was changed then.
        """
        expected = self._identity()
        missing = [name for name in ("epoch", "cursor", *expected) if name not in state]
        if missing:
            raise ValueError(
                f"not the state of an ElasticBatchSampler: {', '.join(missing)} missing; give what state_dict() gave"
            )
        for name, mine in expected.items():
            if int(state[name]) != mine:
                raise UnfitStateError(
                    f"{name} is {mine} here but {int(state[name])} in the saved state, so its position means other "
                    f"samples: construct the sampler with the saved {name}, or start a new run"
                )
        epoch, cursor = int(state["epoch"]), int(state["cursor"])
        number, rest = divmod(cursor, self.global_batch_size)
        postponed = tuple(int(index) for index in state.get("postponed", ()))
        known = all(0 <= index < self.dataset_size for index in postponed)
        if epoch < 0 or rest or not known or number < 0 or (number >= self.batches_per_epoch and not postponed):
            raise ValueError(
                f"epoch {epoch} with cursor {cursor} is not the start of a global batch, so the state is damaged: "
                "give what state_dict() gave"
            )
        self._progress = replace(self._progress, epoch=epoch, number=number, postponed=postponed)
        self._reassignment = None
        self.rollback()

    def _identity(self) -> dict[str, int]:
        return {
            "dataset_size": self.dataset_size,
            "global_batch_size": self.global_batch_size,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
            "drop_last": int(self.drop_last),
        }

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_orders": {}}  # 8 bytes per sample that can be computed again
