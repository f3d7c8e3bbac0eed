"""Which samples this rank trains on in the next step, and which ones all ranks together have trained on.

The order of an epoch is fixed by (seed, epoch) alone and cut into global batches of a constant size. A rank takes its
share of each global batch; after a resize the shares change and the batches do not. Drawing a batch moves nothing for
good: only `commit` does, so a step that failed is drawn again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler

from torchelastic.data.order import epoch_order

_CACHED_EPOCHS = 2  # while one epoch ends, prefetching is already in the next


@dataclass(frozen=True)
class BatchShare:
    """What one rank contributes to one global batch: an entry of the ledger.

    Attributes:
        epoch: from 0 up.
        number: the global batch's number within its epoch, from 0 up.
        indices: the dataset indices that count as this rank's; empty where its batch is padding.
        local_samples: how many those are.
        global_samples: size of the global batch (smaller than usual for the last of an epoch).
    """

    epoch: int
    number: int
    indices: tuple[int, ...]
    local_samples: int
    global_samples: int

    @property
    def weight(self) -> float:
        """Local over global samples; the weights of all ranks sum to 1."""
        return self.local_samples / self.global_samples


@dataclass(frozen=True)
class Share:
    """What one rank loads of one global batch.

    Attributes:
        load: dataset indices to load; never empty, because every rank must take part in the step's collectives. A rank
            without samples of its own loads a copy of rank 0's.
        counted: what of it counts.
    """

    load: tuple[int, ...]
    counted: BatchShare

    @property
    def is_padding(self) -> bool:
        """True if nothing of `load` counts."""
        return self.counted.local_samples == 0

    @property
    def weight(self) -> float:
        """Local over global samples; 0 for padding."""
        return self.counted.weight


def share_bounds(samples: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return where this rank's contiguous share of a global batch starts and stops.

    Sizes differ by at most one and low ranks get the larger ones: 64 samples over 3 ranks are 22, 21 and 21. Pure.
    """
    each, larger = divmod(samples, world_size)
    start = rank * each + min(rank, larger)
    return start, start + each + (1 if rank < larger else 0)


def _to_load(batch: torch.Tensor, rank: int, world_size: int) -> list[int]:
    """This rank's share of a global batch; where there are fewer samples than ranks, the last ranks copy rank 0's."""
    start, stop = share_bounds(len(batch), rank if rank < len(batch) else 0, world_size)
    indices: list[int] = batch[start:stop].tolist()
    return indices


