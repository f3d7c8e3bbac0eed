"""Pure: who goes on with what was which rank's own: running statistics, random numbers, plain values of `extra`.

They belong to the rank, as its share of the samples does, and not to the process. So where as many ranks go on as there
were, and a copy of each is left, each takes what the rank of its number had: the run is the one that it would have been
without the loss, whatever numbers the survivors have got. Else survivors keep their own, and a rank that has none takes
that of a lost one, as long as there are any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchelastic.sharded.commit_rule import ChosenState
from torchelastic.sharded.offers import Offer


def heirs(offers: Sequence[Offer], choice: ChosenState) -> dict[int, tuple[int, int]]:
    """Which ranks take what another one holds.

    Args:
        offers: of all ranks.
        choice: from which state they go on.

    Returns:
        By rank: who holds it, and in which of its holdings. All others go on with their own, or with the source's.
    """
    left = {owner: (rank, number) for owner, rank, number in _own_values(offers, choice)}
    if left.keys() == set(range(len(offers))):
        return {owner: (rank, number) for owner, (rank, number) in left.items() if not _is_mine(offers, owner, rank)}
    for offer in offers:
        if offer.generation == choice.version.generation:
            left.pop(offer.rank, None)
    new = [rank for rank, numbers in enumerate(choice.holds) if not numbers]
    return dict(zip(new, (left[owner] for owner in sorted(left)), strict=False))


def _own_values(offers: Sequence[Offer], choice: ChosenState) -> Iterator[tuple[int, int, int]]:
    """Whose own values are whole, who holds them, and in which holding; what ranks have of themselves comes last."""
    found = []
    for rank, (offer, numbers) in enumerate(zip(offers, choice.holds, strict=True)):
        if offer.generation != choice.version.generation or rank in choice.completing:
            continue  # the numbers of its last group are not those of the state's
        for number in numbers:
            holding = offer.holdings[number]
            owner = offer.rank if holding.owner is None else holding.owner
            if holding.has_companions and (holding.owner is not None or holding.is_own):
                found.append((holding.owner is None, owner, rank, number))
    yield from ((owner, rank, number) for _, owner, rank, number in sorted(found))


def _is_mine(offers: Sequence[Offer], owner: int, rank: int) -> bool:
    """Whether a rank holds what it had itself, and has the same number again."""
    return owner == rank == offers[rank].rank
