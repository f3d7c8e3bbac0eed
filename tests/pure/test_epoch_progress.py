"""Whatever is left out of whichever step: each epoch has each of its samples once."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from torchelastic.data import ElasticBatchSampler
from torchelastic.data.epoch_progress import EpochProgress
from torchelastic.data.shares import SecondDeal


def test_postponed_samples_come_in_batches_of_the_usual_size() -> None:
    course = EpochProgress(regular=2, size=2, number=2, postponed=(4, 5, 6))
    assert [course.batch(None, (0, number)) for number in (2, 3)] == [(4, 5), (6,)]  # type: ignore[arg-type]  # no order is needed there
    after = course.advanced((0, 3))
    assert after.postponed == (6,)
    assert after.batches_in(0) == 4


def test_of_what_was_postponed_no_single_sample_is_left_over() -> None:
    """It could not be normalized."""
    course = EpochProgress(regular=2, size=4, number=2, postponed=tuple(range(9)))
    found = [course.batch(None, (0, number)) for number in (2, 3, 4)]  # type: ignore[arg-type]  # as above
    assert found == [(0, 1, 2, 3), (4, 5, 6), (7, 8)]
    after = course.advanced((0, 4))
    assert after.postponed == (7, 8)
    assert after.batch(None, (0, 4)) == (7, 8)  # type: ignore[arg-type]  # as above


@given(
    samples=st.integers(3, 30),
    batch=st.integers(2, 7),
    drop_last=st.booleans(),
    losses=st.dictionaries(st.integers(0, 40), st.integers(1, 7), max_size=8),
    ahead=st.booleans(),
)
def test_each_sample_of_each_epoch_is_committed_once(
    samples: int, batch: int, drop_last: bool, losses: dict[int, int], ahead: bool
) -> None:
    """Two ranks; now and then the second one is lost in a step, with some units of the batch."""
    if drop_last and samples < batch:
        return
    options: dict[str, Any] = {"epochs": 2, "seed": 5, "drop_last": drop_last}
    sampler = ElasticBatchSampler(samples, batch, **options)
    counted: Counter[tuple[int, int]] = Counter()
    stream = sampler.upcoming()
    for step in range(200):
        if sampler.finished:
            break
        lost = losses.pop(step, 0)
        present = sampler.present_units
        if lost and len(present) > 1:
            kept, gone = present[: max(1, len(present) - lost)], present[max(1, len(present) - lost) :]
            sampler.set_world(0, 1)
            sampler.deal_again(SecondDeal(carried=tuple(kept), postponed=tuple(gone)))
            stream = sampler.upcoming()
        loaded = next(stream)
        if not ahead:  # an iterator that ran ahead must say the same as one that is begun anew at each step
            assert loaded == next(sampler.upcoming())
        share = sampler.consume()
        assert share.local_samples == len(share.indices)
        assert share.global_samples == len(share.indices) + len(share.carried)
        if share.indices:
            assert loaded == list(share.indices)
        counted.update((share.epoch, index) for index in share.indices + share.carried)
        copy = ElasticBatchSampler(samples, batch, **options)
        sampler.commit()
        copy.load_state_dict(sampler.state_dict())
        assert (copy.epoch, copy.cursor, copy.postponed) == (sampler.epoch, sampler.cursor, sampler.postponed)
    assert sampler.finished
    assert set(counted.values()) <= {1}, "repeated"
    expected = sampler.batches_per_epoch * batch if drop_last else samples
    assert Counter(epoch for epoch, _ in counted) == {0: expected, 1: expected}, "lost"


def test_a_second_deal_ends_with_the_next_group_and_with_a_rollback_to_elsewhere() -> None:
    sampler = ElasticBatchSampler(8, 4, shuffle=False)
    sampler.deal_again(SecondDeal(compute=(3,), carried=(0, 1), postponed=(2,)))
    assert sampler.consume().indices == (3,)
    assert sampler.weight == 1 / 3
    sampler.rollback()
    assert sampler.consume().carried == (0, 1), "the same attempt is made again"
    sampler.set_world(0, 1)
    assert sampler.consume().indices == (0, 1, 2, 3)


def test_a_rank_without_samples_loads_two_so_that_batch_norm_has_a_variance() -> None:
    sampler = ElasticBatchSampler(8, 4, shuffle=False)
    sampler.deal_again(SecondDeal(carried=(0, 1, 2, 3)))
    share = sampler.shares(0)
    assert share.load == (0, 1)
    assert share.is_padding
    assert share.weight == 0


def test_logical_shards_are_dealt_out_as_whole_ones() -> None:
    sampler = ElasticBatchSampler(10, 10, shuffle=False)
    sampler.set_logical_shards(4)  # of 3, 3, 2 and 2 samples
    loads = []
    for rank in range(3):
        sampler.set_world(rank, 3)
        loads.append((sampler.shares(0).load, sampler.pending_units()))
    assert loads == [
        ((0, 1, 2, 3, 4, 5), ((0, 3), (1, 3))),
        ((6, 7), ((2, 2),)),
        ((8, 9), ((3, 2),)),
    ]
