"""Sources around sources, in any composition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.pure.source_contract import PAD, Documents, Living, all_samples, rest_of, shard_samples, tokens_of, twice
from torchelastic.data import Source, SourceError, mapped, mixed, packed, repeated, shuffled
from torchelastic.data.sources.api import of_epoch, opened

_SEEDS = st.integers(0, 3)


@st.composite
def documents(draw: st.DrawFn) -> Documents:
    lengths, tokens = draw(st.lists(st.integers(0, 5), max_size=8)), iter(range(1000))
    kind = draw(st.sampled_from([Documents, Living]))
    return kind([list(islice(tokens, length)) for length in lengths])


def around(inner: st.SearchStrategy[Source[Any]]) -> st.SearchStrategy[Source[Any]]:
    weights = st.fixed_dictionaries({"a": st.integers(1, 4), "b": st.floats(0.1, 4)})
    return st.one_of(
        st.builds(shuffled, inner, st.integers(1, 5), _SEEDS),
        st.builds(packed, inner, st.integers(1, 6), pad=st.just(PAD)),
        st.builds(repeated, inner, st.integers(1, 3)),
        st.builds(mapped, inner, st.just(twice)),
        st.builds(mixed, st.fixed_dictionaries({"a": inner, "b": inner}), weights, _SEEDS),
    )


@given(st.recursive(documents(), around, max_leaves=4), st.integers(1, 4), st.integers(0, 2))
def test_any_composition_has_each_token_once_and_goes_on_from_any_place(
    source: Source[Any], num_shards: int, epoch: int
) -> None:
    samples = all_samples(of_epoch(source, epoch), num_shards)
    assert Counter(token for sample in samples for token in sample if token != PAD) == tokens_of(source)


NUMBERS = Documents([[number] for number in range(40)])


@pytest.mark.parametrize(
    "wrapped",
    [
        shuffled(NUMBERS, 16),
        mapped(shuffled(NUMBERS, 16), twice),
        packed(shuffled(NUMBERS, 16), 3),
        mixed({"a": shuffled(NUMBERS, 16)}, {"a": 1}),
        repeated(shuffled(NUMBERS, 16), 1),
    ],
    ids=lambda source: type(source).__name__,
)
def test_each_epoch_has_an_order_of_its_own_through_every_wrapper(wrapped: Source[Any]) -> None:
    orders = [rest_of(of_epoch(wrapped, epoch)(0, 1, 0)) for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_the_order_depends_on_the_seed_and_the_shard_and_is_the_same_in_all_versions() -> None:
    same = Documents([[number // 2] for number in range(32)])  # two shards of the same numbers
    assert list(shuffled(same, 16)(0, 2, 0)) != list(shuffled(same, 16)(1, 2, 0))
    assert list(shuffled(same, 16)(0, 2, 0)) != list(shuffled(same, 16, seed=1)(0, 2, 0))
    # a checkpoint of today is read by the Python of tomorrow
    order = [number for (number,) in shuffled(Documents([[n] for n in range(8)]), 8, seed=7)(0, 1, 0)]
    assert order == [6, 3, 0, 5, 1, 2, 7, 4]


def test_a_shuffled_sample_stays_in_its_block_and_no_more_than_a_block_is_read_again() -> None:
    drawn: list[int] = []

    def counting(shard: int, num_shards: int, position: Any, /) -> Iterator[int]:
        for number in range(position, 100):
            drawn.append(number)
            yield number

    source = shuffled(counting, 10)
    samples = opened(source, 0, 1, 0)
    first = list(islice(samples, 25))
    assert [number // 10 for number in first] == [place // 10 for place in range(25)]
    drawn.clear()
    again = opened(source, 0, 1, samples.state_dict())
    assert next(again) == next(samples)
    assert drawn == list(range(20, 30))


def test_tokens_are_packed_in_order_and_the_end_is_dropped_or_padded() -> None:
    source = Documents([[1, 2, 3], [], [4], [5, 6, 7, 8, 9, 10, 11]])
    assert rest_of(packed(source, 4)(0, 1, 0)) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert rest_of(packed(source, 4, pad=0)(0, 1, 0)) == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 0]]
    ended = packed(source, 4, end_of_document=99)
    assert rest_of(ended(0, 1, 0)) == [[1, 2, 3, 99], [99, 4, 99, 5], [6, 7, 8, 9]]
    assert shard_samples(ended, 0, 1)
    letters = packed(Documents([[1, 2], [3]]), 2, tokenize=lambda document: [token * 10 for token in document])
    assert rest_of(letters(0, 1, 0)) == [[10, 20]]


@pytest.mark.parametrize(
    "around", [mapped, lambda source, function: packed(source, 1, function)], ids=["mapped", "packed"]
)
def test_a_function_that_raises_stop_iteration_leaves_no_sample_out(around: Any) -> None:
    def first(document: list[int]) -> list[int]:
        return [next(iter(document))]

    samples = around(Documents([[1], [], [2]]), first)(0, 1, 0)
    next(samples)
    with pytest.raises(RuntimeError, match="first raised StopIteration, by which samples would be skipped"):
        next(samples)


def test_a_document_that_has_fewer_tokens_than_before_is_told() -> None:
    samples = opened(packed(Documents([[1, 2, 3, 4, 5]]), 4), 0, 1, 0)
    next(samples)
    with pytest.raises(SourceError, match="token 4 of a document that has 2 tokens now: tokenize as before"):
        packed(Documents([[1, 2]]), 4)(0, 1, samples.state_dict())


def test_a_mixture_keeps_its_proportions_and_its_choice_is_a_pure_function() -> None:
    many = {name: Documents([[number] for _ in range(3000)]) for number, name in enumerate("abc")}
    mixture = mixed(many, {"a": 5, "b": 3, "c": 2}, seed=3)
    first = Counter(number for (number,) in islice(mixture(0, 1, 0), 2000))
    assert [round(first[number] / 2000, 1) for number in range(3)] == [0.5, 0.3, 0.2]
    choices = [mixture.choice(0, number, frozenset()) for number in range(50)]
    assert choices == ["abc"[number] for (number,) in islice(mixture(0, 1, 0), 50)]
    assert choices != [mixture.choice(1, number, frozenset()) for number in range(50)]
    assert {mixture.choice(0, number, frozenset("ab")) for number in range(50)} == {"c"}


def test_a_mixture_ends_with_the_first_that_is_over_or_with_the_last() -> None:
    sources = {"few": Documents([[0]] * 2), "many": Documents([[1]] * 50)}
    weights = {"few": 1, "many": 1}
    samples = [number for (number,) in mixed(sources, weights, until="first")(0, 1, 0)]
    assert samples.count(0) == 2
    assert 0 < samples.count(1) < 50
    assert Counter(number for (number,) in mixed(sources, weights)(0, 1, 0)) == {0: 2, 1: 50}
    assert shard_samples(mixed(sources, weights, until="first"), 0, 1)
    assert shard_samples(mixed(sources, weights), 0, 1)


def test_a_source_is_repeated_for_ever_but_not_where_it_has_nothing() -> None:
    source = repeated(shuffled(Documents([[1], [2], [3]]), 3))
    samples = opened(source, 0, 1, 0)
    times = [[number for (number,) in islice(samples, 3)] for _ in range(20)]
    assert all(sorted(time) == [1, 2, 3] for time in times)
    assert len({tuple(time) for time in times}) > 1  # each is an epoch of the shuffle
    position = samples.state_dict()
    assert next(opened(source, 0, 1, position)) == next(samples)
    assert list(source(3, 4, 0)) == []


class _Moving:
    """Each epoch's samples are in another shard, as those of a `datasets.IterableDataset` are."""

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch

    def for_epoch(self, epoch: int) -> _Moving:
        return _Moving(epoch)

    def __call__(self, shard: int, num_shards: int, position: Any, /) -> Iterator[int]:
        return iter([1, 2, 3][position:] if shard == (self.epoch + 1) % num_shards else [])


