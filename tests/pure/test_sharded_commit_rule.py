"""From which state of the run the ranks go on: every mix of phases, copies and losses, against a rule by sets."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.few_examples import examples
from torchelastic.checkpoint.format.header import Entry
from torchelastic.checkpoint.format.regions import Region
from torchelastic.sharded.commit_rule import ChosenState, NoWholeState, choose, next_version, whole_in_copies
from torchelastic.sharded.copies import too_little_memory
from torchelastic.sharded.offers import (
    STORED,
    Layout,
    Offer,
    OfferedState,
    PartsMissingError,
    Phase,
    Piece,
    Version,
    describe_missing,
    layout_at,
    missing_parts,
    pieces_for,
)

ROWS = 12
BEFORE, TRAINED = Version(1, 4, 11), Version(2, 5, 22)
AFTER = next_version(TRAINED, 2, 22)


def layout(first: int, last: int, *names: str) -> dict[str, Entry]:
    """Rows `first` to `last` of each tensor."""
    region = Region((first, 0), (last - first, 3)) if last > first else Region((0, 0), (0, 3))
    return {name: Entry.of(name, "float32", (ROWS, 3), region, is_shard=True) for name in names or ("w",)}


def chunks(number: int) -> list[Layout]:
    """As FSDP cuts: equal parts, rounded up, and nothing for the last ones."""
    size = -(-ROWS // number)
    return [layout(min(rank * size, ROWS), min((rank + 1) * size, ROWS)) for rank in range(number)]


def offer(phase: Phase, *holdings: OfferedState, layouts: Sequence[Layout] = (), generation: int = 2) -> Offer:
    return Offer(phase, holdings, tuple(layouts), generation, 0, {}, "host")


@settings(max_examples=examples(400), deadline=None)
@given(data=st.data())
def test_the_latest_state_that_is_whole_is_taken(data: st.DataObject) -> None:
    number = data.draw(st.integers(2, 5), "ranks")
    replicas = data.draw(st.sampled_from([1, 2]), "ranks with the same parts")  # of HSDP
    parts = chunks(number)
    ranks = [(part, copy) for copy in range(replicas) for part in range(number)]
    someone_is_done = data.draw(st.booleans(), "someone is done")
    allowed = [Phase.READY, Phase.DONE, Phase.NONE] if someone_is_done else [Phase.UNTOUCHED, Phase.READY, Phase.NONE]
    phases = [data.draw(st.sampled_from(allowed)) for _ in ranks]
    copied = [data.draw(st.sampled_from([None, BEFORE, TRAINED])) for _ in ranks]
    alive = [data.draw(st.booleans()) for _ in ranks]
    offers, have = [], {version: set[int]() for version in (BEFORE, TRAINED, AFTER)}
    done = {part for (part, _), phase, lives in zip(ranks, phases, alive, strict=True) if lives and phase is Phase.DONE}
    for (part, _), phase, version, lives in zip(ranks, phases, copied, alive, strict=True):
        if not lives:
            continue
        holdings = []
        if phase is not Phase.NONE:
            live = AFTER if phase is Phase.DONE else TRAINED
            holdings.append(OfferedState(live, 0, is_live=True))
            have[live].add(part)
            if phase is Phase.READY and done:
                have[AFTER].add(part)
        if version is not None:
            neighbour = (part + 1) % number
            holdings += [OfferedState(version, 0, is_copy=True), OfferedState(version, 1, is_copy=True)]
            have[version] |= {part, neighbour}
        offers.append(offer(phase, *holdings, layouts=[parts[part], parts[(part + 1) % number]]))
    full = {part for part in range(number) if parts[part]["w"].region.numel}
    whole = [version for version in sorted(have, reverse=True) if have[version] >= full]

    choice = choose(offers, {"w"})

    if not whole:
        assert isinstance(choice, NoWholeState)
        held = [version for version in sorted(have, reverse=True) if have[version]]
        assert choice.newest == (held[0] if held else None)
        assert bool(choice.missing) == bool(held)
        return
    assert isinstance(choice, ChosenState)
    assert choice.version == whole[0]
    for rank, numbers in enumerate(choice.holds):
        is_ready = offers[rank].phase is Phase.READY
        assert (rank in choice.completing) == (choice.version == AFTER and is_ready)
        for each in numbers:
            holding = offers[rank].holdings[each]
            assert holding.version == choice.version or (holding.is_live and rank in choice.completing)
    assert choice.source not in choice.completing
    assert missing_parts({"w"}, offers, choice.holds) == {}


def test_states_of_one_step_from_two_groups_are_never_mixed() -> None:
    """A rank that was cut off has trained on in the old group; the others went back and computed the step again."""
    left, right = chunks(2)
    again = Version(3, TRAINED.step, 33)
    cut_off = offer(Phase.UNTOUCHED, OfferedState(TRAINED, 0, is_live=True), layouts=[left])
    others = offer(Phase.UNTOUCHED, OfferedState(again, 0, is_live=True), layouts=[right], generation=3)
    nothing = choose([cut_off, others], {"w"})
    assert isinstance(nothing, NoWholeState)
    assert nothing.newest == again
    assert describe_missing(nothing.missing) == "w[0:6]"


def test_a_state_without_its_companions_is_passed_over() -> None:
    whole = layout(0, ROWS)
    bare = offer(Phase.NONE, OfferedState(AFTER, 0, has_companions=False), OfferedState(BEFORE, 0), layouts=[whole])
    choice = choose([bare], {"w"})
    assert isinstance(choice, ChosenState)
    assert choice.version == BEFORE


@pytest.mark.parametrize(("stored_step", "is_taken"), [(4, False), (400, True)])
def test_a_checkpoint_counts_by_its_step(stored_step: int, is_taken: bool) -> None:
    """A worker that has waited as a spare holds a whole copy of long ago."""
    stored = Version(STORED, stored_step, 0)
    spare = offer(
        Phase.UNTOUCHED, OfferedState(BEFORE, 0, is_copy=True), OfferedState(stored, 0), layouts=[layout(0, ROWS)]
    )
    choice = choose([spare], {"w"})
    assert isinstance(choice, ChosenState)
    assert choice.version == (stored if is_taken else BEFORE)


def test_what_goes_with_the_parts_comes_from_a_rank_that_has_committed_the_step() -> None:
    left, right = chunks(2)
    done = offer(Phase.DONE, OfferedState(AFTER, 0, is_live=True), layouts=[left])
    committed = offer(Phase.UNTOUCHED, OfferedState(AFTER, 0, is_live=True), layouts=[right])
    for offers, source in (
        ([done, committed], 1),
        ([done, offer(Phase.DONE, *committed.holdings, layouts=[right])], 0),
    ):
        choice = choose(offers, {"w"})
        assert isinstance(choice, ChosenState)
        assert choice.source == source


def test_what_is_whole_in_copies_alone() -> None:
    left, right = chunks(2)
    first = offer(
        Phase.UNTOUCHED, OfferedState(TRAINED, 0, is_live=True), OfferedState(BEFORE, 0, is_copy=True), layouts=[left]
    )
    second = offer(
        Phase.UNTOUCHED, OfferedState(TRAINED, 0, is_live=True), OfferedState(BEFORE, 0, is_copy=True), layouts=[right]
    )
    assert whole_in_copies([first, second], {"w"}) == BEFORE
    assert whole_in_copies([first], {"w"}) is None


@settings(max_examples=examples(300), deadline=None)
@given(old=st.integers(1, 6), new=st.integers(1, 6), extra=st.integers(0, 1))
def test_each_rank_gets_each_element_that_it_needs_once(old: int, new: int, extra: int) -> None:
    """Of old parts, some of them there twice, to new ones."""
    before = chunks(old)
    offers = [
        offer(Phase.UNTOUCHED, *(OfferedState(TRAINED, each) for each in range(1 + extra)),
              layouts=[before[rank], before[(rank + 1) % old]])
        for rank in range(old)
    ]  # fmt: skip
    holds = [tuple(range(1 + extra)) for _ in offers]
    for rank, wanted in enumerate(chunks(new)[: len(offers)]):
        region = wanted["w"].region
        pieces = pieces_for(rank, {"w": region}, offers, holds)
        rows = [
            row
            for piece in pieces
            for row in range(piece.region.offsets[0], piece.region.offsets[0] + piece.region.sizes[0])
        ]
        assert sorted(rows) == list(range(region.offsets[0], region.offsets[0] + region.sizes[0]))
        own = {row for number in holds[rank] for row in rows_of(offers[rank].layouts[number])}
        assert {row for piece in pieces if piece.source == rank for row in rows_of_region(piece.region)} == own & set(
            rows
        )
        for piece in pieces:
            held = offers[piece.source].layouts[piece.holding]["w"].region
            assert held.intersection(piece.region) == piece.region
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(piece), type=Piece) == piece


def rows_of(layout_: Layout) -> set[int]:
    return rows_of_region(layout_["w"].region)


def rows_of_region(region: Region) -> set[int]:
    return set(range(region.offsets[0], region.offsets[0] + region.sizes[0]))


def test_a_part_that_nobody_has_is_named() -> None:
    held = offer(Phase.UNTOUCHED, OfferedState(TRAINED, 0), layouts=[layout(0, 6)])
    with pytest.raises(PartsMissingError, match=r"nobody has Region\(offsets=\(6, 0\)"):
        pieces_for(0, {"w": Region((0, 0), (ROWS, 3))}, [held], [(0,)])
    with pytest.raises(PartsMissingError):
        pieces_for(0, {"other": Region((0,), (1,))}, [held], [(0,)])


def test_the_layout_of_a_state_has_the_names_of_all_ranks() -> None:
    offers = [
        offer(Phase.NONE, OfferedState(BEFORE, 0), layouts=[layout(0, 6, "a")]),
        offer(Phase.NONE, OfferedState(BEFORE, 0), layouts=[layout(6, ROWS, "a", "b")]),
    ]
    found = layout_at(offers, [(0,), (0,)])
    assert (sorted(found), found["a"].region) == (["a", "b"], layout(0, 6)["w"].region)


def test_memory_for_copies_is_counted_for_all_workers_of_a_host() -> None:
    gib = 2**30
    assert too_little_memory(gib, 1, 2, 10 * gib) is None
    problem = too_little_memory(gib, 1, 2, 10 * gib - 1)
    assert problem is not None
    assert "about 10.0 GiB here (2 workers with 5.00 GiB each)" in problem


def test_a_missing_scalar_is_named_without_rows() -> None:
    assert describe_missing({"step": (Region((), ()),), "w": ()}) == "step, w"
