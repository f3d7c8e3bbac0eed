"""Batches for train steps from a stream: data without an index, each sample once at any world size.

The stream is a fixed number of logical shards, each read by an iterator of its own. A batch takes the same number of
samples from each shard that has any left, whoever reads it, so the batches do not depend on the world size. Each rank
reads a contiguous range of the shards and publishes their places (see `stream_exchange`); when the group
changes, shards move, and who opens one goes on behind the last sample that counted.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate

from torchelastic.data.placing import say_if_all_load_all
from torchelastic.data.sample_randomness import sample_seed
from torchelastic.data.shares import (
    PADDING_SAMPLES,
    CollatedShards,
    RankBatches,
    SecondDeal,
    joined_parts,
    require_rank,
    units_of_rank,
)
from torchelastic.data.sources.api import Source, made, of_epoch
from torchelastic.data.stream_exchange import StreamExchange
from torchelastic.data.stream_progress import ShardPlace, StreamProgress, samples_between
from torchelastic.data.stream_reading import Drawn, RankStreamReader, StreamReader
from torchelastic.inventory.reachable_generators import ReachableGenerators
from torchelastic.observe.ledger.meter import this_worker

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StreamShare:
    """What one rank contributes to one global batch of a stream.

    Attributes:
        epoch: from 0 up.
        number: the global batch's number within its epoch, from 0 up.
        pieces: what counts as this rank's, in order: logical shard, number of its first sample in the shard's epoch,
            number of samples; empty where its batch is padding.
        global_samples: how many samples the step counts over all ranks.
        carried: pieces whose gradients this rank brings along from a failed attempt at the same step.
    """

    epoch: int
    number: int
    pieces: tuple[tuple[int, int, int], ...]
    global_samples: int
    carried: tuple[tuple[int, int, int], ...] = ()

    @property
    def local_samples(self) -> int:
        """How many samples count as this rank's."""
        return sum(samples for _, _, samples in self.pieces)

    @property
    def weight(self) -> float:
        """Local over global samples; with those that are carried, the weights of all ranks sum to 1."""
        return self.local_samples / self.global_samples


