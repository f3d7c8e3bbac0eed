from __future__ import annotations

import copy
import pickle
import threading
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.data import ElasticBatchSampler
from torchelastic.data.order import epoch_order
from torchelastic.errors import NonRetryableException

# One event of a run: a step that draws some batches and commits; a step in which each rank fails after having drawn a
# different number; one that some ranks had committed when the others failed; a resize.
EVENTS = st.one_of(
    st.tuples(st.just("step"), st.integers(0, 4)),
    st.tuples(st.just("fail"), st.lists(st.integers(0, 4), min_size=7, max_size=7)),
    st.tuples(st.just("torn"), st.lists(st.booleans(), min_size=7, max_size=7)),
    st.tuples(st.just("resize"), st.integers(1, 7)),
)


class Run:
    """All ranks of a run, with the ledger that their commits add up to."""

    def __init__(self, size: int, batch: int, **options: int) -> None:
        self.size, self.batch, self.options = size, batch, options
        self.ledger: dict[int, list[int]] = defaultdict(list)
        self.ranks = [self.make()]

    def make(self) -> ElasticBatchSampler:
        return ElasticBatchSampler(self.size, self.batch, **self.options)  # type: ignore[arg-type] # ints and bools

    def resize(self, world_size: int, source: int = 0) -> None:
        state = self.ranks[source].state_dict()
        survivors = self.ranks[:world_size]
        self.ranks = survivors + [self.make() for _ in range(world_size - len(survivors))]
        for rank, sampler in enumerate(self.ranks):
            sampler.load_state_dict(state)
            sampler.set_world(rank, world_size)

    def draw(self, batches: int) -> None:
        """Let every rank draw, and check what they drew against each other."""
        for _ in range(batches):
            if self.ranks[0].position[0] == self.ranks[0].epochs:
                return
            loads = [next(sampler.upcoming()) for sampler in self.ranks]
            shares = [sampler.consume() for sampler in self.ranks]
            assert len({(share.epoch, share.number, share.global_samples) for share in shares}) == 1
            assert sum(share.local_samples for share in shares) == shares[0].global_samples
            assert sum(share.weight for share in shares) == pytest.approx(1)
            sizes = [share.local_samples for share in shares]
            assert sizes == sorted(sizes, reverse=True)
            assert sizes[0] - sizes[-1] <= 1
            for load, share in zip(loads, shares, strict=True):
                assert load == (list(share.indices) or loads[0]), "an empty share is padded with rank 0's"
        assert sum(sampler.weight for sampler in self.ranks) == pytest.approx(1)

    def write(self) -> None:
        """Enter what is pending into the ledger, batch by batch, rank by rank."""
        for shares in zip(*(sampler.pending for sampler in self.ranks), strict=True):
            for share in shares:
                self.ledger[share.epoch].extend(share.indices)

    def step(self, batches: int) -> None:
        self.draw(batches)
        self.write()
        for sampler in self.ranks:
            sampler.commit()

    def fail(self, drawn: list[int]) -> None:
        for sampler, batches in zip(self.ranks, drawn, strict=False):
            for _ in range(batches):
                if sampler.position[0] < sampler.epochs:
                    sampler.consume()
            sampler.rollback()

    def torn(self, committed: list[bool]) -> None:
        self.draw(1)
        committed = committed[: len(self.ranks)]
        if any(committed):
            self.write()
        for sampler, has_committed in zip(self.ranks, committed, strict=True):
            if has_committed:
                sampler.commit()
            else:
                sampler.rollback()
        self.resize(len(self.ranks), source=committed.index(True) if any(committed) else 0)


@given(
    size=st.integers(1, 60),
    batch=st.integers(1, 16),
    epochs=st.integers(1, 3),
    seed=st.integers(),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    events=st.lists(EVENTS, max_size=12),
)
def test_whatever_fails_and_resizes_the_ledger_of_each_epoch_is_its_order(
    size: int, batch: int, epochs: int, seed: int, shuffle: bool, drop_last: bool, events: list[tuple[str, object]]
) -> None:
    drop_last = drop_last and size >= batch
    run = Run(size, batch, epochs=epochs, seed=seed, shuffle=shuffle, drop_last=drop_last)
    for verb, argument in events:
        getattr(run, verb)(argument)
    while not run.ranks[0].finished:
        run.step(1)
    covered = size // batch * batch if drop_last else size
    assert dict(run.ledger) == {
        epoch: epoch_order(size, seed, epoch, shuffle=shuffle)[:covered].tolist() for epoch in range(epochs)
    }


