"""What a dataset draws at random for a sample is the same whoever reads it, and whenever."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from torchelastic.data import ElasticBatchSampler, ElasticLoader, ElasticStream, Source, mapped, shuffled
from torchelastic.data.shares import CollatedShards

SIZE, GLOBAL_BATCH = 24, 8


class Augmented(Dataset[Any]):
    """Each sample is its index and what was drawn for it: as transforms draw, from the generators of the process."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


class Sometimes(Augmented):
    """Draws for few samples, and a different number of times."""

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        drawn = [random.random() for _ in range(index % 3)]
        return index, sum(drawn), 0.0, 0.0


class Compose:
    """As libraries for augmentation do: a generator of its own, of which its transforms have a reference."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.transforms = [{"draw": draw}]

    def __call__(self) -> float:
        return self.transforms[0]["draw"]()


class HasGenerator(Augmented):
    def __init__(self, kind: str) -> None:
        self.images = list(range(10_000))  # no place to look for generators
        generators: dict[str, Any] = {
            "python": random.Random(1),
            "numpy": np.random.default_rng(1),
            "legacy": np.random.RandomState(1),
            "torch": torch.Generator(),
        }
        self.generator = generators[kind]
        self.transform = Compose(self._draw)

    def _draw(self) -> float:
        if isinstance(self.generator, torch.Generator):
            return float(torch.rand((), generator=self.generator))
        return float(self.generator.random() if hasattr(self.generator, "random") else self.generator.rand())

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, self.transform(), self.transform(), 0.0


class OfBatches(Augmented):
    """Reads whole batches at once, as Hugging Face's datasets do; notes how it was asked."""

    def __init__(self, *, draws: bool) -> None:
        self.draws = draws
        self.asked: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[tuple[int, float, float, float]]:
        self.asked.append(list(indices))
        return [(index, random.random() if self.draws else 0.0, 0.0, 0.0) for index in indices]


def as_lists(samples: Sequence[Any]) -> list[Any]:
    return list(samples)


def drawn(
    dataset: Dataset[Any], *, ranks: int = 1, workers: int = 0, epochs: int = 2, start: Mapping[str, Any] | None = None
) -> list[tuple[Any, ...]]:
    """What all ranks have read, in the order of the global batches."""
    of_ranks = []
    for rank in range(ranks):
        sampler = ElasticBatchSampler(SIZE, GLOBAL_BATCH, epochs=epochs, seed=3)
        sampler.set_world(rank, ranks)
        if start is not None:
            sampler.load_state_dict(start)
        loader = ElasticLoader(dataset, sampler, num_workers=workers, collate_fn=as_lists)
        of_ranks.append(list(loader))
    return [sample for batches in zip(*of_ranks, strict=True) for batch in batches for sample in batch]


@pytest.mark.parametrize("make", [Augmented, Sometimes], ids=["always", "sometimes"])
def test_a_sample_is_drawn_alike_in_any_process_on_any_rank(make: Callable[[], Dataset[Any]]) -> None:
    alone = drawn(make())
    assert len(alone) == 2 * SIZE
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    assert drawn(make(), workers=2) == alone
    assert drawn(make(), ranks=2) == alone
    assert drawn(make(), ranks=2, workers=1) == alone


def test_samples_and_epochs_differ_in_what_is_drawn() -> None:
    samples = drawn(Augmented())
    for column in (1, 2, 3):
        assert len({sample[column] for sample in samples}) == 2 * SIZE


@pytest.mark.parametrize("kind", ["python", "numpy", "legacy", "torch"])
def test_a_generator_that_the_dataset_holds_is_seeded_too(kind: str) -> None:
    alone = drawn(HasGenerator(kind))
    assert len({sample[1] for sample in alone}) == len({sample[2] for sample in alone}) == 2 * SIZE
    assert drawn(HasGenerator(kind), ranks=2, workers=1) == alone


@pytest.mark.parametrize("workers", [0, 2])
def test_a_repeated_step_and_a_resumed_run_draw_the_same(workers: int) -> None:
    sampler = ElasticBatchSampler(SIZE, GLOBAL_BATCH, epochs=2, seed=3)
    loader = ElasticLoader(Augmented(), sampler, num_workers=workers, collate_fn=as_lists)
    first = next(loader)
    sampler.commit()
    failed = next(loader)
    sampler.rollback()
    assert next(loader) == failed
    sampler.commit()
    rest = [sample for batch in loader for sample in batch]
    whole = drawn(Augmented())
    assert [*first, *failed, *rest] == whole

    place = {**sampler.state_dict(), "epoch": 1, "cursor": GLOBAL_BATCH}
    assert drawn(Augmented(), workers=workers, start=place) == whole[SIZE + GLOBAL_BATCH :]


