"""Cliques by numbers and across failure domains, and who gives what to whom on retrieval."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from torchelastic.checkpoint.replicas.placement import holders_of, partners, retrieve_plan
from torchelastic.checkpoint.replication import (
    ExchangePlan,
    NoReplicasAvailableError,
    parse_group_sequence,
)

# --- NVRx's rule ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("jump", "factor", "world", "groups"),
    [
        (1, 2, 4, [[0, 1], [2, 3]]),
        (2, 2, 4, [[0, 2], [1, 3]]),
        (1, 4, 4, [[0, 1, 2, 3]]),
        (4, 2, 16, [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]),
        (2, 3, 6, [[0, 2, 4], [1, 3, 5]]),
        (3, 1, 3, [[0], [1], [2]]),
    ],
)
def test_cliques_of_nvrx(jump: int, factor: int, world: int, groups: list[list[int]]) -> None:
    assert parse_group_sequence(jump, factor, world) == groups


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 2, 4), "replication_jump is 0; it must be at least 1"),
        ((1, -1, 4), "replication_factor is -1; it must be at least 1"),
        ((1, 2, 0), "world_size is 0; it must be at least 1"),
        ((2, 2, 6), r"world_size 6 is no multiple of .* = 4; run with a multiple of 4 ranks"),
        ((4, 1, 6), r"world_size 6 is no multiple of .* = 4"),
    ],
)
def test_impossible_numbers_are_named(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_group_sequence(*arguments)


# --- failure domains --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "copies", "expected"),
    [
        ("aabbccdd", 1, [[4], [5], [6], [7], [0], [1], [2], [3]]),  # hosts of equal size are partners as a whole
        ("abcd", 1, [[2], [3], [0], [1]]),
        ("abc", 1, [[1], [2], [0]]),  # an odd world: each of three gives to the next, so nobody holds more than two
        ("abcde", 1, [[2], [3], [4], [1], [0]]),
        ("abc", 2, [[1, 2], [0, 2], [0, 1]]),
        ("aabbcc", 2, [[2, 4], [3, 5], [0, 4], [1, 5], [0, 2], [1, 3]]),
        ("aaab", 1, [[3], [3], [3], [0]]),  # no pairs: one host has more than half of the ranks
        ("ab", 3, [[1], [0]]),
        ("aaa", 1, [[], [], []]),
        ("a", 2, [[]]),
    ],
)
def test_who_gets_the_copies(hosts: str, copies: int, expected: list[list[int]]) -> None:
    assert [partners(hosts, rank, copies) for rank in range(len(hosts))] == expected


@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=16), st.integers(0, 4))
def test_copies_lie_on_as_many_other_hosts_as_were_asked_for_or_are_there(hosts: list[str], copies: int) -> None:
    number = min(copies, len(set(hosts)) - 1)
    received = dict.fromkeys(range(len(hosts)), 0)
    for rank, host in enumerate(hosts):
        others = partners(hosts, rank, copies)
        assert len(others) == len({hosts[other] for other in others} - {host}) == number
        for other in others:
            received[other] += 1
    if max(map(hosts.count, hosts)) <= len(hosts) // (number + 1):
        assert set(received.values()) == {number}, "nobody holds more than he would in a clique"


@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=13), st.integers(1, 3), st.integers(1, 4))
def test_any_world_has_holders_of_every_shard(hosts: list[str], jump: int, factor: int) -> None:
    """As NVRx says where it can cut the world, else on as many hosts as the factor says."""
    for rank in range(len(hosts)):
        found = holders_of(rank, jump, factor, hosts)
        if len(hosts) % (jump * factor) == 0:
            assert found in parse_group_sequence(jump, factor, len(hosts))
        elif len(set(hosts)) >= factor:
            assert len(found) == len({hosts[holder] for holder in found}) == factor
        else:
            assert len(found) == len({holder // jump for holder in found}) == min(factor, -(-len(hosts) // jump))
        assert rank in found
        assert found == sorted(found)
    with pytest.raises(ValueError, match="replication_factor is 0"):
        holders_of(0, jump, 0, hosts)


# --- retrieval --------------------------------------------------------------------------------------------------------


def test_senders_are_balanced() -> None:
    available = {0: ["a", "b", "c", "d"], 1: ["a", "b", "c", "d"]}
    plan = retrieve_plan(available, {2: ["a"], 3: ["b"], 4: ["c"], 5: ["d"]})
    assert [entry.sender for entry in plan.entries] == [0, 1, 0, 1]
    assert plan.required_ids(0) == {"a", "c"}


def test_everything_that_is_missing_is_named() -> None:
    with pytest.raises(NoReplicasAvailableError, match=r"no member holds 'x', 'y'; load an older"):
        retrieve_plan({0: ["a"]}, {0: ["y"], 1: ["x"], 2: ["a"]})
    with pytest.raises(ValueError, match="whose ids"):
        ExchangePlan[str]().required_ids()


@given(
    st.dictionaries(st.integers(0, 5), st.sets(st.integers(0, 5))),
    st.dictionaries(st.integers(0, 7), st.integers(0, 5)),
)
def test_plans_are_right_and_equal_everywhere(available: dict[int, set[int]], wanted: dict[int, int]) -> None:
    assume(all(any(id_ in held for held in available.values()) for id_ in wanted.values()))
    plan = retrieve_plan(available, {receiver: [id_] for receiver, id_ in wanted.items()})
    shuffled = retrieve_plan(
        {rank: sorted(available[rank], reverse=True) for rank in reversed(available)},
        {receiver: [wanted[receiver]] for receiver in reversed(wanted)},
    )
    assert plan.entries == shuffled.entries
    assert [entry.receiver for entry in plan.entries] == sorted(wanted)
    for entry in plan.entries:
        holders = {rank for rank, held in available.items() if entry.id_ in held}
        assert entry.id_ == wanted[entry.receiver]
        assert entry.sender in holders
        if entry.receiver in holders:
            assert entry.sender == entry.receiver
