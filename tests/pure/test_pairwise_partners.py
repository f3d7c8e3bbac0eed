"""Pairs of hosts for any number of hosts."""

from __future__ import annotations

import pytest

from torchelastic.checkpoint.replication import PairwiseReplicationStrategy


def strategy_of(hosts: int, per_host: int) -> PairwiseReplicationStrategy:
    return PairwiseReplicationStrategy([f"h:{rank}" for rank in range(hosts * per_host)], per_host)


@pytest.mark.parametrize("hosts", range(2, 10))
@pytest.mark.parametrize("per_host", [1, 3])
def test_every_rank_gives_to_the_same_place_of_another_host_and_receives_from_one(hosts: int, per_host: int) -> None:
    strategy = strategy_of(hosts, per_host)
    chosen = [strategy.get_destination_ranks(rank) for rank in range(hosts * per_host)]
    for rank, (partner,) in enumerate(chosen):
        assert partner // per_host != rank // per_host
        assert partner % per_host == rank % per_host
        if hosts % 2 == 0:
            assert chosen[partner] == [rank]
    assert sorted(partner for (partner,) in chosen) == list(range(hosts * per_host))


def test_addresses_are_told_as_they_were_given() -> None:
    strategy = strategy_of(2, 2)
    assert strategy.get_destination_addresses(1) == ["h:3"]
    assert strategy.get_replication_service_addresses() == ["h:0", "h:1", "h:2", "h:3"]


def test_a_single_host_has_no_partner() -> None:
    assert strategy_of(1, 4).get_destination_ranks(2) == []


@pytest.mark.parametrize(("count", "per_host"), [(0, 1), (3, 2), (2, 0)])
def test_addresses_that_make_no_hosts_are_refused(count: int, per_host: int) -> None:
    with pytest.raises(ValueError, match="address"):
        PairwiseReplicationStrategy(["h:1"] * count, per_host)


def test_no_addresses_at_all_are_refused_too() -> None:
    with pytest.raises(ValueError, match="is empty"):
        PairwiseReplicationStrategy(None, 2)  # type: ignore[arg-type]


def test_a_rank_beyond_the_last_is_refused() -> None:
    with pytest.raises(ValueError, match="no rank 4"):
        strategy_of(2, 2).get_destination_ranks(4)
