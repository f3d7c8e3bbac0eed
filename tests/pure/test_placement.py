"""Cliques by numbers and across failure domains, and who gives what to whom on retrieval."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from torchelastic.checkpoint.replication import (
    ExchangePlan,
    ExchangePlanEntry,
    FailureDomains,
    NoReplicasAvailableError,
    parse_group_sequence,
    retrieve_plan,
)
from torchelastic.checkpoint.replication.placement import Level


def one_rank_each(hosts: int) -> FailureDomains:
    return FailureDomains.from_roster([(rank, f"host{rank:03}") for rank in range(hosts)])


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


def test_the_documented_example_of_nvrx() -> None:
    groups = parse_group_sequence(8, 2, 32)
    assert groups == [[rank, rank + 8] for rank in (*range(8), *range(16, 24))]


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 5))
def test_cliques_are_runs_within_one_remainder(jump: int, factor: int, blocks: int) -> None:
    world = jump * factor * blocks
    expected = []
    for remainder in range(jump):
        walked = list(range(remainder, world, jump))
        expected += [walked[start : start + factor] for start in range(0, len(walked), factor)]
    assert parse_group_sequence(jump, factor, world) == sorted(expected)


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


def test_hosts_of_equal_size_are_partners_as_a_whole() -> None:
    domains = FailureDomains.from_roster([(rank, "abcd"[rank // 2]) for rank in range(8)])
    assert domains.pairs() == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_racks_are_crossed_when_they_are_named() -> None:
    hosts = [(rank, f"host{rank}") for rank in range(4)]
    domains = FailureDomains.from_roster(hosts, racks={"host0": "x", "host1": "x", "host2": "y", "host3": "y"})
    assert domains.groups("rack") == {"x": (0, 1), "y": (2, 3)}
    assert domains.pairs("rack") == [[0, 2], [1, 3]]
    assert domains.domain_of("rack") == {0: "x", 1: "x", 2: "y", 3: "y"}


def test_an_odd_world_gets_one_larger_clique() -> None:
    assert one_rank_each(5).pairs() == [[0, 2, 4], [1, 3]]
    assert one_rank_each(3).pairs() == [[0, 1, 2]]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=16), st.integers(1, 4), st.sampled_from(["host", "rack"]))
def test_cliques_never_meet_in_a_domain(homes: list[int], factor: int, level: Level) -> None:
    roster = [(rank, f"host{home}") for rank, home in enumerate(homes)]
    domains = FailureDomains.from_roster(roster, racks={f"host{home}": f"rack{home % 3}" for home in homes})
    home_of = domains.domain_of(level)
    number = len(homes) // factor
    fits = number > 0 and max(map(len, domains.groups(level).values())) <= number
    if not fits:
        with pytest.raises(ValueError, match="lower the"):
            domains.cliques_across(factor, level)
        return
    cliques = domains.cliques_across(factor, level)
    assert sorted(rank for clique in cliques for rank in clique) == list(range(len(homes)))
    assert len(cliques) == number
    for clique in cliques:
        assert factor <= len(clique) == len({home_of[rank] for rank in clique})
    sizes = [len(clique) for clique in cliques]
    assert max(sizes) - min(sizes) <= 1


def test_the_order_of_the_roster_does_not_matter() -> None:
    roster = [(rank, f"host{rank % 3}") for rank in range(9)]
    assert FailureDomains.from_roster(roster) == FailureDomains.from_roster(reversed(roster))


def test_what_is_wrong_with_a_roster_is_said() -> None:
    with pytest.raises(ValueError, match="roster is empty"):
        FailureDomains.from_roster([])
    with pytest.raises(ValueError, match=r"in the roster twice: rank 1; each"):
        FailureDomains.from_roster([(0, "a"), (1, "a"), (1, "b")])
    with pytest.raises(ValueError, match=r"no rack is known of rank 1: label their hosts"):
        FailureDomains.from_roster([(0, "a"), (1, "b")], racks={"a": "x"}).pairs("rack")
    with pytest.raises(ValueError, match="'row' is no level"):
        one_rank_each(2).groups("row")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="host 'a' has 2 of 3 ranks"):
        FailureDomains.from_roster([(0, "a"), (1, "a"), (2, "b")]).pairs()


# --- retrieval --------------------------------------------------------------------------------------------------------


def test_an_own_copy_is_preferred_and_others_follow() -> None:
    plan = retrieve_plan({0: ["a"], 1: ["a"], 2: ["a"]}, {1: "a"}, rank=1)
    assert plan.entries == (ExchangePlanEntry(sender=1, receiver=1, id_="a"),)
    assert plan.candidates(1, "a") == (1, 0, 2)
    assert plan.required_ids() == {"a"}
    assert plan.required_ids(0) == set()


def test_senders_are_balanced() -> None:
    available = {0: ["a", "b", "c", "d"], 1: ["a", "b", "c", "d"]}
    plan = retrieve_plan(available, {2: "a", 3: "b", 4: "c", 5: "d"})
    assert [entry.sender for entry in plan.entries] == [0, 1, 0, 1]
    assert plan.required_ids(0) == {"a", "c"}


def test_bytes_count_if_they_are_known() -> None:
    available = {0: ["a", "b", "c"], 1: ["a", "b", "c"]}
    plan = retrieve_plan(available, {2: "a", 3: "b", 4: "c"}, size_bytes={"a": 100, "b": 10, "c": 10})
    assert [entry.sender for entry in plan.entries] == [0, 1, 1]


def test_what_has_one_holder_goes_first() -> None:
    plan = retrieve_plan({0: ["a", "b"], 1: ["a"]}, {2: "a", 3: "b"})
    assert [(entry.sender, entry.receiver) for entry in plan.entries] == [(1, 2), (0, 3)]


def test_ids_of_checkpoints_are_tuples() -> None:
    mine, yours = (10, 0, "session"), (10, 1, "session")
    plan = retrieve_plan({0: [mine, yours], 1: []}, {0: mine, 1: yours})
    assert plan.entries == (ExchangePlanEntry(0, 0, mine), ExchangePlanEntry(0, 1, yours))


def test_who_wants_nothing_gets_nothing() -> None:
    assert retrieve_plan({0: ["a"]}, {0: None, 1: None}).entries == ()


def test_everything_that_is_missing_is_named() -> None:
    with pytest.raises(NoReplicasAvailableError, match=r"no member holds 'x', 'y'; load an older"):
        retrieve_plan({0: ["a"]}, {0: "y", 1: "x", 2: "a"})
    with pytest.raises(ValueError, match="size_bytes lacks 'a'"):
        retrieve_plan({0: ["a"]}, {1: "a"}, size_bytes={})
    with pytest.raises(ValueError, match="whose ids"):
        ExchangePlan[str]().required_ids()


@given(
    st.dictionaries(st.integers(0, 5), st.sets(st.integers(0, 5))),
    st.dictionaries(st.integers(0, 7), st.integers(0, 5)),
)
def test_plans_are_right_and_equal_everywhere(available: dict[int, set[int]], wanted: dict[int, int]) -> None:
    assume(all(any(id_ in held for held in available.values()) for id_ in wanted.values()))
    plan = retrieve_plan(available, wanted)
    shuffled = retrieve_plan(
        {rank: sorted(available[rank], reverse=True) for rank in reversed(available)},
        {receiver: wanted[receiver] for receiver in reversed(wanted)},
    )
    assert plan.entries == shuffled.entries
    assert [entry.receiver for entry in plan.entries] == sorted(wanted)
    for entry in plan.entries:
        candidates = plan.candidates(entry.receiver, entry.id_)
        assert entry.id_ == wanted[entry.receiver]
        assert candidates[0] == entry.sender
        assert set(candidates) == {rank for rank, held in available.items() if entry.id_ in held}
        if entry.receiver in candidates:
            assert entry.sender == entry.receiver
