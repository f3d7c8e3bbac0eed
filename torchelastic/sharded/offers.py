"""Pure: which parts of which tensors the ranks hold, of which state of the run, and which of those states is whole.

A rank of a sharded run holds one part of each tensor. A part is addressed by the tensor's name and a region in it (see
`checkpoint.format.regions`), never by a rank: so what one number of ranks has held, any other can take over.

A `Version` names one state of the run. It has the step, and the group in which that step was computed: a rank that was
cut off, and others that have gone back and computed the step again, hold different states of the same step, and parts
of the two must never be mixed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import lru_cache

import msgspec

from torchelastic.checkpoint.format.header import Entry
from torchelastic.checkpoint.format.regions import Region, uncovered
from torchelastic.text import shortlist

#: The generation of a state that was read from a checkpoint: before that of every group.
STORED = 0


class Version(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One state of the run; the later one compares as the larger.

    Attributes:
        generation: of the group in which the last step was computed; grows from group to group, from 1 up. STORED where
            it was read, or is that of the very beginning.
        step: committed steps.
        token: of that group, drawn at random: tells groups apart that could not know of each other.
    """

    generation: int
    step: int
    token: int


#: The parts that a rank holds, by the names of the tensors.
Layout = Mapping[str, Entry]


class Phase(Enum):
    """How far a rank had come with the step under way when its group ended; see `commit_rule`."""

    #: Before the step: nothing of the live state has changed.
    UNTOUCHED = "untouched"
    #: All gradients are there, reduced over all ranks; the optimizer has not begun.
    READY = "ready"
    #: The optimizer has stepped; the live state is that after the step.
    DONE = "done"
    #: There is no live state: this process is new, or its optimizer was interrupted.
    NONE = "none"


class OfferedState(msgspec.Struct, frozen=True, array_like=True):
    """One state's parts on one rank.

    Attributes:
        version: of which state.
        layout: which parts: a number in `Offer.layouts`.
        is_live: whether it is what the rank trains.
        is_copy: whether it is a copy in memory, of the rank's own parts or of another one's; else it was read from a
            checkpoint, or has come in a sync of which the rank does not know whether all others have ended it.
        has_companions: whether the rank has what goes with the parts (see `companions.py`), too.
        digests: of the optimizers' plain tensors; see `plain_tensors.py`.
        owner: of which rank of its last group it is a copy; None: it is this rank's own.
        is_own: whether what goes with the parts is complete, and its random numbers are this rank's.
    """

    version: Version
    layout: int
    is_live: bool = False
    is_copy: bool = False
    has_companions: bool = True
    digests: Mapping[str, int] = msgspec.field(default_factory=dict)
    owner: int | None = None
    is_own: bool = False


