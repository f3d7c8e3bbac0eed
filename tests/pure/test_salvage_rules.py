"""The decision about a step that is attempted again: nothing counts twice, nothing is lost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.data.shares import joined_parts, second_deals
from torchelastic.model.salvage_rules import check_mode

UNITS = 12


@given(
    kept=st.lists(st.frozensets(st.integers(0, UNITS - 1)), min_size=1, max_size=5),
    present=st.integers(1, UNITS),
    mode=st.sampled_from(["drop", "recompute"]),
)
def test_each_unit_counts_once(kept: list[frozenset[int]], present: int, mode: str) -> None:
    kept = [units & frozenset(range(present)) for units in kept]
    deals = second_deals(kept, range(present), mode)
    if not any(kept):
        assert deals == ()
        return
    carried = [unit for deal in deals for unit in deal.carried]
    computed = [unit for deal in deals for unit in deal.compute]
    postponed = deals[0].postponed
    assert sorted([*carried, *computed, *postponed]) == list(range(present))
    assert carried, "something was kept, and nothing of it counts"
    assert all(deal.postponed == postponed for deal in deals), "all ranks must agree on what comes later"
    for deal, units in zip(deals, kept, strict=True):
        assert deal.carried in ((), tuple(sorted(units))), "sums cannot be taken apart"
    assert not (computed if mode == "drop" else postponed)


@given(kept=st.integers(1, UNITS), ranks=st.integers(1, 5), least=st.integers(1, 4))
def test_what_is_computed_again_is_dealt_in_parts_that_are_large_enough(kept: int, ranks: int, least: int) -> None:
    present = range(UNITS + kept)
    deals = second_deals([range(kept), *[()] * (ranks - 1)], present, "recompute", least)
    assert [unit for deal in deals for unit in deal.compute] == list(present)[kept:]
    assert all(not deal.compute or len(deal.compute) >= least for deal in deals)
    assert {deal.everyones for deal in deals} == {tuple(deal.compute for deal in deals)}


@given(
    samples=st.lists(st.integers(0, 3), min_size=1, max_size=UNITS),
    ends=st.lists(st.integers(0, UNITS), max_size=4),
    least=st.integers(1, 4),
)
def test_what_ranks_have_too_little_of_goes_to_another_and_nothing_is_lost(
    samples: list[int], ends: list[int], least: int
) -> None:
    bounds = [0, *sorted(min(end, len(samples)) for end in ends), len(samples)]
    parts = [range(*pair) for pair in itertools.pairwise(bounds)]
    found = joined_parts(parts, samples, least)
    assert [unit for part in found for unit in part] == [unit for unit, count in enumerate(samples) if count]
    sizes = [sum(samples[unit] for unit in part) for part in found]
    assert all(not size or size >= min(least, sum(samples)) for size in sizes)
    before = [tuple(unit for unit in part if samples[unit]) for part in parts]
    if all(not part or sum(samples[unit] for unit in part) >= least for part in before):
        assert list(found) == before, "what is enough stays where it was read"


@pytest.mark.parametrize(
    ("mode", "shards", "words"),
    [
        ("dorp", None, "discard, drop, recompute"),
        ("drop", None, "ElasticBatchSampler"),
        ("discard", 4, "ElasticBatchSampler"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(mode: str, shards: int | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_mode(mode, None, shards)


class Sampler:
    """Can deal a batch out again."""

    def deal_again(self) -> None: ...


def test_drop_and_logical_shards_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="'discard' or 'recompute'"):
        check_mode("drop", Sampler(), 4)


@pytest.mark.parametrize("mode", ["drop", "recompute"])
def test_gradients_are_not_kept_of_parameters_that_may_be_unused(mode: str) -> None:
    with pytest.raises(ValueError, match=r"find_unused_parameters=True.*give logical_shards too"):
        check_mode(mode, Sampler(), None, find_unused_parameters=True)
    check_mode("discard", Sampler(), None, find_unused_parameters=True)
    check_mode("recompute", Sampler(), 4, find_unused_parameters=True)