@given(st.integers(1, 20), st.integers(1, 8), st.none() | st.integers(1, 8), st.integers(1, 5))
def test_what_a_rank_keeps_of_a_failed_step_is_what_it_has_drawn(
    samples: int, batch: int, shards: int | None, world_size: int
) -> None:
    sampler = ElasticBatchSampler(samples, batch)  # the last batch may be a small one
    sampler.set_logical_shards(shards and min(shards, batch))
    for _ in range(sampler.batches_per_epoch):
        kept: list[int] = []
        for rank in range(world_size):
            sampler.set_world(rank, world_size)
            units = sampler.pending_units()
            assert sum(size for _, size in units) == sampler.consume().local_samples
            kept += [unit for unit, _ in units]
        assert kept == list(sampler.present_units)
        sampler.commit()


def test_weighted_local_means_are_the_global_mean_also_with_padding_and_accumulation() -> None:
    values = torch.randn(21, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weighted = 0.0
    for rank in range(4):
        sampler = ElasticBatchSampler(21, 9)  # batches of 9, 9 and 3: in the last one rank 3 has padding only
        sampler.set_world(rank, 4)
        drawn = [index for _ in range(3) for index in sampler.consume().indices]
        weighted += sampler.weight * values[drawn].mean().item()
    assert weighted == pytest.approx(values.mean().item())


@given(
    size=st.integers(2, 40),
    batch=st.integers(2, 20),
    world=st.integers(1, 7),
    least=st.integers(1, 4),
    shards=st.none() | st.integers(1, 6),
)
def test_no_rank_has_fewer_samples_than_it_needs_where_the_batch_allows_it(
    size: int, batch: int, world: int, least: int, shards: int | None
) -> None:
    ranks = [ElasticBatchSampler(size, batch, seed=3, min_local_batch=min(least, batch)) for _ in range(world)]
    whole = ElasticBatchSampler(size, batch, seed=3)
    for rank, sampler in enumerate(ranks):
        sampler.set_world(rank, world)
        sampler.set_logical_shards(shards and min(shards, batch))
    while not whole.finished:
        needed = min(least, len(whole.shares(whole.position[1]).load))
        loads = [next(sampler.upcoming()) for sampler in ranks]
        shares = [sampler.consume() for sampler in ranks]
        assert tuple(index for share in shares for index in share.indices) == whole.consume().indices
        assert all(len(load) >= needed for load in loads), "also of padding"
        assert all(not samples or samples >= needed for sampler in ranks for _, samples in sampler.pending_units()) or (
            shards is None  # then a unit is a sample
        )
        for sampler in (*ranks, whole):
            sampler.commit()


def test_what_a_model_needs_is_no_more_than_a_batch_has_and_what_was_chosen_counts_more() -> None:
    sampler = ElasticBatchSampler(8, 1)
    sampler.set_min_local_batch(2)
    assert sampler.min_local_batch == 1
    chosen = ElasticBatchSampler(8, 4, min_local_batch=1)
    chosen.set_min_local_batch(2)
    assert chosen.min_local_batch == 1
    with pytest.raises(ValueError, match="min_local_batch=5 must lie between 1 and global_batch_size=4"):
        ElasticBatchSampler(8, 4, min_local_batch=5)


def test_ranks_that_never_have_a_part_are_said(caplog: pytest.LogCaptureFixture) -> None:
    sampler = ElasticBatchSampler(8, 4)
    sampler.set_world(0, 3)
    assert not caplog.records
    sampler.set_min_local_batch(2)
    sampler.set_world(0, 3)
    assert "1 of 3 ranks have no part of any global batch" in caplog.text


def test_nothing_moves_until_commit() -> None:
    sampler = ElasticBatchSampler(10, 4, shuffle=False)
    before = sampler.state_dict()
    assert list(sampler) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    sampler.consume()
    sampler.consume()
    assert (sampler.state_dict(), len(sampler), sampler.position) == (before, 3, (0, 2))
    sampler.commit()
    assert (sampler.cursor, len(sampler), sampler.pending) == (8, 1, ())
    assert list(sampler) == [[8, 9]]


def test_a_running_iterator_does_not_notice_later_changes() -> None:
    sampler = ElasticBatchSampler(10, 4, shuffle=False)
    iterator = iter(sampler)
    sampler.consume()
    sampler.commit()
    sampler.set_world(1, 2)
    assert list(iterator) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_after_the_last_epoch_there_is_nothing_to_consume() -> None:
    sampler = ElasticBatchSampler(4, 4)
    sampler.consume()
    assert not sampler.finished
    with pytest.raises(StopIteration):
        sampler.consume()
    sampler.commit()
    assert (sampler.finished, sampler.epoch, sampler.cursor, len(sampler), list(sampler)) == (True, 1, 0, 0, [])


def test_steps_that_go_on_behind_the_end_of_the_data_are_an_error_but_one_that_drew_its_rest_is_not() -> None:
    sampler = ElasticBatchSampler(4, 4)
    sampler.consume()
    for _ in range(3):  # the first of them has a batch
        with pytest.raises(StopIteration):
            sampler.consume()
        sampler.commit()
    with pytest.raises(NonRetryableException, match=r"the last 2 train steps had no batch"):
        sampler.consume()


def test_what_another_thread_has_drawn_is_not_committed() -> None:
    sampler = ElasticBatchSampler(8, 4)
    thread = threading.Thread(target=sampler.consume)
    thread.start()
    thread.join()
    with pytest.raises(NonRetryableException, match="on another thread"):
        sampler.commit()
    assert sampler.cursor == 0
    sampler.rollback()
    sampler.consume()
    sampler.commit()
    assert sampler.cursor == 4


@pytest.mark.parametrize("counts", [False, True])
def test_who_takes_batches_and_counts_none_is_told_once(counts: bool, caplog: pytest.LogCaptureFixture) -> None:
    sampler = ElasticBatchSampler(40, 4)
    batches = iter(sampler)
    for _ in range(6):
        next(batches)
        if counts:
            sampler.consume()
        sampler.commit()
    assert caplog.text.count("sampler.consume()") == (0 if counts else 1)


def test_the_size_of_batches_cannot_be_changed_without_an_effect() -> None:
    sampler = ElasticBatchSampler(40, 4)
    with pytest.raises(AttributeError, match="global_batch_size"):
        sampler.global_batch_size = 8  # type: ignore[misc]  # that is what is tested
    assert (len(sampler), sampler.global_batch_size) == (10, 4)


def test_the_state_is_plain_integers_and_resumes_in_another_world() -> None:
    sampler = ElasticBatchSampler(100, 8, epochs=3, seed=5)
    for _ in range(15):
        sampler.consume()
    sampler.commit()
    sampler.consume()
    state = sampler.state_dict()
    assert {type(value) for value in state.values()} == {int}
    other = ElasticBatchSampler(100, 8, epochs=9, seed=5)
    other.set_world(1, 2)
    other.load_state_dict(state)
    assert (other.epoch, other.cursor) == (1, 16)
    assert other.consume().indices == tuple(epoch_order(100, 5, 1, shuffle=True)[20:24].tolist())


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("dataset_size", ElasticBatchSampler(11, 4)),
        ("global_batch_size", ElasticBatchSampler(10, 5)),
        ("seed", ElasticBatchSampler(10, 4, seed=1)),
        ("shuffle", ElasticBatchSampler(10, 4, shuffle=False)),
        ("drop_last", ElasticBatchSampler(10, 4, drop_last=True)),
    ],
)
def test_a_state_of_other_data_is_refused_by_the_name_of_the_field(field: str, other: ElasticBatchSampler) -> None:
    sampler = ElasticBatchSampler(10, 4)
    sampler.consume()
    with pytest.raises(ValueError, match=field):
        sampler.load_state_dict(other.state_dict())
    assert len(sampler.pending) == 1