class Offer(msgspec.Struct, frozen=True):
    """What a rank says of itself when a new group forms.

    Attributes:
        phase: of its live state.
        holdings: what it holds.
        layouts: of its holdings.
        generation: the last of which it knows.
        token: its proposal for the new group; that of rank 0 is taken.
        needed: the parts of the parameters that it needs in the new group.
        domain: what is lost together with it: its host.
        lost: the step that it had reached before its group found that parts of every state were lost; -1: no such loss.
        step: how many it has committed, whatever it still holds of them.
        rank: which one it was in the group of `generation`; -1: it was in none.
    """

    phase: Phase
    holdings: tuple[OfferedState, ...]
    layouts: tuple[Layout, ...]
    generation: int
    token: int
    needed: Layout
    domain: str
    lost: int = -1
    step: int = 0
    rank: int = -1

    @property
    def live(self) -> OfferedState | None:
        """What the rank trains."""
        return next((holding for holding in self.holdings if holding.is_live), None)


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A region of a tensor that one rank has to get.

    Attributes:
        source: who has it; the rank itself, where it need not be sent.
        holding: in which of its holdings.
        name: of the tensor.
        region: in the whole tensor.
    """

    source: int
    holding: int
    name: str
    region: Region


class PartsMissingError(RuntimeError):
    """No state is whole: some parts of each are on no rank that is left."""


def layout_at(offers: Sequence[Offer], holds: Sequence[Sequence[int]]) -> dict[str, Entry]:
    """Name, dtype and shape of every tensor of a state; regions are those of the first rank that holds a part of it.

    Args:
        offers: of all ranks.
        holds: for each rank, which of its holdings are of this state.
    """
    found: dict[str, Entry] = {}
    for name, part in _parts_of(offers, holds):
        found.setdefault(name, part)
    return found


def _parts_of(offers: Sequence[Offer], holds: Sequence[Sequence[int]]) -> Iterator[tuple[str, Entry]]:
    """All parts of a state, rank by rank."""
    for offer, numbers in zip(offers, holds, strict=True):
        for layout in {offer.holdings[number].layout for number in numbers}:
            yield from offer.layouts[layout].items()


def missing_parts(
    wanted: Iterable[str], offers: Sequence[Offer], holds: Sequence[Sequence[int]]
) -> dict[str, tuple[Region, ...]]:
    """The parts of a state that nobody holds, by the names of the tensors; empty: it is whole.

    Args:
        wanted: names that must be there, beside those that some rank holds.
        offers: of all ranks.
        holds: for each rank, which of its holdings are of this state.
    """
    regions: dict[str, set[Region]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, part in _parts_of(offers, holds):
        regions.setdefault(name, set()).add(part.region)
        shapes[name] = part.shape
    missing: dict[str, tuple[Region, ...]] = {name: () for name in wanted if name not in regions}
    for name, found in regions.items():
        left = _uncovered(shapes[name], frozenset(found))
        if left:
            missing[name] = left
    return missing


@lru_cache(maxsize=1024)  # a model has many tensors of one form, each with those of its optimizer, cut in the same way
def _uncovered(shape: tuple[int, ...], regions: frozenset[Region]) -> tuple[Region, ...]:
    return tuple(uncovered(Region.whole(shape), sorted(regions, key=lambda region: region.offsets)))


def pieces_for(
    rank: int, needed: Mapping[str, Region], offers: Sequence[Offer], holds: Sequence[Sequence[int]]
) -> list[Piece]:
    """Where a rank gets each part that it needs: from itself where it can, else from the others, evenly.

    Args:
        rank: who needs them.
        needed: the region of each tensor.
        offers: of all ranks.
        holds: for each rank, which of its holdings are of the state that is wanted.

    Raises:
        PartsMissingError: nobody has one of them.
    """
    world_size = len(offers)
    # itself first, then the next ones: so the ranks that hold the same parts are asked by different ones
    order = [(rank + distance) % world_size for distance in range(world_size)]
    found: list[Piece] = []
    for name, region in needed.items():
        left = [region] if region.numel else []
        for source in order:
            if not left:
                break
            offer = offers[source]
            for number in holds[source]:
                part = offer.layouts[offer.holdings[number].layout].get(name)
                if part is None or not left:
                    continue
                taken = [common for each in left if (common := each.intersection(part.region))]
                if taken:
                    found.extend(Piece(source, number, name, each) for each in taken)
                    left = [rest for each in left for rest in uncovered(each, [part.region])]
        if left:
            raise PartsMissingError(f"nobody has {left[0]} of {name!r}")
    return found


def describe_missing(missing: Mapping[str, tuple[Region, ...]]) -> str:
    """For people."""
    named = [f"{name}{_rows(regions)}" for name, regions in sorted(missing.items())]
    return shortlist(named, 3)


def _rows(regions: Sequence[Region]) -> str:
    if not regions or not regions[0].sizes:
        return ""
    spans = [f"{region.offsets[0]}:{region.offsets[0] + region.sizes[0]}" for region in regions[:2]]
    return f"[{', '.join(spans)}{', ..' if len(regions) > 2 else ''}]"
