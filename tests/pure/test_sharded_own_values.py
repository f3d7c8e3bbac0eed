"""What is a rank's own: which plain tensors these are, where each rank gets its own, and who goes on with whose."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from torchelastic.checkpoint.format.header import Entry
from torchelastic.checkpoint.format.regions import Region
from torchelastic.errors import NonRetryableException
from torchelastic.sharded.commit_rule import ChosenState
from torchelastic.sharded.heirs import heirs
from torchelastic.sharded.offers import Layout, Offer, OfferedState, Phase, Piece, Version
from torchelastic.sharded.plain_tensors import own_names, pieces_of_own

ROWS = 8
WEIGHT, SCALE = "module/w", "optimizer/0/w/scale"
VERSION = Version(2, 5, 22)


def layout(rank: int, size: int, shape: tuple[int, ...] = ()) -> Layout:
    """The parts of one of so many ranks, with a plain tensor."""
    rows = ROWS // size
    weight = Entry.of(WEIGHT, "float32", (ROWS, 3), Region((rank * rows, 0), (rows, 3)), is_shard=True)
    return {WEIGHT: weight, SCALE: Entry.of(SCALE, "float32", shape, Region.whole(shape), is_shard=False)}


def live(digest: int = 1, *, is_own: bool = True) -> OfferedState:
    return OfferedState(VERSION, 0, is_live=True, digests={SCALE: digest}, is_own=is_own)


def copy(number: int, owner: int | None, digest: int = 1, version: Version = VERSION) -> OfferedState:
    return OfferedState(version, number, is_copy=True, digests={SCALE: digest}, owner=owner, is_own=owner is None)


def offer(*holdings: OfferedState, layouts: list[Layout], needs: Layout, rank: int = -1, generation: int = 2) -> Offer:
    needed = {WEIGHT: needs[WEIGHT]}
    phase = Phase.UNTOUCHED if holdings else Phase.NONE
    return Offer(phase, holdings, tuple(layouts), generation if rank >= 0 else 0, 0, needed, "host", rank=rank)


def all_of(offers: list[Offer], completing: frozenset[int] = frozenset()) -> ChosenState:
    return ChosenState(VERSION, tuple(tuple(range(len(each.holdings))) for each in offers), completing, 0)


def in_step(digests: Mapping[int, int], size: int = 2) -> list[Offer]:
    return [
        offer(live(digest), layouts=[layout(rank, 2)], needs=layout(min(rank, size - 1), size), rank=rank)
        for rank, digest in digests.items()
    ]


def test_a_tensor_that_differs_is_each_ranks_own_but_not_from_that_of_a_rank_that_is_a_step_behind() -> None:
    equal, apart = in_step({0: 1, 1: 1}), in_step({0: 1, 1: 2})
    assert own_names(equal, all_of(equal).holds, ()) == set()
    assert own_names(apart, all_of(apart).holds, ()) == {SCALE}
    assert own_names(apart, all_of(apart).holds, {1}) == set()


def test_each_rank_gets_that_of_its_part_its_own_first_in_the_shape_that_it_has_there() -> None:
    parts = [layout(0, 2, (2,)), layout(1, 2, (3,))]
    offers = [
        offer(copy(0, None), copy(1, 1, 2), layouts=parts, needs=parts[0], rank=0),
        offer(layouts=[], needs=parts[1]),
    ]
    holds = all_of(offers).holds
    assert pieces_of_own(0, {SCALE}, offers, holds) == [(Piece(0, 0, SCALE, Region.whole((2,))), parts[0][SCALE])]
    assert pieces_of_own(1, {SCALE}, offers, holds) == [(Piece(0, 1, SCALE, Region.whole((3,))), parts[1][SCALE])]


def test_where_parts_are_cut_anew_all_ranks_refuse_though_one_has_its_part() -> None:
    offers = in_step({0: 1, 1: 2})
    offers[1] = offer(live(2), layouts=[layout(1, 2)], needs=layout(3, 4), rank=1)
    for rank in (0, 1):
        with pytest.raises(NonRetryableException, match=r"0/w/scale.* cut in another way with 2 workers"):
            pieces_of_own(rank, {SCALE}, offers, all_of(offers).holds)


def test_who_has_what_it_had_keeps_it() -> None:
    offers = in_step({0: 1, 1: 1})
    assert heirs(offers, all_of(offers)) == {}


@pytest.mark.parametrize("lost", [0, 1])
def test_as_many_ranks_go_on_with_what_the_rank_of_their_number_had(lost: int) -> None:
    """The survivor has number 0 now, whichever it had."""
    parts = [layout(rank, 2) for rank in (1 - lost, lost)]
    survivor = offer(copy(0, None), copy(1, lost), layouts=parts, needs=layout(0, 2), rank=1 - lost)
    offers = [survivor, offer(layouts=[], needs=layout(1, 2))]
    assert heirs(offers, all_of(offers)) == ({1: (0, 1)} if lost else {0: (0, 1), 1: (0, 0)})


def test_at_another_size_only_who_has_nothing_gets_what_a_lost_rank_had() -> None:
    parts = [layout(rank, 3) for rank in range(3)]
    survivor = offer(copy(0, None), copy(1, 2), layouts=parts[:2], needs=layout(0, 2), rank=0)
    offers = [survivor, offer(layouts=[], needs=layout(1, 2))]
    assert heirs(offers, all_of(offers)) == {1: (0, 1)}
    more = [*offers, offer(layouts=[], needs=layout(1, 2)), offer(layouts=[], needs=layout(1, 2))]
    assert heirs(more, all_of(more)) == {1: (0, 1)}, "two at most can get it"


def test_copies_of_another_groups_ranks_are_nobodys() -> None:
    """Their numbers are of another group."""
    parts = [layout(rank, 2) for rank in range(2)]
    survivor = offer(copy(0, None), copy(1, 1), layouts=parts, needs=parts[0], rank=0, generation=3)
    offers = [survivor, offer(layouts=[], needs=parts[1])]
    assert heirs(offers, all_of(offers)) == {}


def test_a_rank_that_has_to_complete_the_step_is_no_source() -> None:
    offers = in_step({0: 1, 1: 1})
    assert heirs(offers, all_of(offers, frozenset({1}))) == {}