def add_noise(samples: Sequence[tuple[int, ...]]) -> tuple[list[int], float, float]:
    return [sample[0] for sample in samples], random.random(), float(torch.rand(()))


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_collate_fn_draws_is_drawn_again_with_the_batch(workers: int) -> None:
    sampler = ElasticBatchSampler(SIZE, GLOBAL_BATCH, epochs=2, seed=3)
    loader = ElasticLoader(Sometimes(), sampler, num_workers=workers, collate_fn=add_noise)
    batch, other = next(loader), next(loader)
    sampler.rollback()
    assert next(loader) == batch
    assert next(loader) == other
    assert other[1:] != batch[1:]


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("collate_fn", [None, add_noise], ids=["default_collate", "own"])
def test_what_the_train_step_draws_is_as_if_nothing_had_been_read(draws: bool, collate_fn: Any) -> None:
    loader = ElasticLoader(
        Augmented() if draws else OfBatches(draws=False), ElasticBatchSampler(SIZE, GLOBAL_BATCH), collate_fn=collate_fn
    )

    def step() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def seed() -> None:
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)

    seed()
    expected = [step() for _ in range(3)]
    seed()
    seen = []
    for _ in range(3):
        next(loader)
        seen.append(step())
    assert seen == expected


class Fails(Augmented):
    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        random.random()
        raise OSError("the disk hiccupped")


def test_a_batch_that_cannot_be_read_leaves_the_numbers_of_the_train_step() -> None:
    random.seed(5)
    expected = random.random()
    random.seed(5)
    with pytest.raises(OSError, match="hiccupped"):
        next(ElasticLoader(Fails(), ElasticBatchSampler(SIZE, GLOBAL_BATCH)))
    assert random.random() == expected


def test_a_dataset_that_draws_nothing_is_asked_once_for_each_batch() -> None:
    dataset = OfBatches(draws=False)
    assert len(drawn(dataset, epochs=1)) == SIZE
    assert [len(keys) for keys in dataset.asked] == [GLOBAL_BATCH] * 3


def test_one_that_draws_is_asked_twice_for_the_first_and_then_sample_by_sample() -> None:
    dataset = OfBatches(draws=True)
    assert drawn(dataset, epochs=1) == drawn(OfBatches(draws=True), epochs=1, ranks=2)
    assert [len(keys) for keys in dataset.asked] == [GLOBAL_BATCH, *[1] * SIZE]


class Opened(Augmented):
    file: str | None = None

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        assert self.file is not None, "worker_init_fn has not opened it"
        return super().__getitem__(index)