def test_a_shard_that_has_nothing_the_first_time_has_what_comes_later() -> None:
    assert sorted(all_samples(repeated(_Moving(), 3), 2)) == [1, 1, 1, 2, 2, 2, 3, 3, 3]


@pytest.mark.parametrize("wrong", [7, "x", {"token": 1}, {"block": 1, "drawn": 2, "source": 0, "more": 1}])
def test_a_position_of_another_source_is_refused(wrong: object) -> None:
    with pytest.raises(SourceError, match="taken from another source than this one, which has block, drawn, source"):
        shuffled(NUMBERS, 4)(0, 1, wrong)


def test_a_mixture_of_other_names_refuses_the_position() -> None:
    samples = opened(mixed({"a": NUMBERS, "b": NUMBERS}, {"a": 1, "b": 1}), 0, 1, 0)
    next(samples)
    with pytest.raises(SourceError, match="which has a, c"):
        mixed({"a": NUMBERS, "c": NUMBERS}, {"a": 1, "c": 1})(0, 1, samples.state_dict())


def test_wrong_arguments_are_told_at_once() -> None:
    with pytest.raises(ValueError, match="buffer_size is 0"):
        shuffled(NUMBERS, 0)
    with pytest.raises(ValueError, match="length is 0"):
        packed(NUMBERS, 0)
    with pytest.raises(ValueError, match="times is 0"):
        repeated(NUMBERS, 0)
    with pytest.raises(ValueError, match="one weight for each source"):
        mixed({"a": NUMBERS}, {"b": 1})
    with pytest.raises(ValueError, match="one weight for each source"):
        mixed({}, {})
    with pytest.raises(ValueError, match="dicts with the same names"):
        mixed([NUMBERS], [1])  # type: ignore[arg-type]
    for weight in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="weights are numbers above 0"):
            mixed({"a": NUMBERS}, {"a": weight})
    with pytest.raises(ValueError, match="until is 'never'"):
        mixed({"a": NUMBERS}, {"a": 1}, until="never")  # type: ignore[arg-type]
