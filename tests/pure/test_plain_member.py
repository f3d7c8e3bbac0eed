"""The ranks of a script that initialises by the environment, on several hosts; and names of members."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchelastic.agent.plain_member import ranks
from torchelastic.rendezvous.member_id import MemberId
from torchelastic.rendezvous.records import NO_ROUND


def test_every_rank_is_given_once_and_all_meet_at_the_same_place_however_the_roster_is_ordered() -> None:
    roster = ("b-1-22222222x", "c-0-33333333z", "a-0-11111111y", "b-0-22222222w", "a-10-11111111v", "a-9-11111111u")
    round_ = replace(NO_ROUND, number=3, roster=roster, store_address="[fd00::1]:4000")
    given = {member: ranks(member, round_) for member in roster}
    assert sorted(int(one["RANK"]) for one in given.values()) == list(range(6))
    assert {(one["MASTER_ADDR"], one["MASTER_PORT"], one["WORLD_SIZE"]) for one in given.values()} == {
        ("fd00::1", "4000", "6")
    }
    assert given["b-0-22222222w"]["RANK"] == "0", "on the host of the store"
    on_a = [given[member]["RANK"] for member in ("a-0-11111111y", "a-9-11111111u", "a-10-11111111v")]
    assert on_a == ["3", "4", "5"], "neighbours, in the order of their places and not of their names"
    assert {one["TORCHELASTIC_RESTART_COUNT"] for one in given.values()} == {"2"}


@pytest.mark.parametrize("text", ["", "m", "node-7"])
def test_what_is_no_members_name_has_parts_all_the_same(text: str) -> None:
    assert MemberId.of(text).incarnation == text.rpartition("-")[2][:8]