def open_it(_worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert type(info.dataset) is Opened
    info.dataset.file = "open"


def test_a_worker_init_fn_sees_the_dataset_that_was_given() -> None:
    sampler = ElasticBatchSampler(SIZE, GLOBAL_BATCH, seed=3)
    loader = ElasticLoader(Opened(), sampler, num_workers=1, worker_init_fn=open_it, collate_fn=as_lists)
    assert [sample for batch in loader for sample in batch] == drawn(Augmented(), epochs=1)


def augmented(number: int) -> tuple[int, float, float, float]:
    return number, random.random(), float(np.random.rand()), float(torch.rand(()))


class Plain:
    """A plain generator of the user's own: `position` samples were drawn before."""

    def __init__(self, shard_size: int = 20, draws_from: int = 0) -> None:
        self.shard_size, self.draws_from = shard_size, draws_from

    def __call__(self, shard: int, num_shards: int, position: Any) -> Iterator[Any]:
        for number in range(position, self.shard_size):
            sample = number + 1000 * shard
            yield augmented(sample) if number >= self.draws_from else (sample, 0.0, 0.0, 0.0)


class Numbers:
    def __call__(self, shard: int, num_shards: int, position: Any) -> Iterator[int]:
        return iter(range(1000 * shard + position, 1000 * shard + 20))


SOURCES: dict[str, Source[Any]] = {
    "a generator": Plain(),
    "one that draws later": Plain(draws_from=7),
    "mapped": mapped(Numbers(), augmented),
    "shuffled": mapped(shuffled(Numbers(), 8), augmented),
}


def stream_of(source: Source[Any], **options: Any) -> ElasticStream:
    return ElasticStream(source, 4, global_batch_size=8, seed=3, collate_fn=as_lists, **options)


def streamed(stream: ElasticStream) -> list[Any]:
    samples = []
    for batch in stream:
        stream.commit()
        samples += batch
    stream.close()
    return samples


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_stream_that_is_opened_anew_draws_for_each_sample_what_it_drew(source: Source[Any]) -> None:
    """Without seeds the first shard that moves to another worker ended the run: it gave another sample than before."""
    whole = streamed(stream_of(source, epochs=2))
    drawn_for = [sample[1] for sample in whole if sample[1]]
    assert len(set(drawn_for)) == len(drawn_for) >= len(whole) / 2
    for workers in (0, 2):
        first = stream_of(source, epochs=2, num_workers=workers, multiprocessing_context="fork" if workers else None)
        begun: list[Any] = []
        while first.number < 6:
            begun += next(first)
            first.commit()
        failed = next(first)
        first.rollback()
        assert next(first) == failed
        first.rollback()
        place = first.state_dict()
        first.close()
        other = stream_of(source, epochs=2)
        other.load_state_dict(place)
        assert [*begun, *streamed(other)] == whole


def padded(samples: Sequence[Any]) -> tuple[list[int], float]:
    """As a collator for texts does: the batch is as long as the longest, and some of it is masked at random."""
    numbers = [sample if isinstance(sample, int) else sample[0] for sample in samples]
    return [number + max(numbers) for number in numbers], random.random()


def in_shards(ranks: int, workers: int) -> list[list[Any]]:
    """The logical shards of each global batch, in their order, whoever has read them."""
    of_ranks = []
    for rank in range(ranks):
        sampler = ElasticBatchSampler(SIZE - 5, GLOBAL_BATCH, epochs=2, seed=3)  # the last batch is too small for all
        sampler.set_logical_shards(4)
        sampler.set_world(rank, ranks)
        dataset = torch.utils.data.Subset(Augmented(), range(SIZE - 5))
        batches = []
        for batch in ElasticLoader(dataset, sampler, collate_fn=padded, num_workers=workers):
            units = sampler.pending_units()  # none: the batch is padding
            assert (type(batch) is CollatedShards) == bool(units)
            batches.append(list(batch) if units else [])
            assert len(batches[-1]) == len(units)
            sampler.commit()
        of_ranks.append(batches)
    return [[shard for share in shares for shard in share] for shares in zip(*of_ranks, strict=True)]


def test_each_logical_shard_is_collated_by_itself_whoever_reads_it() -> None:
    """What a collate_fn pads or draws would follow the number of workers, and with it the bits of the weights."""
    alone = in_shards(1, 0)
    assert [len(shards) for shards in alone] == [4, 4, 3] * 2
    assert len({noise for shards in alone for _, noise in shards}) == sum(map(len, alone))
    assert in_shards(2, 0) == alone
    assert in_shards(2, 1) == alone
    assert in_shards(4, 0) == alone


def test_each_shard_of_a_stream_is_collated_by_itself_where_they_are_computed_so() -> None:
    stream = ElasticStream(Numbers(), 4, global_batch_size=8, seed=3, collate_fn=padded)
    joint, noise = next(stream)
    stream.rollback()
    assert next(stream) == (joint, noise)
    stream.rollback()
    stream.set_logical_shards(4)
    shards = next(stream)
    assert type(shards) is CollatedShards
    assert [numbers for numbers, _ in shards] == [[1 + 2000 * n, 2 + 2000 * n] for n in range(4)]
    assert len({own for _, own in shards}) == 4
    stream.rollback()
    random.random()
    assert next(stream) == shards


def test_what_the_train_step_draws_is_as_if_no_stream_had_been_read() -> None:
    torch.manual_seed(5)
    expected = [float(torch.rand(())) for _ in range(4)]
    torch.manual_seed(5)
    stream = stream_of(Plain(draws_from=3))
    seen = []
    for _ in range(4):
        next(stream)
        seen.append(float(torch.rand(())))
    assert seen == expected
