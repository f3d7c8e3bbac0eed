from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchelastic.data.order import epoch_order, mixed_seed


@given(st.integers(), st.integers(0, 10_000), st.integers(0, 10_000))
def test_two_epochs_of_one_run_never_share_a_seed(seed: int, epoch: int, other: int) -> None:
    assert (mixed_seed(seed, epoch) == mixed_seed(seed, other)) == (epoch == other)


def test_the_next_seed_does_not_repeat_this_one_shifted_by_an_epoch() -> None:
    # where seed and epoch are added, run 1 has the orders of run 0 one epoch earlier
    seeds = {mixed_seed(seed, epoch) for seed in range(30) for epoch in range(100)}
    assert len(seeds) == 3000


@given(st.integers(), st.integers(0, 2**40))
def test_a_seed_fits_the_part_that_the_generator_uses(seed: int, epoch: int) -> None:
    assert 0 <= mixed_seed(seed, epoch) < 2**32


@given(st.integers(0, 200), st.integers(), st.integers(0, 100), st.booleans())
def test_an_order_is_a_permutation_and_repeatable(size: int, seed: int, epoch: int, shuffle: bool) -> None:
    order = epoch_order(size, seed, epoch, shuffle=shuffle).tolist()
    assert sorted(order) == list(range(size))
    assert order == epoch_order(size, seed, epoch, shuffle=shuffle).tolist()
    if not shuffle:
        assert order == list(range(size))


def test_the_order_is_pinned_because_checkpoints_depend_on_it() -> None:
    assert (mixed_seed(0, 0), mixed_seed(7, 3)) == (2969658075, 3976712674)
    assert epoch_order(8, 7, 3, shuffle=True).tolist() == [1, 0, 5, 7, 4, 3, 2, 6]