class ElasticStream(RankBatches[StreamShare], Iterator[Any]):
    """Loader and sampler of a stream: `next(stream)` is this rank's share of the next global batch.

    Give it to `ModelState(..., sampler=stream)` and draw from it in the step. Drawing moves nothing for good: `commit`
    does, so that a step that failed is drawn again. Each sample of an epoch is trained once, whatever workers are lost
    or come, and after a stop at another world size. With `ModelState(logical_shards=)` of the same number, losses and
    weights have the same bits at any world size.

    Near the end of an epoch, when some shards are over, batches have fewer samples, and a rank may have none: it gets
    a copy of up to two of another rank's samples, with weight 0, so that a step needs no special case.

    Every rank has its own, made with the same arguments, and uses it on its training thread. All ranks draw equally
    often: each draw is a collective of the default process group.

    Args:
        make_iterator: `make_iterator(shard, num_shards, position)` opens a logical shard at a position: 0 for the
            beginning of an epoch; else what its iterator's `state_dict()` returned (plain values that JSON holds, the
            place behind the newest sample) or, without that method, the number of samples that were drawn. It must
            give the same samples in the same order each time, in any process. Where it has a method
            `for_epoch(epoch)`, that returns what opens the shards in this epoch. See `torchelastic.data.Source`.
        logical_shards: how many there are, the same for the whole run, at least as many as ranks.
        global_batch_size: samples of a batch over all ranks; `logical_shards` divides it.
        epochs: how often the shards are gone through; None: without an end.
        seed: of the random numbers of a step with `ModelState(logical_shards=)`, and of those that the source draws.
        num_workers: worker processes of each rank that read ahead, among which its shards are divided.
        prefetch_batches: how many batches of their shards they read ahead; handed over are half as many at once.
        collate_fn: makes a batch of a list of samples, on the training thread; with `ModelState(logical_shards=)` of
            those of each shard by itself. Default: torch's `default_collate`, which worker processes then run too.
        multiprocessing_context: how worker processes are started, as for DataLoader.
        min_local_batch: as for `ElasticBatchSampler`. Near the end of an epoch, where a rank's shards give too few,
            another rank reads them for that batch.

    Raises:
        ValueError: numbers that do not go together, or `make_iterator` cannot be called.
    """

    def __init__(
        self,
        make_iterator: Source[Any],
        logical_shards: int,
        *,
        global_batch_size: int,
        epochs: int | None = 1,
        seed: int = 0,
        num_workers: int = 0,
        prefetch_batches: int = 8,
        collate_fn: Any = None,
        multiprocessing_context: str | None = None,
        min_local_batch: int | None = None,
    ) -> None:
        super().__init__(global_batch_size, min_local_batch)
        if not callable(make_iterator):
            raise ValueError(
                f"a {type(make_iterator).__name__} is no source: give a function of (shard, num_shards, position), or "
                "one of torchelastic.data, such as lines(files), from_datasets(dataset) or from_stateful(make_loader)"
            )
        _check(logical_shards, global_batch_size, epochs, num_workers, prefetch_batches)
        self.logical_shards = logical_shards
        self._is_cut_in_shards = False  # each shard goes through the model by itself
        self.epochs = epochs
        self.seed = seed
        self._make_iterator = make_iterator
        self._collate = default_collate if collate_fn is None else collate_fn
        self._collates_in_workers = collate_fn is None and num_workers > 0
        reader = StreamReader(
            make_iterator,
            logical_shards,
            global_batch_size // logical_shards,
            collates=self._collates_in_workers,
            # what is read ahead, the batch of the step, and one more; a collate_fn may hand out the samples themselves
            keeps=0 if collate_fn is not None else 2 + (2 * prefetch_batches if num_workers else 0),
            seed=seed,
        )
        self._reading = RankStreamReader(reader, num_workers, prefetch_batches, multiprocessing_context)
        self._exchange = StreamExchange()
        self._progress = self._next = StreamProgress.start(0, logical_shards)
        # the places behind the first batch after `_progress`, since it was first drawn: also when that step has failed
        self._attempt: tuple[ShardPlace, ...] | None = None
        self._padding: list[Any] = []

    @property
    def global_batch_size(self) -> int:
        """Samples of a batch over all ranks. It cannot be changed in a run, whose batches are read ahead."""
        return self._global_batch_size

    # Where we are

    @property
    def epoch(self) -> int:
        """The epoch of the next uncommitted batch; equals `epochs` when the run is finished."""
        return self._progress.epoch

    @property
    def number(self) -> int:
        """Committed batches of the present epoch."""
        return self._progress.number

    @property
    def finished(self) -> bool:
        """True when all epochs are committed."""
        return self.epochs is not None and self.epoch >= self.epochs

    @property
    def units(self) -> int:
        """Into how many units a global batch is cut: the logical shards."""
        return self.logical_shards

    @property
    def present_units(self) -> tuple[int, ...]:
        """The logical shards that have samples in the next uncommitted batch."""
        if not self._pending or self._attempt is None:
            return () if self.finished else self._progress.present
        counts = samples_between(self._progress.places, self._attempt)
        return tuple(shard for shard, samples in enumerate(counts) if samples)

    def pending_units(self) -> tuple[tuple[int, int], ...]:
        """The shards of the one batch that is pending, with their numbers of samples, in the order of the batch."""
        (share,) = self._pending
        return tuple((shard, samples) for shard, _, samples in share.pieces)

    # What there is to read

    def set_world(self, rank: int, world_size: int) -> None:
        """Take a place in a (new) world; called on every rank of it. What was drawn and not committed is forgotten.

        Args:
            rank: 0 to world_size - 1.
            world_size: number of ranks that share each global batch: those of the default process group.

        Raises:
            ValueError: `rank` is not in that range, the process group has another size, or, at the start of a run,
                there are more ranks than logical shards. (Those that come later have nothing to read.)
        """
        require_rank(rank, world_size)
        if world_size > self.logical_shards:
            few = (
                f"{world_size} ranks share {self.logical_shards} logical shards, so some have nothing to read: start a "
                "run with at least as many logical_shards as there will ever be ranks, and some more to divide evenly"
            )
            if self._progress == StreamProgress.start(0, self.logical_shards):
                raise ValueError(few)
            log.warning("%s", few)
        self._exchange.enter(world_size)
        self._reassignment = None
        self.rollback()
        self._rank, self._world_size, self._has_place = rank, world_size, True
        self._say_if_ranks_are_idle()

    @property
    def least_units(self) -> int:
        """How many shards a rank reads at least, if any; some may be over."""
        each = self._global_batch_size // self.logical_shards
        return 1 if self._is_cut_in_shards else -(-self._min_local_batch // each)

    def set_logical_shards(self, shards: int) -> None:
        """Called by `ModelState(logical_shards=)`. Raises ValueError where that is not the number of this stream."""
        if shards != self.logical_shards:
            raise ValueError(
                f"ModelState has logical_shards={shards}, its ElasticStream {self.logical_shards}: give both the same"
            )
        self._is_cut_in_shards = True

    def __iter__(self) -> ElasticStream:
        return self

    def __next__(self) -> Any:
        progress = self._next
        if self.epochs is not None and progress.epoch >= self.epochs:
            self.close()
            self._raise_end()
        say_if_all_load_all(self)
        deal = None if self._pending else self._reassignment
        shards: Sequence[int] = self._shards_of(self._rank) if deal is None else deal.compute
        drawn = self._read(progress, shards)
        reported = dict(drawn.places)
        carried = () if deal is None else deal.carried
        if carried:
            assert self._attempt is not None, "a rank that brings gradients has drawn the batch"
            reported |= {shard: self._attempt[shard] for shard in carried}
        absent: Collection[int] = ()
        if deal is not None:  # nobody reads what is postponed, or what was over before
            absent = {shard for shard, place in enumerate(progress.places) if place.ended or shard in deal.postponed}
        places = self._exchange.places(progress.number, progress.places, reported, absent)
        computed = self._computed(shards, deal, samples_between(progress.places, places))
        if computed != tuple(shards):
            drawn = self._read(progress, computed) if computed else Drawn([], {})
        share = _share(progress, places, computed, carried)
        if not share.global_samples:
            raise ValueError(
                f"none of the {self.logical_shards} logical shards has a sample in epoch {progress.epoch}: does "
                "its source find its data?"
            )
        batch = self._batch(drawn, share) if share.pieces else self._padding_batch(progress, places)
        if not self._pending:
            self._attempt = places
        self._count(share)
        self._next = progress.advanced(places)
        return self.handed_out(batch)

    def _shards_of(self, rank: int) -> range:
        return units_of_rank(self.logical_shards, rank, self._world_size, self.least_units)

    def _computed(self, mine: Sequence[int], deal: SecondDeal | None, samples: Sequence[int]) -> tuple[int, ...]:
        """The shards that this rank trains of a batch: those that it has read, unless any rank has too few samples."""
        if self._is_cut_in_shards or self._min_local_batch == 1:
            return tuple(mine)
        parts = [self._shards_of(rank) for rank in range(self._world_size)] if deal is None else deal.everyones
        if not parts:
            return tuple(mine)
        wanted = joined_parts(parts, samples, self._min_local_batch)[self._rank]
        return tuple(mine) if wanted == tuple(shard for shard in mine if samples[shard]) else wanted

    def _read(self, progress: StreamProgress, shards: Sequence[int]) -> Drawn:
        began_ns = time.monotonic_ns()
        drawn = self._reading.draw(progress.epoch, {shard: progress.places[shard] for shard in shards})
        this_worker().waited_for_data(time.monotonic_ns() - began_ns)
        return drawn

    def _batch(self, drawn: Drawn, share: StreamShare) -> Any:
        if self._collates_in_workers:
            return drawn.samples
        if self._collate is default_collate:
            return made(self._collate, drawn.samples)
        if not self._is_cut_in_shards:
            return self._collated(drawn.samples, share.epoch, share.pieces[0])
        samples = iter(drawn.samples)
        parts = [(list(itertools.islice(samples, size)), (shard, first, size)) for shard, first, size in share.pieces]
        return CollatedShards([self._collated(part, share.epoch, piece) for part, piece in parts])

    def _collated(self, samples: list[Any], epoch: int, piece: tuple[int, int, int]) -> Any:
        """By the user's function; what it draws is the same each time, and what the step draws as if it had not."""
        shard, first, _ = piece
        reached = ReachableGenerators(self._collate)
        of_step = reached.state()
        try:
            reached.seed(sample_seed(self.seed, epoch, (shard, first), "batch"))
            return made(self._collate, samples)
        finally:
            reached.put(of_step)

    def _padding_batch(self, progress: StreamProgress, places: tuple[ShardPlace, ...]) -> Any:
        """The first samples of a shard that has some: any rank can open any shard."""
        if not self._padding:
            shard = next(s for s, samples in enumerate(samples_between(progress.places, places)) if samples)
            samples = of_epoch(self._make_iterator, progress.epoch)(shard, self.logical_shards, 0)
            self._padding = [sample for sample, _ in zip(samples, range(PADDING_SAMPLES), strict=False)]
            self._padding += self._padding[: max(0, self._min_local_batch - len(self._padding))]
        return made(self._collate, list(self._padding))

    # What happened

    def commit(self) -> None:
        """The step succeeded: move past all that was drawn. Raises NonRetryableException: on another thread."""
        self._require_drawn_here()
        if self._pending:
            self._progress, self._attempt, self._reassignment = self._next, None, None
        self._step_is_over(committed=True)

    def rollback(self) -> None:
        """The step failed: forget what was drawn since the last commit, so that it is drawn again."""
        self._next = self._progress
        self._step_is_over(committed=False)

    def state_dict(self) -> dict[str, int | str]:
        """The committed place of all logical shards, as plain values; the same on every rank."""
        return self._progress.to_state()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to a saved place, whatever the world was there. What was drawn and not committed is forgotten.

        Args:
            state: from `state_dict` of a stream of the same shards; `global_batch_size` and `epochs` may differ.

        Raises:
            ValueError: it is something else, damaged, or of another number of shards. Nothing was changed then.
        """
        progress = StreamProgress.from_state(state, self.logical_shards)
        if progress != self._progress:
            self._progress, self._attempt = progress, None
        self._reassignment = None
        self.rollback()

    def close(self) -> None:
        """Drop what was read ahead and let the worker processes end. A later `next` starts them anew."""
        self._reading.close()


def _share(
    progress: StreamProgress, places: tuple[ShardPlace, ...], shards: tuple[int, ...], carried: tuple[int, ...]
) -> StreamShare:
    counts = samples_between(progress.places, places)

    def pieces(of: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
        return tuple((shard, progress.places[shard].drawn, counts[shard]) for shard in of if counts[shard])

    return StreamShare(progress.epoch, progress.number, pieces(shards), sum(counts), pieces(carried))


def _check(
    logical_shards: int, global_batch_size: int, epochs: int | None, num_workers: int, prefetch_batches: int
) -> None:
    if logical_shards < 1 or global_batch_size < 1 or (epochs is not None and epochs < 0):
        raise ValueError(
            f"logical_shards and global_batch_size start at 1 and epochs at 0, got "
            f"logical_shards={logical_shards}, global_batch_size={global_batch_size}, epochs={epochs}"
        )
    if global_batch_size % logical_shards:
        raise ValueError(
            f"global_batch_size={global_batch_size} must be a multiple of logical_shards={logical_shards}: a batch "
            "takes the same number of samples from each shard"
        )
    if num_workers < 0 or prefetch_batches < 1:
        raise ValueError(
            f"num_workers starts at 0 and prefetch_batches at 1, got num_workers={num_workers}, "
            f"prefetch_batches={prefetch_batches}"
        )
