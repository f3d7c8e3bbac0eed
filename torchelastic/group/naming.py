"""Ranks and what they do, for people."""

from __future__ import annotations

from collections.abc import Sequence

from torchelastic.text import shortlist

_NAMED_RANKS = 8


def listed(ranks: Sequence[int]) -> str:
    """Ranks for people.

    >>> listed([1]), listed([0, 3])
    ('rank 1', 'ranks 0, 3')
    """
    return f"rank{'' if len(ranks) == 1 else 's'} {shortlist(ranks, _NAMED_RANKS)}"


def describe_calls(calls: Sequence[str], one: str = "calls", several: str = "call") -> str:
    """Says which ranks call what, the fewest first.

    Args:
        calls: of each rank.
        one: what one rank does with it.
        several: what several do.

    >>> describe_calls(["save(5)", "load()", "save(5)"])
    'rank 1 calls load(); ranks 0, 2 call save(5)'
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        ranks_of.setdefault(call, []).append(rank)
    by_number = sorted(ranks_of.items(), key=lambda item: (len(item[1]), item[0]))
    return "; ".join(f"{listed(ranks)} {one if len(ranks) == 1 else several} {call}" for call, ranks in by_number)