@pytest.mark.parametrize("damage", [{"cursor": 3}, {"cursor": 12}, {"cursor": -4}, {"epoch": -1}])
def test_a_position_between_batches_is_refused(damage: dict[str, int]) -> None:
    sampler = ElasticBatchSampler(10, 4)
    with pytest.raises(ValueError, match="damaged"):
        sampler.load_state_dict({**sampler.state_dict(), **damage})
    assert sampler.position == (0, 0)


def test_an_incomplete_state_is_refused_by_the_name_of_what_is_missing() -> None:
    state = ElasticBatchSampler(10, 4).state_dict()
    del state["cursor"], state["seed"]
    with pytest.raises(ValueError, match="cursor, seed missing"):
        ElasticBatchSampler(10, 4).load_state_dict(state)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="dataset_size=0"):
        ElasticBatchSampler([], 4)
    with pytest.raises(ValueError, match="a generator has no length"):
        ElasticBatchSampler((number for number in range(3)), 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="global_batch_size=0"):
        ElasticBatchSampler(10, 0)
    with pytest.raises(ValueError, match="drop_last leaves no batch"):
        ElasticBatchSampler(3, 4, drop_last=True)
    with pytest.raises(ValueError, match="rank 2 is not in a world of 2"):
        ElasticBatchSampler(10, 4).set_world(2, 2)
    with pytest.raises(ValueError, match="batch 3 does not exist"):
        ElasticBatchSampler(10, 4).shares(3)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda sampler: pickle.loads(pickle.dumps(sampler))])
def test_a_copy_goes_on_alike_and_carries_no_permutation(clone: object) -> None:
    assert callable(clone)
    sampler = ElasticBatchSampler(100_000, 4)
    sampler.consume()
    twin = clone(sampler)
    assert twin.pending == sampler.pending
    assert twin.consume() == sampler.consume()
    assert len(pickle.dumps(sampler)) < 2000
