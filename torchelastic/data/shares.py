"""How a global batch is cut: into the ranks' shares, or into a fixed number of logical shards. Pure.

And who computes what of a step in which a worker was lost, in three modes (docs/salvage.md):

* discard: every rank undoes the step, and the group that follows repeats it whole.
* drop: what the survivors have computed counts, the rest of the global batch is trained later in the epoch.
* recompute: what the survivors have computed counts, and all members of the new group compute the rest together.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from torchelastic.errors import NonRetryableException

log = logging.getLogger(__name__)

#: How many samples a rank without any of its own loads while a step is salvaged: two, because a batch of one has no
#: variance, which layers like BatchNorm1d refuse.
PADDING_SAMPLES = 2

MODES = ("discard", "drop", "recompute")

#: So many steps in a row that were told of the end of the data, drew nothing and succeeded, are no accident.
STEPS_PAST_THE_END = 2


@dataclass(frozen=True)
class BatchShare:
    """What one rank contributes to one global batch: an entry of the ledger.

    Attributes:
        epoch: from 0 up.
        number: the global batch's number within its epoch, from 0 up.
        indices: the dataset indices that count as this rank's; empty where its batch is padding.
        local_samples: how many those are.
        global_samples: how many samples the step counts over all ranks (fewer than usual for the last batch of an
            epoch, and where those of a lost rank are left for later).
        carried: indices whose gradients this rank brings along from a failed attempt at the same step.
    """

    epoch: int
    number: int
    indices: tuple[int, ...]
    local_samples: int
    global_samples: int
    carried: tuple[int, ...] = ()

    @property
    def weight(self) -> float:
        """Local over global samples; with those that are carried, the weights of all ranks sum to 1."""
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


@dataclass(frozen=True)
class SecondDeal:
    """How one rank takes part in a step whose first attempt failed, while a part of its gradients is kept.

    A unit is one sample's place in the global batch or, with logical shards, one of those.

    Attributes:
        compute: units to compute now.
        carried: units whose gradients this rank has kept.
        postponed: units that count later in the epoch; equal on all ranks.
        everyones: by rank, what it computes; equal on all ranks; empty where nobody computes anything.
    """

    compute: tuple[int, ...] = ()
    carried: tuple[int, ...] = ()
    postponed: tuple[int, ...] = ()
    everyones: tuple[tuple[int, ...], ...] = ()


class SampleCounts(Protocol):
    """What one rank contributes to one global batch, as far as weights are concerned: a `BatchShare`, for example."""

    @property
    def local_samples(self) -> int: ...  # noqa: D102 - of this rank

    @property
    def global_samples(self) -> int: ...  # noqa: D102 - of all ranks


ShareT = TypeVar("ShareT", bound=SampleCounts)


class CollatedShards(list[Any]):
    """A rank's share of a global batch, each of its logical shards collated by itself, in their order.

    What a `collate_fn` pads, or draws at random, depends on which samples it gets.
    """


class RankBatches(Generic[ShareT]):
    """What samplers and streams have in common: this rank's place in the world, and what it has drawn in this step."""

    def __init__(self, global_batch_size: int, min_local_batch: int | None) -> None:
        super().__init__()
        if min_local_batch is not None and not 1 <= min_local_batch <= global_batch_size:
            raise ValueError(
                f"min_local_batch={min_local_batch} must lie between 1 and global_batch_size={global_batch_size}: a "
                "rank that trains has so many samples"
            )
        self._global_batch_size = global_batch_size
        self._min_local_batch, self._is_minimum_chosen = min_local_batch or 1, min_local_batch is not None
        self._rank, self._world_size = 0, 1
        #: `set_world` was called
        self._has_place = False
        self._pending: tuple[ShareT, ...] = ()
        self._drawn_on: int | None = None  # the thread that has drawn last
        self._reassignment: SecondDeal | None = None
        self._deals = 0
        self._has_told_end, self._steps_past_end = False, 0
        #: gives what the step gets for a batch that was drawn; see `handed_out`
        self.on_batch: Callable[[Any], Any] | None = None

    def handed_out(self, batch: Any) -> Any:
        """What a loader hands out: the batch that it has drawn, or what a check of computations wants in its place."""
        return batch if self.on_batch is None else self.on_batch(batch)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "on_batch": None}  # of this process's state

    @property
    def rank(self) -> int:
        """This rank, as last set by `set_world`."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks, as last set by `set_world`."""
        return self._world_size

    @property
    def min_local_batch(self) -> int:
        """How many samples of a global batch a rank has at least, or none: its batch is padding then."""
        return self._min_local_batch

    def set_min_local_batch(self, samples: int) -> None:
        """Called by `ModelState` and `ShardedState` before `set_world`, with what the model needs.

        Every rank of a group has the same. What the constructor was given counts more.
        """
        if not self._is_minimum_chosen:
            self._min_local_batch = min(samples, self._global_batch_size)

    @property
    def least_units(self) -> int:
        """How many units a rank computes at least, if any, so that it has `min_local_batch` samples."""
        return self._min_local_batch

    @property
    def smallest_batch(self) -> int:
        """Samples of the smallest global batch, as far as is known."""
        return self._global_batch_size

    def _say_if_ranks_are_idle(self) -> None:
        """Said by rank 0, where in every batch some ranks have nothing to train."""
        sharing = max(1, self._global_batch_size // self._min_local_batch)
        if sharing < self._world_size and self._min_local_batch > 1 and self._rank == 0:
            log.warning(
                "%d of %d ranks have no part of any global batch: of its %d samples each rank that trains has at least "
                "%d (min_local_batch; a BatchNorm needs two): choose a larger global_batch_size",
                self._world_size - sharing, self._world_size, self._global_batch_size, self._min_local_batch,
            )  # fmt: skip

    @property
    def pending(self) -> tuple[ShareT, ...]:
        """What was drawn since the last commit, in order."""
        return self._pending

    @property
    def weight(self) -> float:
        """This rank's share of the step's gradient: local over global samples of all that it has drawn.

        1/world_size when that is nothing. The gradient of the mean loss over the global batch is the sum over ranks of
        weight x gradient of the local mean loss; DDP, which averages, needs the local one multiplied by weight x
        world_size.
        """
        if not self._pending:
            return 1.0 / self._world_size
        return sum(share.local_samples for share in self._pending) / sum(s.global_samples for s in self._pending)

    @property
    def _has_drawn(self) -> bool:
        return self._drawn_on is not None

    def _require_drawn_here(self) -> None:
        """Raise NonRetryableException if what is pending was drawn on another thread, and so ahead of the step."""
        if self._pending and self._drawn_on != threading.get_ident():
            raise NonRetryableException(
                "next() of the loader or stream was called on another thread than the training's: what is drawn ahead "
                "of a step is counted with it, and lost or trained twice when a step fails; call next() in the step, "
                "and let the loader read ahead: num_workers=2"
            )

    def _count(self, share: ShareT) -> None:
        """A batch was drawn in this step."""
        self._pending += (share,)
        self._drawn_on = threading.get_ident()

    def _raise_end(self) -> NoReturn:
        """Raise StopIteration: the last epoch is over. Raises NonRetryableException: the train steps swallow that."""
        if self._steps_past_end >= STEPS_PAST_THE_END:
            raise NonRetryableException(
                f"the last epoch is over, and the last {self._steps_past_end} train steps had no batch and went on, so "
                "the run would never end: `for batch in loader` inside a train step takes all batches and swallows the "
                "StopIteration that ends the run; write `batch = next(loader)`"
            )
        self._has_told_end = True
        raise StopIteration

    def _step_is_over(self, *, committed: bool) -> None:
        """Forget what was drawn."""
        if committed:
            self._steps_past_end = self._steps_past_end + 1 if self._has_told_end and not self._pending else 0
        self._has_told_end, self._pending = False, ()

    @property
    def deals(self) -> int:
        """How often a batch was assigned again; after a change prefetched batches are no longer valid."""
        return self._deals

    def deal_again(self, deal: SecondDeal) -> None:
        """Assign the next uncommitted batch a second time, after an attempt at it has failed in another group.

        Every rank of the new group calls it, after `set_world`, with what is for it. It holds until that batch is
        committed, or until the next `set_world`. What is postponed comes later in the epoch.

        Args:
            deal: what this rank computes and what it has kept.
        """
        self._reassignment = deal
        self._deals += 1


def require_rank(rank: int, world_size: int) -> None:
    """Raises ValueError if a world of this size has no such rank."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a world of {world_size}: ranks go from 0 to world_size - 1")


def share_bounds(samples: int, rank: int, world_size: int, at_least: int = 1) -> tuple[int, int]:
    """Return where this rank's contiguous share of a global batch starts and stops.

    Sizes differ by at most one and low ranks get the larger ones: 64 samples over 3 ranks are 22, 21 and 21. Where
    these would be fewer than `at_least`, high ranks get none. Pure.

    >>> [share_bounds(5, rank, 3, at_least=2) for rank in range(3)]
    [(0, 3), (3, 5), (5, 5)]
    """
    sharing = min(world_size, max(1, samples // at_least))
    if rank >= sharing:
        return samples, samples
    each, larger = divmod(samples, sharing)
    start = rank * each + min(rank, larger)
    return start, start + each + (1 if rank < larger else 0)


def units_of_rank(units: int, rank: int, world_size: int, at_least: int = 1) -> range:
    """The units that a rank computes in a first attempt: a contiguous range, of at least so many or none.

    >>> [list(units_of_rank(8, rank, 3)) for rank in range(3)]
    [[0, 1, 2], [3, 4, 5], [6, 7]]
    """
    return range(*share_bounds(units, rank, world_size, at_least))


def places_of_unit(samples: int, unit: int, logical_shards: int | None, at_least: int = 1) -> range:
    """The places in a global batch of `samples` of one unit; none where the batch is too short for it.

    A logical shard has at least so many, or none.

    >>> list(places_of_unit(10, 3, logical_shards=4))
    [8, 9]
    >>> list(places_of_unit(10, 3, logical_shards=None))
    [3]
    """
    if logical_shards is not None:
        return range(*share_bounds(samples, unit, logical_shards, at_least))
    return range(unit, min(unit + 1, samples))


def places_of_units(samples: int, units: Iterable[int], logical_shards: int | None, at_least: int = 1) -> list[int]:
    """The places of several units, in the order of the units."""
    return [place for unit in units for place in places_of_unit(samples, unit, logical_shards, at_least)]


def pick(indices: tuple[int, ...], places: Sequence[int]) -> tuple[int, ...]:
    """The dataset indices at these places of a global batch."""
    if isinstance(places, range):  # the case of every undisturbed step
        return indices[places.start : places.stop]
    return tuple(indices[place] for place in places)


def second_deals(
    kept: Sequence[Collection[int]], present: Sequence[int], mode: str, at_least: int = 1
) -> tuple[SecondDeal, ...]:
    """Decide for every rank what it computes in the second attempt at a step, and whose gradients count.

    No unit counts twice: of two ranks that have kept the same one (from attempts in different groups), who has kept
    more counts, then the lower rank; the other one's are thrown away as a whole, for they are summed up already.

    Args:
        kept: by rank of the new group, the units whose gradients it has; empty for a newcomer.
        present: all units of the step.
        mode: "drop" or "recompute".
        at_least: how many units a rank computes, if any.

    Returns:
        One deal for each rank; nothing where no rank has kept anything, so that the step is simply repeated.

    >>> for deal in second_deals([{0, 1}, {4, 5}], range(6), "recompute"):
    ...     print(deal.carried, deal.compute)
    (0, 1) (2,)
    (4, 5) (3,)
    """
    carried: list[tuple[int, ...]] = [()] * len(kept)
    taken: set[int] = set()
    for rank in sorted(range(len(kept)), key=lambda rank: (-len(kept[rank]), rank)):
        if kept[rank] and taken.isdisjoint(kept[rank]):
            carried[rank] = tuple(sorted(kept[rank]))
            taken.update(kept[rank])
    if not taken:
        return ()
    rest = tuple(unit for unit in present if unit not in taken)
    if mode == "drop":
        return tuple(SecondDeal(carried=units, postponed=rest) for units in carried)
    parts = [rest[slice(*share_bounds(len(rest), rank, len(kept), at_least))] for rank in range(len(kept))]
    return tuple(
        SecondDeal(compute=part, carried=units, everyones=tuple(parts))
        for part, units in zip(parts, carried, strict=True)
    )


def joined_parts(parts: Sequence[Sequence[int]], samples: Sequence[int], at_least: int) -> tuple[tuple[int, ...], ...]:
    """Units that the ranks have read, dealt out anew where a rank would have fewer samples than it needs. Pure.

    Args:
        parts: by rank, the units that are its own, in order.
        samples: by unit, what it has given.
        at_least: how many samples a rank computes, if any.

    Returns:
        By rank, units with samples; those of ranks that have too few go to the next rank that has some, or to the last.

    >>> joined_parts([[0], [1], [2, 3]], [1, 1, 1, 0], at_least=2)
    ((), (0, 1, 2), ())
    >>> joined_parts([[0], [1], [2, 3]], [2, 3, 1, 2], at_least=2)
    ((0,), (1,), (2, 3))
    """
    found: list[tuple[int, ...]] = []
    waiting: tuple[int, ...] = ()
    last = 0
    for rank, part in enumerate(parts):
        mine = waiting + tuple(unit for unit in part if samples[unit])
        is_enough = sum(samples[unit] for unit in mine) >= at_least
        found.append(mine if is_enough else ())
        waiting, last = ((), rank) if is_enough else (mine, last)
    if waiting:
        found[last] += waiting
    return tuple(found)
