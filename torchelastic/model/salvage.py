"""What becomes of a step in which a worker was lost: the decision, as a pure function.

Three modes (DESIGN, section 5; docs/salvage.md):

* discard: every rank undoes the step, and the group that follows repeats it whole.
* drop: what the survivors have computed counts, the rest of the global batch is trained later in the epoch.
* recompute: what the survivors have computed counts, and all members of the new group compute the rest together.

A step is thought of in units: the places of samples in its global batch, or logical shards.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torchelastic.data.shares import SecondDeal, share_bounds

MODES = ("discard", "drop", "recompute")


def second_deals(kept: Sequence[Collection[int]], present: Sequence[int], mode: str) -> tuple[SecondDeal, ...]:
    """Decide for every rank what it computes in the second attempt at a step, and whose gradients count.

    No unit counts twice: of two ranks that have kept the same one (from attempts in different groups), who has kept
    more counts, then the lower rank; the other one's are thrown away as a whole, for they are summed up already.

    Args:
        kept: by rank of the new group, the units whose gradients it has; empty for a newcomer.
        present: all units of the step.
        mode: "drop" or "recompute".

    Returns:
        One deal for each rank; nothing where no rank has kept anything, so that the step is simply repeated.

    >>> for deal in second_deals([{0, 1}, {4, 5}], range(6), "recompute"):
    ...     print(deal.carried, deal.compute)
    (0, 1) (2,)
    (4, 5) (3,)
    """
    carried: list[tuple[int, ...]] = [()] * len(kept)
    taken: set[int] = set()
    for rank in sorted(range(len(kept)), key=lambda rank: (-len(kept[rank]), rank)):
        if kept[rank] and taken.isdisjoint(kept[rank]):
            carried[rank] = tuple(sorted(kept[rank]))
            taken.update(kept[rank])
    if not taken:
        return ()
    rest = tuple(unit for unit in present if unit not in taken)
    if mode == "drop":
        return tuple(SecondDeal(carried=units, postponed=rest) for units in carried)
    return tuple(
        SecondDeal(compute=rest[slice(*share_bounds(len(rest), rank, len(kept)))], carried=units)
        for rank, units in enumerate(carried)
    )
