"""Who fetches which shard from whom, and which copies are made again; against brute force."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.checkpoint.restore_plan import (
    Fetch,
    Held,
    RestorePlan,
    ShardSource,
    candidates,
    lost_copies,
    missing_copies,
    nearness,
    plan_reads,
    restore_plan,
)

#: By shard, the ranks that hold it.
Holders = dict[str, set[int]]


def sources_of(held: Mapping[str, set[int]]) -> dict[str, list[ShardSource]]:
    return {shard: [ShardSource(rank) for rank in sorted(ranks)] for shard, ranks in held.items()}


# --- copies -----------------------------------------------------------------------------------------------------------


def missing(
    held: Mapping[str, set[int]], hosts: Sequence[str], losses: int, size_bytes: int | Mapping[str, int] = 5
) -> list[Fetch[str]]:
    sizes = dict.fromkeys(held, size_bytes) if isinstance(size_bytes, int) else size_bytes
    return missing_copies(sources_of(held), hosts, sizes, losses=losses)


def received_bytes(copies: list[Fetch[str]]) -> dict[int, int]:
    receivers = {copy.receiver for copy in copies}
    return {rank: sum(copy.size_bytes for copy in copies if copy.receiver == rank) for rank in receivers}


def is_covered(held: Mapping[str, set[int]], hosts: Sequence[str], losses: int) -> bool:
    """Whether every shard is left whichever hosts are lost; tries them all."""
    names = sorted(set(hosts))
    for lost in combinations(names, min(losses, len(names) - 1)):
        if any(all(hosts[rank] in lost for rank in ranks) for ranks in held.values()):
            return False
    return True


def after(held: Holders, copies: list[Fetch[str]]) -> Holders:
    found = {shard: set(ranks) for shard, ranks in held.items()}
    for copy in copies:
        found[copy.shard].add(copy.receiver)
    return found


def test_only_what_no_other_host_holds_is_copied_and_everybody_receives_alike() -> None:
    assert missing({"model": {0, 1, 2, 3}}, "aabb", 1) == []
    held = {"model": {0, 1, 2, 3}} | {f"optimizer{rank}": {rank} for rank in range(4)}
    copies = missing(held, "aabb", 1, dict.fromkeys(held, 10))
    assert {copy.shard for copy in copies} == held.keys() - {"model"}
    assert received_bytes(copies) == {0: 10, 1: 10, 2: 10, 3: 10}


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Holders, Sequence[str], int, dict[str, int]]:
    hosts = draw(st.sampled_from(["ab", "abc", "aab", "aabb", "abcd", "aabc"]))
    losses = draw(st.integers(0, len(set(hosts)) - 1))
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    held = {f"shard{number}": draw(st.sets(st.integers(0, len(hosts) - 1), min_size=1)) for number in range(len(sizes))}
    return held, hosts, losses, dict(zip(held, sizes, strict=True))


def every_outcome(held: Holders, hosts: Sequence[str], losses: int, sizes: dict[str, int]) -> list[tuple[int, int]]:
    """(bytes, the most that one rank receives) of every set of copies that covers the losses."""
    options = []
    for shard, there in held.items():
        free = [rank for rank in range(len(hosts)) if rank not in there]
        sets = [chosen for count in range(len(free) + 1) for chosen in combinations(free, count)]
        options.append([(shard, one) for one in sets if is_covered({shard: there | set(one)}, hosts, losses)])
    found = []
    for choice in product(*options):
        received = dict.fromkeys(range(len(hosts)), 0)
        for shard, ranks in choice:
            for rank in ranks:
                received[rank] += sizes[shard]
        found.append((sum(received.values()), max(received.values())))
    return found


@settings(max_examples=60, deadline=None)
@given(worlds())
def test_every_loss_is_covered_with_the_fewest_bytes_and_nobody_receives_twice_as_much_as_needed(
    world: tuple[Holders, Sequence[str], int, dict[str, int]],
) -> None:
    held, hosts, losses, sizes = world
    copies = missing(held, hosts, losses, sizes)
    assert is_covered(after(held, copies), hosts, losses)
    for copy in copies:
        assert set(copy.holders) == held[copy.shard]
        assert copy.receiver not in held[copy.shard]
    least_bytes, least_peak = min(every_outcome(*world))
    assert sum(copy.size_bytes for copy in copies) == least_bytes
    assert max(received_bytes(copies).values(), default=0) <= 2 * least_peak


def test_who_lost_the_copies_that_it_keeps_for_others_makes_them_again() -> None:
    def lost(held: list[list[int]], roots: str, partners: list[list[int]]) -> dict[int, list[int]]:
        (found,) = candidates([[Held(1, range(2), shards)] for shards in held])
        return lost_copies(found.sources, roots, partners)

    assert lost([[0, 1], [0, 1]], "ab", [[1], [0]]) == {}
    assert lost([[0, 1], []], "ab", [[1], [0]]) == {1: [0]}, "its own one it has loaded"
    assert lost([[], [0, 1]], "ab", [[1], [0]]) == {0: [1]}
    assert lost([[0, 1], []], "aa", [[1], [0]]) == {}, "both on one host, where one copy lies"
    assert lost([[0, 1], []], "ab", [[], []]) == {}, "nobody keeps copies"
    assert lost([[0, 1]], "a", []) == {}
    assert lost([[0, 1], [], []], "abc", [[1], [2], [0]]) == {1: [0], 2: [1]}
    assert lost([[0, 1], [], [], []], "aabb", [[2, 3], [3], [], []]) == {2: [0], 3: [1]}, "one copy for each host"


def test_a_copy_on_the_own_host_is_read_first_then_those_of_the_others_in_turn() -> None:
    sources = {0: [ShardSource(rank) for rank in range(4)]}

    def order(reader: int) -> list[int]:
        plan = plan_reads(sources, {reader: [0]}, distance=nearness(["a", "a", "b", "c"]))
        return [source.rank for source in plan[reader][0]]

    assert (order(1), order(2)) == ([0, 1, 2, 3], [2, 3, 0, 1])


# --- a whole plan -----------------------------------------------------------------------------------------------------


def planned(held: Mapping[str, str], shards: int, hosts: str, copies: int = 1) -> RestorePlan[int, int]:
    """Of a save whose shards are digits, by host; each rank wants its own, the first of each host the last one too."""
    (found,) = candidates([[Held(1, range(shards), [int(one) for one in held.get(host, "")])] for host in hosts])
    last = shards - 1
    wanted = {
        rank: [*([rank] if rank < last else []), *([last] if hosts.index(host) == rank else [])]
        for rank, host in enumerate(hosts)
    }
    sizes = {shard: 100 + shard for shard in range(shards)}
    folders = [f"folder-{host}" for host in hosts]
    return restore_plan(found, wanted, folders=folders, hosts=hosts, size_bytes=sizes, losses=copies)


def fetched(plan: RestorePlan[int, int]) -> dict[tuple[int, int], tuple[int, ...]]:
    """By receiver and shard."""
    return {(one.receiver, one.shard): one.holders for one in plan.fetches}


def test_a_replaced_host_fetches_what_its_ranks_want_and_nothing_else() -> None:
    assert fetched(planned({"a": "023", "c": "123"}, 4, "abc")) == {(1, 1): (2,), (1, 3): (0, 2)}
    assert set(fetched(planned({"a": "01234"}, 5, "aabb"))) == {(2, 2), (3, 3), (2, 4)}


def test_two_folders_that_are_lost_together_do_not_count_as_two_hosts() -> None:
    (found,) = candidates([[Held(1, range(3), shards)] for shards in ([0, 1, 2], [0, 1, 2], [2])])
    sizes = dict.fromkeys(range(3), 1)
    plan = restore_plan(found, {}, folders="abc", hosts=["rack-1", "rack-1", "rack-2"], size_bytes=sizes, losses=1)
    assert {(copy.receiver, copy.shard) for copy in plan.copies} == {(2, 0), (2, 1)}


@st.composite
def situations(draw: st.DrawFn) -> tuple[dict[str, str], int, str, int]:
    hosts = "".join(draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=6)))
    shards = draw(st.integers(2, 7))
    digits = st.lists(st.sampled_from([str(shard) for shard in range(shards)]), unique=True)
    return {host: "".join(draw(digits)) for host in set(hosts)}, shards, hosts, draw(st.integers(0, 3))


@given(situations())
def test_any_plan_brings_what_is_wanted_and_then_survives_the_loss_of_any_hosts_it_can(
    situation: tuple[dict[str, str], int, str, int],
) -> None:
    held, shards, hosts, copies = situation
    lost = sorted({*map(str, range(shards))} - {*"".join(held.values())})
    if lost:
        with pytest.raises(CorruptCheckpointError, match=f"nobody has a good copy of shard {', '.join(lost)} of 1"):
            planned(*situation)
        return
    plan = planned(*situation)
    found = {host: {int(one) for one in there} for host, there in held.items()}
    for one in (*plan.fetches, *plan.copies):
        assert all(one.shard in found[hosts[holder]] for holder in one.holders)
        assert one.shard not in found[hosts[one.receiver]]
        found[hosts[one.receiver]].add(one.shard)
    for rank, host in enumerate(hosts):
        assert set(plan.wanted[rank]) <= found[host]
        assert {(one.receiver, one.shard) for one in plan.fetches} <= {
            (each, shard) for each, there in plan.wanted.items() for shard in there
        }
        assert rank in plan.wanted
    kept = min(copies + 1, len(set(hosts)))
    assert all(sum(shard in there for there in found.values()) >= kept for shard in range(shards))
