"""The coverage planner against brute force: never a byte too many, and proven by enumeration of all losses."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchelastic.checkpoint.replication import (
    Copy,
    FailureDomains,
    Loss,
    NoReplicasAvailableError,
    coverage_plan,
    proof,
    rereplication_plan,
)

Held = dict[int, dict[str, int]]


def on_hosts(hosts: str) -> FailureDomains:
    """Rank i on the host of the i-th letter."""
    return FailureDomains.from_roster(list(enumerate(hosts)))


def test_plain_data_parallelism_needs_nothing() -> None:
    domains = on_hosts("aabb")
    held = {rank: {"model": 100, "optimizer": 200} for rank in range(4)}
    plan = coverage_plan(held, domains)
    assert plan.copies == ()
    assert plan.extra_bytes == 0
    assert plan.peak_is_least
    assert proof(held, domains) == []


def test_only_what_no_other_domain_holds_is_copied() -> None:
    domains = on_hosts("aabb")
    held = {rank: {"model": 1000, f"optimizer{rank}": 10} for rank in range(4)}
    plan = coverage_plan(held, domains)
    assert plan.extra_bytes == 40
    assert plan.received_bytes == {0: 10, 1: 10, 2: 10, 3: 10}
    assert {copy.shard for copy in plan.copies} == {f"optimizer{rank}" for rank in range(4)}
    assert proof(plan.applied_to(held), domains) == []


def test_the_proof_names_domains_and_shards() -> None:
    domains = on_hosts("abc")
    held = {0: {"x": 1, "y": 1}, 1: {"y": 1}, 2: {"z": 1}}
    assert proof(held, domains) == [Loss(("a",), ("x",)), Loss(("c",), ("z",))]
    assert proof(held, domains, losses=2) == [
        Loss(("a", "b"), ("x", "y")),
        Loss(("a", "c"), ("x", "z")),
        Loss(("b", "c"), ("z",)),
    ]


def test_two_copies_on_one_host_do_not_count_twice() -> None:
    domains = on_hosts("aab")
    held = {0: {"x": 5}, 1: {"x": 5}}
    assert coverage_plan(held, domains).copies == (Copy(0, 2, "x", 5),)


def test_who_holds_nothing_may_receive_and_senders_take_turns() -> None:
    domains = on_hosts("abc")
    held = {0: {"x": 5, "y": 5}, 1: {"x": 5, "y": 5}}
    plan = coverage_plan(held, domains, losses=2)
    assert [(copy.receiver, copy.shard) for copy in plan.copies] == [(2, "x"), (2, "y")]
    assert {copy.sender for copy in plan.copies} == {0, 1}


def test_largest_first_is_improved_by_the_search() -> None:
    """Sizes 3 3 2 2 2 on two receivers: largest first ends with 7, six and six is possible."""
    domains = on_hosts("abc")
    held = {0: {"p": 3, "q": 3, "r": 2, "s": 2, "t": 2}}
    assert max(coverage_plan(held, domains, most_nodes=0).received_bytes.values()) == 7
    assert not coverage_plan(held, domains, most_nodes=0).peak_is_least
    plan = coverage_plan(held, domains)
    assert plan.received_bytes == {1: 6, 2: 6}
    assert plan.peak_is_least


def test_impossible_requests_are_explained() -> None:
    held = {0: {"x": 1}}
    with pytest.raises(ValueError, match=r"1 host\(s\) cannot survive the loss of any 1; lower losses to 0"):
        coverage_plan(held, on_hosts("aa"))
    with pytest.raises(ValueError, match="losses is -1"):
        coverage_plan(held, on_hosts("ab"), losses=-1)
    with pytest.raises(ValueError, match="rank 7 holds shards and is in no failure domain"):
        coverage_plan({7: {"x": 1}}, on_hosts("ab"))
    with pytest.raises(ValueError, match="'x' has 2 bytes at rank 1 and 1 at another"):
        coverage_plan({0: {"x": 1}, 1: {"x": 2}}, on_hosts("ab"))
    with pytest.raises(ValueError, match="'x' of rank 0 has -1 bytes"):
        coverage_plan({0: {"x": -1}}, on_hosts("ab"))


def test_after_a_loss_coverage_is_restored() -> None:
    domains = on_hosts("abcd")
    held: Held = {0: {"x": 4}, 1: {"x": 4}, 2: {"y": 6}, 3: {"y": 6}}
    plan = rereplication_plan(held, {1}, domains)
    assert plan.copies in ((Copy(0, 2, "x", 4),), (Copy(0, 3, "x", 4),))
    after = plan.applied_to({rank: held[rank] for rank in (0, 2, 3)})
    assert proof(after, domains.without({1})) == []


def test_with_one_domain_left_the_plan_says_what_it_covers() -> None:
    plan = rereplication_plan({0: {"x": 4}, 1: {"x": 4}}, {1}, on_hosts("ab"), losses=1)
    assert plan.copies == ()
    assert plan.losses == 0


def test_what_only_the_lost_held_is_named() -> None:
    with pytest.raises(NoReplicasAvailableError, match="nobody who is left holds 'y', 'z'"):
        rereplication_plan({0: {"x": 4}, 1: {"z": 4, "y": 1}}, {1}, on_hosts("abc"))


def test_a_large_world_is_planned_without_a_search() -> None:
    domains = FailureDomains.from_roster([(rank, f"host{rank // 8:03}") for rank in range(512)])
    held = {rank: {f"shard{rank:03}": 1000 + rank} for rank in range(512)}
    plan = coverage_plan(held, domains, losses=2)
    assert plan.extra_bytes == 2 * sum(1000 + rank for rank in range(512))
    assert max(plan.received_bytes.values()) < 1.25 * plan.extra_bytes / 512
    assert proof(plan.applied_to(held), domains, losses=1) == []


# --- against brute force ----------------------------------------------------------------------------------------------


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Held, FailureDomains, int]:
    hosts = draw(st.sampled_from(["ab", "abc", "aab", "aabb", "abcd", "aabc"]))
    losses = draw(st.integers(0, len(set(hosts)) - 1))
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    held: Held = {rank: {} for rank in range(len(hosts))}
    for number, size in enumerate(sizes):
        for rank in draw(st.sets(st.integers(0, len(hosts) - 1), min_size=1)):
            held[rank][f"shard{number}"] = size
    return held, on_hosts(hosts), losses


def every_outcome(held: Held, domains: FailureDomains, losses: int) -> list[tuple[int, int]]:
    """(bytes, peak) of every set of extra copies after which `proof` finds nothing."""
    sizes = {shard: size for shards in held.values() for shard, size in shards.items()}
    options = []
    for shard in sorted(sizes):
        free = [rank for rank in domains.ranks if shard not in held.get(rank, {})]
        sets = [chosen for count in range(len(free) + 1) for chosen in combinations(free, count)]
        alone = {rank: {shard: 1} for rank in domains.ranks if shard in held.get(rank, {})}
        fine = [
            chosen
            for chosen in sets
            if not proof({**alone, **{rank: {shard: 1} for rank in chosen}}, domains, losses=losses)
        ]
        options.append([(shard, chosen) for chosen in fine])
    found = []
    for choice in product(*options):
        received = dict.fromkeys(domains.ranks, 0)
        for shard, ranks in choice:
            for rank in ranks:
                received[rank] += sizes[shard]
        found.append((sum(received.values()), max(received.values())))
    return found


@settings(max_examples=60, deadline=None)
@given(worlds())
def test_no_plan_copies_fewer_bytes_or_loads_anybody_less(world: tuple[Held, FailureDomains, int]) -> None:
    held, domains, losses = world
    plan = coverage_plan(held, domains, losses=losses)
    after = plan.applied_to(held)
    assert proof(after, domains, losses=losses) == []
    for copy in plan.copies:
        assert copy.shard in held[copy.sender]
        assert copy.shard not in held[copy.receiver]
    peak = max(plan.received_bytes.values(), default=0)
    assert plan.peak_is_least
    assert (plan.extra_bytes, peak) == min(every_outcome(held, domains, losses))


@settings(max_examples=60, deadline=None)
@given(worlds(), st.data())
def test_coverage_is_restored_after_any_loss_it_covered(
    world: tuple[Held, FailureDomains, int], data: st.DataObject
) -> None:
    held, domains, losses = world
    covered = coverage_plan(held, domains, losses=losses).applied_to(held)
    names = sorted(domains.groups())
    lost_hosts = data.draw(st.sets(st.sampled_from(names), max_size=losses))
    lost = {rank for name in lost_hosts for rank in domains.groups()[name]}
    plan = rereplication_plan(covered, lost, domains, losses=losses)
    left = domains.without(lost)
    after = plan.applied_to({rank: shards for rank, shards in covered.items() if rank not in lost})
    assert plan.losses == min(losses, len(left.groups()) - 1)
    assert {shard for shards in after.values() for shard in shards} == {s for shards in held.values() for s in shards}
    assert proof(after, left, losses=plan.losses) == []