class ElasticBatchSampler(Sampler[list[int]]):
    """Cuts epochs into global batches, hands out this rank's shares, and remembers what was committed.

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

    Raises:
        ValueError: a size is not positive, or with `drop_last` no batch is left.
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
    ) -> None:
        super().__init__()
        self.dataset_size = dataset_size if isinstance(dataset_size, int) else len(dataset_size)
        self.global_batch_size = global_batch_size
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
                f"global_batch_size={global_batch_size}"
            )
        self._rank, self._world_size = 0, 1
        self._committed = (0, 0)  # (epoch, number) of the first global batch that is not committed
        self._next = (0, 0)  # the same for the first one that is not consumed
        self._pending: tuple[BatchShare, ...] = ()
        self._orders: dict[int, torch.Tensor] = {}

    # Where we are

    @property
    def epoch(self) -> int:
        """The epoch of the next uncommitted batch; equals `epochs` when the run is finished."""
        return self._committed[0]

    @property
    def cursor(self) -> int:
        """Committed samples of the present epoch, over all ranks; a multiple of `global_batch_size`."""
        return self._committed[1] * self.global_batch_size

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and number of the batch that the next `consume` returns: behind the pending ones."""
        return self._next

    @property
    def rank(self) -> int:
        """This rank, as last set by `set_world`."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks, as last set by `set_world`."""
        return self._world_size

    @property
    def finished(self) -> bool:
        """True when all epochs are committed."""
        return self.epoch >= self.epochs

    @property
    def pending(self) -> tuple[BatchShare, ...]:
        """What was consumed since the last commit, in order."""
        return self._pending

    @property
    def weight(self) -> float:
        """This step's share of the gradient: pending local over pending global samples (1/world_size when none).

        The gradient of the mean loss over the global batch is the sum over ranks of weight x gradient of the local
        mean loss; DDP, which averages, needs the local one multiplied by weight x world_size.
        """
        if not self._pending:
            return 1.0 / self._world_size
        return sum(share.local_samples for share in self._pending) / sum(
            share.global_samples for share in self._pending
        )

    def __len__(self) -> int:
        """Uncommitted global batches of the present epoch."""
        return 0 if self.finished else self.batches_per_epoch - self._committed[1]

    # What there is to load

    def set_world(self, rank: int, world_size: int) -> None:
        """Take a place in a (new) world. What was consumed and not committed is forgotten, as by `rollback`.

        Args:
            rank: 0 to world_size - 1.
            world_size: number of ranks that share each global batch.

        Raises:
            ValueError: `rank` is not in that range.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in a world of {world_size}: ranks go from 0 to world_size - 1")
        self.rollback()
        self._rank, self._world_size = rank, world_size

    def shares(self, batch_number: int) -> Share:
        """Return what this rank loads of one global batch of the present epoch.

        Args:
            batch_number: 0 to batches_per_epoch - 1.

        Raises:
            ValueError: there is no such batch.
        """
        if not 0 <= batch_number < self.batches_per_epoch:
            raise ValueError(f"batch {batch_number} does not exist: an epoch has {self.batches_per_epoch} batches")
        return self._share(self.epoch, batch_number)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield what this rank loads, batch by batch, from the committed cursor to the end of the present epoch.

        The position and the world are those of this call; a running iterator does not notice later changes.
        """
        end = (min(self.epoch + 1, self.epochs), 0)
        return self._batches(self._committed, end, self._rank, self._world_size)

    def upcoming(self) -> Iterator[list[int]]:
        """Like iterating, but from `position` (behind the pending batches) and on to the end of the last epoch."""
        return self._batches(self._next, (self.epochs, 0), self._rank, self._world_size)

    def _batches(self, start: tuple[int, int], end: tuple[int, int], rank: int, world_size: int) -> Iterator[list[int]]:
        at = start
        while at < end:
            epoch, first = at
            order = self._order(epoch)  # held over the epoch, even when the cache has moved on
            for number in range(first, self.batches_per_epoch):
                yield _to_load(self._cut(order, number), rank, world_size)
            at = (epoch + 1, 0)

    def _share(self, epoch: int, number: int) -> Share:
        batch = self._cut(self._order(epoch), number)
        load = tuple(_to_load(batch, self._rank, self._world_size))
        own = load if self._rank < len(batch) else ()
        return Share(load, BatchShare(epoch, number, own, len(own), len(batch)))

    def _cut(self, order: torch.Tensor, number: int) -> torch.Tensor:
        return order[number * self.global_batch_size : (number + 1) * self.global_batch_size]

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
        """
        epoch, number = self._next
        if epoch >= self.epochs:
            raise StopIteration
        counted = self._share(epoch, number).counted
        self._pending += (counted,)
        self._next = (epoch, number + 1) if number + 1 < self.batches_per_epoch else (epoch + 1, 0)
        return counted

    def commit(self) -> None:
        """The step succeeded: move the cursor past all that was consumed, over the ends of epochs as needed."""
        self._committed = self._next
        self._pending = ()

    def rollback(self) -> None:
        """The step failed: forget what was consumed since the last commit, so that it is drawn again."""
        self._next = self._committed
        self._pending = ()

    def state_dict(self) -> dict[str, int]:
        """Return the committed position and what it depends on, as plain integers; nothing of a running step."""
        return {"epoch": self.epoch, "cursor": self.cursor, **self._identity()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
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
            raise ValueError(f"not the state of an ElasticBatchSampler: {', '.join(missing)} missing")
        for name, mine in expected.items():
            if int(state[name]) != mine:
                raise ValueError(
                    f"{name} is {mine} here but {int(state[name])} in the saved state, so its position means other "
                    f"samples: construct the sampler with the saved {name}, or start a new run"
                )
        epoch, cursor = int(state["epoch"]), int(state["cursor"])
        number, rest = divmod(cursor, self.global_batch_size)
        if epoch < 0 or rest or not 0 <= number < self.batches_per_epoch:
            raise ValueError(f"epoch {epoch} with cursor {cursor} is not the start of a global batch: damaged state?")
        self._committed = (epoch, number)
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
