"""Reads the logical shards that a rank holds, in this process or in worker processes that read ahead.

Both ways run the same `StreamReader`: a worker process has one for its part of the shards. A reader begins at a given
place, and then returns one batch's samples of all its shards for each request. torch's DataLoader starts the processes,
prefetches, and returns their batches in order.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from torchelastic.data.sample_randomness import sample_seed
from torchelastic.data.shares import units_of_rank
from torchelastic.data.sources.api import Source, of_epoch
from torchelastic.data.stream_progress import NO_DIGEST, ShardPlace, position_text
from torchelastic.data.worker_processes import WorkerProcesses, begin_data_worker, hand_over_by_value, joined
from torchelastic.inventory.generators import Generators, generators
from torchelastic.inventory.reachable_generators import ReachableGenerators
from torchelastic.text import shortlist

#: A shard's position is taken anew after so many batches: what is drawn again, at most, when the shard moves. Positions
#: of some iterators are large, or cost time, so they are not taken for each batch; but behind the first one, for 0 does
#: not say which files there were.
POSITION_EVERY = 8
#: Others go byte by byte: numpy does not know them.
_OF_NUMPY = frozenset(
    (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64, torch.bool)
)


class Drawn(NamedTuple):
    """What some shards give to one batch.

    Attributes:
        samples: a list, in the order of the shards; or already made one batch by torch's `default_collate`, None for no
            samples.
        places: the places of the shards behind them.
    """

    samples: Any
    places: dict[int, ShardPlace]


class _Draw(NamedTuple):
    """What one shard gives to one batch, and the place behind it."""

    samples: list[Any]
    place: ShardPlace


class _OpenShard:
    """The iterator of one shard, at a place in it; one sample ahead, so that the end is known with the last sample.

    Args:
        make_iterator: for the epoch.
        shard: which one.
        num_shards: of how many.
        place: where to begin.
        keeps: how many batches back it can go.
        seed: called before each sample with its number in the shard; None: it draws nothing at random.
    """

    def __init__(
        self,
        make_iterator: Source[Any],
        shard: int,
        num_shards: int,
        place: ShardPlace,
        keeps: int,
        seed: Callable[[int], None] | None,
    ) -> None:
        self._shard, self._mark = shard, place
        self._here = place  # behind what was handed out, which may come again; self._mark is behind what was read
        self._kept: deque[tuple[ShardPlace, _Draw]] = deque(maxlen=keeps)
        self._again: deque[_Draw] = deque()
        self._source: Iterator[Any] = iter(())
        self._next: list[Any] = []
        if place.ended:
            return
        if seed is not None:
            seed(place.at)
        self._source = iter(make_iterator(shard, num_shards, json.loads(place.position)))
        self._samples = self._source if seed is None else _seeded(self._source, place.at, seed)
        self._look_ahead()
        digest = self._digest()
        if place.digest == NO_DIGEST:
            self._mark = place._replace(digest=digest, ended=not self._next)
            return
        missing = 1 - len(self._next)
        if not missing and digest != place.digest:
            raise ValueError(
                f"shard {shard} gives another sample behind its position {place.position[:200]} (sample {place.at} of "
                "the epoch) than it did before. make_iterator(shard, num_shards, position) must give the same samples "
                "in the same order each time: seed what is shuffled, sort lists of files, draw at random for a "
                "sample only as it is handed out. Or its data has changed"
            )
        again = place.drawn - place.at
        if not missing and again:
            given = sum(1 for _ in itertools.islice(self._samples, again - 1))
            self._look_ahead()
            missing = again - given - len(self._next)
        if missing:
            raise ValueError(
                f"shard {shard} ends before its position: {place.drawn} samples of it were trained in this epoch and "
                "there was a further one, but the source has no more than that now. Has a file shrunk, or vanished? "
                "Bring it back as it was, or start a new run"
            )

    @property
    def place(self) -> ShardPlace:
        """Behind what was handed out."""
        return self._here

    def go_back(self, to: ShardPlace) -> bool:
        """Have what was handed out behind this place come again.

        Returns:
            Whether that could be done: only so much is kept.
        """
        while self._here != to and self._kept:
            self._here, draw = self._kept.pop()
            self._again.appendleft(draw)
        return self._here == to

    def draw(self, wanted: int) -> _Draw:
        """Up to so many samples, fewer at the end of the shard."""
        draw = self._again.popleft() if self._again else self._read(wanted)
        self._kept.append((self._here, draw))
        self._here = draw.place
        return draw

    def _read(self, wanted: int) -> _Draw:
        position, at, drawn, digest, ended = self._mark
        if ended:
            return _Draw([], self._mark)
        if position != "0" and drawn + wanted - at < POSITION_EVERY * wanted:
            samples = self._next + list(itertools.islice(self._samples, wanted))
            self._next = samples[wanted:]
            del samples[wanted:]
            drawn += len(samples)
        else:  # the new position is the place behind these samples, so it is taken before looking ahead
            samples = self._next + list(itertools.islice(self._samples, wanted - 1))
            drawn += len(samples)
            position, at = self._position(drawn), drawn
            self._look_ahead()
            digest = self._digest()
        self._mark = ShardPlace(position, at, drawn, digest, not self._next)
        return _Draw(samples, self._mark)

    def _look_ahead(self) -> None:
        self._next = list(itertools.islice(self._samples, 1))

    def _digest(self) -> int:
        return fingerprint(self._next[0]) if self._next else NO_DIGEST

    def _position(self, drawn: int) -> str:
        state_dict = getattr(self._source, "state_dict", None)
        if state_dict is None:
            return str(drawn)
        try:
            return position_text(state_dict())
        except (TypeError, ValueError) as error:
            kind = type(self._source).__name__
            raise ValueError(
                f"the position of shard {self._shard} cannot be kept: state_dict() of its {kind} holds {error}; it may "
                "hold numbers, strings, booleans, None, and lists and dicts of them by name"
            ) from error


def _seeded(samples: Iterator[Any], number: int, seed: Callable[[int], None]) -> Iterator[Any]:
    """The samples from this number on, each drawn from a seed of its own."""
    for place in itertools.count(number):
        seed(place)
        try:
            sample = next(samples)
        except StopIteration:
            return
        yield sample


@dataclass(frozen=True)
class _Order:
    """What a reader is asked for: the next batches of its shards; after going to `start` first, if that is given."""

    worker: int
    batches: int = 1
    start: tuple[int, dict[int, ShardPlace]] | None = None


class StreamReader(Dataset[list[Drawn]]):
    """Reads some shards batch by batch; asked by `_Order`s, one after the other.

    What the source draws at random for a sample depends on (seed, epoch, shard, number of the sample) alone, from the
    first order on for which it draws anything: that one is read twice. Where this reads in the trainer, what the train
    step draws is as if nothing had been read.

    Args:
        make_iterator: as of `ElasticStream`.
        num_shards: logical shards of the whole stream.
        samples: of one shard in each batch.
        collates: whether to make one batch of the samples, by torch's `default_collate`.
        keeps: how many batches back a shard can go without being opened anew. 0 where the samples themselves are
            handed out: they may be changed there.
        seed: of the run.
    """

    def __init__(
        self, make_iterator: Source[Any], num_shards: int, samples: int, *, collates: bool, keeps: int, seed: int
    ) -> None:
        self._make_iterator, self._num_shards, self._wanted = make_iterator, num_shards, samples
        self._seed = seed
        self._reached: ReachableGenerators | None = None
        self._draws = False
        self.collates = collates
        self._keeps = keeps
        self._epoch = -1
        self._open: dict[int, _OpenShard] = {}

    def __getitem__(self, order: _Order) -> list[Drawn]:
        if self._reached is None:
            self._reached = ReachableGenerators(self._make_iterator)
            self._draws = self._reached.holds_own
        before = self._reached.state()
        try:
            return self._read(order, before.of_process)
        except BaseException:
            self.forget()  # one of them is in the middle of a batch
            self._reached.put(before)
            raise
        finally:
            if self._draws and get_worker_info() is None:
                self._reached.put(before)

    def _read(self, order: _Order, before: Generators) -> list[Drawn]:
        begin = order.start or (self._epoch, {shard: opened.place for shard, opened in self._open.items()})
        if not self._draws:
            try:
                drawn = self._drawn(order.start, order.batches)
            except Exception:
                if generators().draw_as(before):
                    raise  # else it may have given another sample than before because of what it has drawn
            else:
                if generators().draw_as(before):
                    return drawn
            self._draws = True
            self.forget()
        return self._drawn(begin, order.batches)

    def _drawn(self, start: tuple[int, dict[int, ShardPlace]] | None, batches: int) -> list[Drawn]:
        if start is not None:
            self._go_to(*start)
        return [self._batch() for _ in range(batches)]

    def _batch(self) -> Drawn:
        draws = {shard: opened.draw(self._wanted) for shard, opened in self._open.items()}
        samples: Any = [sample for draw in draws.values() for sample in draw.samples]
        if self.collates:
            samples = default_collate(samples) if samples else None
        return Drawn(samples, {shard: draw.place for shard, draw in draws.items()})

    def forget(self) -> None:
        """Let the iterators go."""
        self._open = {}

    def _go_to(self, epoch: int, places: Mapping[int, ShardPlace]) -> None:
        make = of_epoch(self._make_iterator, epoch)
        before = self._open if epoch == self._epoch else {}
        self._open, self._epoch = {}, epoch
        for shard, place in places.items():
            opened = before.pop(shard, None)
            if opened is None or not opened.go_back(place):
                seed = partial(self._seed_sample, epoch, shard) if self._draws else None
                opened = _OpenShard(make, shard, self._num_shards, place, self._keeps, seed)
            self._open[shard] = opened

    def _seed_sample(self, epoch: int, shard: int, number: int) -> None:
        assert self._reached is not None
        self._reached.seed(sample_seed(self._seed, epoch, (shard, number)))

    def __getstate__(self) -> dict[str, Any]:  # iterators stay in their process
        return {**self.__dict__, "_epoch": -1, "_open": {}, "_reached": None, "_draws": False}


def _as_it_is(drawn: list[Drawn]) -> list[Drawn]:
    return drawn


class _Orders:
    """What the worker processes are asked for, in turn, without an end: DataLoader's view of a stream.

    Several batches at once, since handing something over costs as much as reading some samples; only the first one
    alone, for which the training waits.
    """

    def __init__(self, workers: int, batches: int) -> None:
        self._workers, self._batches = workers, batches
        self.start: tuple[int, dict[int, ShardPlace]] = (0, {})

    def __iter__(self) -> Iterator[_Order]:
        epoch, places = self.start
        shards = list(places)
        for worker in range(self._workers):
            part = units_of_rank(len(shards), worker, self._workers)  # so all their samples are in the shards' order
            yield _Order(worker, 1, (epoch, {shards[unit]: places[shards[unit]] for unit in part}))
        yield from (_Order(worker, self._batches) for worker in itertools.cycle(range(self._workers)))


class RankStreamReader:
    """The reading of one rank. Use it from the training thread.

    Args:
        reader: reads in this process, or a copy of it in each worker process.
        num_workers: worker processes; 0: none.
        prefetch_batches: how many batches they read ahead.
        multiprocessing_context: how they are started: "fork", "spawn", "forkserver"; None: as torch does.
    """

    def __init__(
        self, reader: StreamReader, num_workers: int, prefetch_batches: int, multiprocessing_context: str | None
    ) -> None:
        self._reader, self._num_workers = reader, num_workers
        self._context = multiprocessing_context
        # read ahead are at most two orders of each process
        self._orders = _Orders(max(num_workers, 1), max(1, prefetch_batches // 2) if num_workers else 1)
        self._processes = WorkerProcesses("this stream")
        self._dataloader: DataLoader[list[Drawn]] | None = None
        self._running: Iterator[list[Drawn]] | None = None
        #: Batches that were handed over, each as the parts of all processes.
        self._ahead: deque[Sequence[Drawn]] = deque()
        self._at: tuple[int, dict[int, ShardPlace]] | None = None

    def draw(self, epoch: int, places: Mapping[int, ShardPlace]) -> Drawn:
        """The next batch's samples of these shards, from these places on.

        Args:
            epoch: of the places.
            places: of the shards; reading goes on where they are those behind the batch before.

        Raises:
            ValueError: a shard cannot be read again as it was before, or its position cannot be kept.
            Exception: what `make_iterator` and its iterators raise.
        """
        try:
            parts = self._processes.surviving(lambda: self._draw(epoch, places), self.close, lambda: _described(places))
        except BaseException:
            self._running = None  # it is in the middle of another batch
            raise
        places = {shard: place for part in parts for shard, place in part.places.items()}
        if self._reader.collates:
            drawn = Drawn(joined([part.samples for part in parts if part.samples is not None]), places)
        else:
            drawn = Drawn([sample for part in parts for sample in part.samples], places)
        self._at = epoch, drawn.places
        return drawn

    def close(self) -> None:
        """Let the worker processes end, and the iterators. A later `draw` starts them anew."""
        self._running = self._dataloader = self._at = None
        self._ahead.clear()
        self._processes.end()
        self._reader.forget()

    def _draw(self, epoch: int, places: Mapping[int, ShardPlace]) -> Sequence[Drawn]:
        if self._running is None or self._at != (epoch, places):
            self._orders.start = epoch, dict(places)
            self._start()
        assert self._running is not None
        if not self._ahead:
            parts = [self._processes.next_of(self._running) for _ in range(max(self._num_workers, 1))]
            self._ahead.extend(zip(*parts, strict=True))
        return self._ahead.popleft()

    def _start(self) -> None:
        self._ahead.clear()
        if not self._num_workers:
            self._running = map(self._reader.__getitem__, self._orders)
            return
        if self._dataloader is None:
            self._dataloader = DataLoader(
                self._reader, batch_size=None, sampler=self._orders,
                num_workers=self._num_workers, prefetch_factor=2, persistent_workers=True,
                multiprocessing_context=self._context,
                collate_fn=_as_it_is, worker_init_fn=partial(begin_data_worker, hand_over_by_value),
                # one of its own: the random numbers of the train step are not drawn from
                generator=torch.Generator(),
            )  # fmt: skip
        self._running = self._processes.started_by(self._dataloader)

    def __getstate__(self) -> dict[str, Any]:
        nothing: dict[str, Any] = {"_dataloader": None, "_running": None, "_at": None, "_ahead": deque()}
        return {**self.__dict__, **nothing, "_processes": WorkerProcesses("this stream")}


def _described(places: Mapping[int, ShardPlace]) -> str:
    """Where a batch begins, for people."""
    of_each = [f"logical shard {shard} behind its sample {place.drawn}" for shard, place in places.items()]
    return f"one of the next samples of {shortlist(of_each, 8)}"


def fingerprint(sample: object) -> int:
    """A 32-bit digest of a sample.

    Tensors, arrays, numbers, strings, bytes, and dicts, lists and tuples of them count with their content; of anything
    else only the type does, because two equal objects may well print, or pickle, differently.
    """
    digest = xxhash.xxh32()
    _add(sample, digest.update)
    return int(digest.intdigest())


def _add(value: object, update: Callable[[Any], None]) -> None:
    update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        update(f"{value.dtype}{tuple(value.shape)}".encode())
        plain = value.detach()
        if plain.dtype not in _OF_NUMPY or plain.device.type != "cpu" or plain.is_conj() or plain.is_neg():
            plain = plain.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        update(np.ascontiguousarray(plain.numpy()))
    elif isinstance(value, np.ndarray):
        update(f"{value.dtype}{value.shape}".encode())
        if not value.dtype.hasobject:
            update(np.ascontiguousarray(value))
    elif isinstance(value, (bytes, bytearray)):
        update(bytes(value))
    elif isinstance(value, (bool, int, float, complex, str, np.generic)):
        update(str(value).encode(errors="surrogatepass"))
    elif isinstance(value, dict):
        for key, inner in value.items():
            _add(key, update)
            _add(inner, update)
    elif isinstance(value, (list, tuple)):
        update(str(len(value)).encode())
        for inner in value:
            _add(inner, update)
