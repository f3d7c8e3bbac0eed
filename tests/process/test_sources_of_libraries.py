"""Datasets and loaders of other libraries as sources. `pip install datasets torchdata` for those that are skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from tests.pure.source_contract import all_samples, through_json
from torchelastic.data import Source, SourceError, from_datasets, from_stateful, mapped, repeated, shuffled
from torchelastic.data.sources.api import of_epoch, opened


class Counter:
    """A loader that keeps its place, and begins again when it is over, as torchdata's does."""

    def __init__(self, shard: int, num_shards: int) -> None:
        self.numbers, self.place = range(shard, 20, num_shards), 0

    def __iter__(self) -> Iterator[int]:
        while self.place < len(self.numbers):
            self.place += 1
            yield self.numbers[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.place = state_dict["place"]


def test_a_loader_that_keeps_its_place_goes_on_from_any_place_and_not_beyond_its_end() -> None:
    assert sorted(all_samples(from_stateful(Counter), 3)) == list(range(20))
    assert sorted(all_samples(shuffled(from_stateful(Counter), 4), 3)) == list(range(20))
    assert all_samples(from_stateful(Counter), 30) == list(range(20))


# --- torchdata --------------------------------------------------------------------------------------------------------


def make_stateful(num_workers: int, shard: int, num_shards: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    numbers: Any = range(shard, 22, num_shards)
    return StatefulDataLoader(numbers, batch_size=3, num_workers=num_workers, collate_fn=list)


@pytest.fixture
def _torchdata() -> None:
    pytest.importorskip("torchdata", reason="torchdata is not installed: pip install torchdata")


@pytest.mark.usefixtures("_torchdata")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_stateful_data_loader_goes_on_from_any_place(num_shards: int) -> None:
    batches = all_samples(from_stateful(partial(make_stateful, 0)), num_shards)
    assert sorted(number for batch in batches for number in batch) == list(range(22))


@pytest.mark.usefixtures("_torchdata")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_what_its_worker_processes_have_read_ahead_is_not_in_the_position() -> None:
    source = from_stateful(partial(make_stateful, 2))
    samples = opened(source, 0, 1, 0)
    assert [next(samples) for _ in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert next(source(0, 1, through_json(samples.state_dict()))) == [9, 10, 11]


# --- datasets ---------------------------------------------------------------------------------------------------------


def _numbers(tens: list[int]) -> Iterator[dict[str, int]]:
    for ten in tens:
        yield from ({"x": ten + number} for number in range(7))


NUMBERS = [ten + number for ten in range(0, 60, 10) for number in range(7)]


def _doubled(example: dict[str, int]) -> dict[str, int]:
    return {"x": 2 * example["x"]}


def _is_even(example: dict[str, int]) -> bool:
    return example["x"] % 2 == 0


def _twice(batch: dict[str, list[int]]) -> dict[str, list[int]]:
    return {"x": [number for number in batch["x"] for _ in range(2)]}


def number_of(example: dict[str, int]) -> int:
    return int(example["x"])


@pytest.fixture
def library() -> Any:
    return pytest.importorskip("datasets", reason="datasets is not installed: pip install datasets")


def generated(library: Any) -> Any:
    return library.IterableDataset.from_generator(_numbers, gen_kwargs={"tens": list(range(0, 60, 10))})


_KINDS: dict[str, tuple[Callable[[Any], Any], list[int]]] = {
    "generator": (generated, NUMBERS),
    "map": (lambda library: generated(library).map(_doubled), [2 * number for number in NUMBERS]),
    "filter": (lambda library: generated(library).filter(_is_even), [n for n in NUMBERS if n % 2 == 0]),
    "batched map": (
        lambda library: generated(library).map(_twice, batched=True, batch_size=4),
        [number for number in NUMBERS for _ in range(2)],
    ),
    "arrow": (
        lambda library: library.Dataset.from_dict({"x": NUMBERS}).to_iterable_dataset(num_shards=6),
        NUMBERS,
    ),
    "numpy": (
        lambda library: library.Dataset.from_dict({"x": NUMBERS}).to_iterable_dataset(3).with_format("numpy"),
        NUMBERS,
    ),
    "shuffled shards": (lambda library: generated(library).shuffle(seed=3, buffer_size=1), NUMBERS),
}


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("num_shards", [1, 4])
def test_examples_are_in_one_shard_and_reading_goes_on_from_any_place(library: Any, kind: str, num_shards: int) -> None:
    make, expected = _KINDS[kind]
    examples = all_samples(from_datasets(make(library)), num_shards)
    assert sorted(map(number_of, examples)) == sorted(expected)


def test_a_dataset_is_shuffled_and_repeated_as_any_source(library: Any) -> None:
    inner = from_datasets(generated(library).shuffle(seed=3, buffer_size=1))
    source: Source[int] = repeated(shuffled(mapped(inner, number_of), 5), 2)
    assert sorted(all_samples(source, 2)) == sorted(NUMBERS * 2)
    orders = [[example["x"] for example in of_epoch(inner, epoch)(0, 1, 0)] for epoch in range(2)]
    assert orders[0] != orders[1]
    assert sorted(all_samples(mapped(of_epoch(inner, 1), number_of), 4)) == sorted(NUMBERS)


def test_shards_that_are_read_side_by_side_keep_places_of_their_own(library: Any) -> None:
    source = from_datasets(generated(library).map(_doubled))
    several = [opened(source, shard, 4, 0) for shard in range(4)]
    firsts = [[number_of(next(one)) for _ in range(3)] for one in several for _ in range(2)]
    positions = [through_json(one.state_dict()) for one in several]
    rests = [list(map(number_of, source(shard, 4, positions[shard]))) for shard in range(4)]
    drawn = [number for numbers in (*firsts, *rests) for number in numbers]
    assert sorted(drawn) == sorted(2 * number for number in NUMBERS)


class _Shard(Dataset[list[int]]):
    def __init__(self, source: Source[Any]) -> None:
        self.source = source

    def __len__(self) -> int:
        return 2

    def __getitem__(self, shard: int) -> list[int]:
        return list(map(number_of, self.source(shard, 2, 0)))


def test_worker_processes_of_torch_leave_nothing_out(library: Any) -> None:
    loader = DataLoader(_Shard(from_datasets(generated(library))), batch_size=None, num_workers=2)
    assert sorted(number for shard in loader for number in shard) == NUMBERS


@pytest.mark.parametrize("around", [lambda dataset: dataset, lambda dataset: dataset.map(_doubled)])
def test_a_dataset_whose_shuffle_buffer_would_be_lost_is_refused(library: Any, around: Callable[[Any], Any]) -> None:
    source = from_datasets(around(generated(library).shuffle(seed=1, buffer_size=10)))
    with pytest.raises(SourceError, match=r"shuffle buffer, which is not in its state.*use torchelastic.data.shuffled"):
        source(0, 1, 0)
