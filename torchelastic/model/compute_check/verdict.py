"""Who computes wrong, by what came out. Pure.

One result alone against two that agree is wrong. Two that stand against each other say only that one of them is. And
where nothing has ever agreed in a run, its steps may not be repeatable to the last bit at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from torchelastic.odd_one_out import alone_in_result


class CheckOutcome(Enum):
    """What a check says."""

    AGREED = "all results are equal"
    WRONG = "it is known who is wrong"
    DOUBT = "one of several is wrong"
    NOT_COMPARABLE = "the model was given other data, or other gradients"
    NOT_REPEATABLE = "the same step gives other bits each time, or on each worker"


@dataclass(frozen=True)
class CheckVerdict:
    """What a check says of whom.

    Attributes:
        outcome: see there.
        ranks: who is wrong, or may be.
    """

    outcome: CheckOutcome
    ranks: tuple[int, ...] = ()


AGREED = CheckVerdict(CheckOutcome.AGREED)
NOT_COMPARABLE = CheckVerdict(CheckOutcome.NOT_COMPARABLE)


def judge_shard(first: Mapping[int, int], again: Mapping[int, int], *, has_agreed: bool) -> CheckVerdict:
    """Of one shard that two ranks, or one rank twice, have computed.

    Args:
        first: digests of the results, by rank.
        again: the same of a second computation by those, and by a third one where there is one.
        has_agreed: whether a check of this run has agreed before.

    >>> judge_shard({0: 5, 1: 6}, {0: 5, 1: 6, 2: 5}, has_agreed=False).ranks, judge_shard({0: 5, 1: 6}, {0: 5, 1: 6},
    ... has_agreed=True).outcome.name
    ((1,), 'DOUBT')
    """
    if len(first) > 1 and len(set(first.values())) == 1:
        return AGREED
    steady = [rank for rank in first if first[rank] == again[rank]]
    others = [rank for rank in again if rank not in first]
    if len(first) == 1:
        return AGREED if steady else _unclear(tuple(first), has_agreed=has_agreed)
    if others:
        right = [rank for rank in steady if again[rank] == again[others[0]]]
    else:
        right = [rank for rank in steady if all(again[rank] == again[other] for other in first)]
        if len(steady) == 1 and has_agreed:
            right = steady  # the other one differs from itself, where all was equal before
    if len(right) == 1:
        return CheckVerdict(CheckOutcome.WRONG, tuple(rank for rank in first if rank not in right))
    if len(set(again.values())) == len(again) > len(first):
        # one worker that is wrong leaves two that agree
        return CheckVerdict(CheckOutcome.NOT_REPEATABLE, tuple(again))
    if not others and len(steady) == len(first):
        return CheckVerdict(CheckOutcome.DOUBT, tuple(first))
    return _unclear(tuple(again), has_agreed=has_agreed)


def judge_repeats(first: Sequence[bool], again: Sequence[bool], *, has_agreed: bool) -> CheckVerdict:
    """Of a step that each rank has computed twice, and, where that differed anywhere, twice more.

    Args:
        first: by rank, whether its two results differed.
        again: the same of the second time.
        has_agreed: whether a check of this run has agreed before.

    >>> judge_repeats([False, True, False], [False] * 3, has_agreed=True).ranks
    (1,)
    """
    odd = tuple(rank for rank, differs in enumerate(first) if differs)
    if not odd:
        return AGREED
    are_alone = 2 * len(odd) < len(first) or (len(first) == 2 and len(odd) == 1)
    is_only_theirs = all(first[rank] for rank, differs in enumerate(again) if differs)
    has_passed = not any(again)
    if are_alone and is_only_theirs and (has_agreed or has_passed):
        return CheckVerdict(CheckOutcome.WRONG, odd)
    if not is_only_theirs:
        return CheckVerdict(
            CheckOutcome.NOT_REPEATABLE, tuple(rank for rank, each in enumerate(again) if each or first[rank])
        )
    return _unclear(odd, has_agreed=has_agreed)


def judge_replicas(digests: Sequence[int]) -> CheckVerdict:
    """Of what has to be equal on all ranks.

    Args:
        digests: by rank.

    >>> judge_replicas([7, 7, 8]).ranks, judge_replicas([7, 8]).outcome.name
    ((2,), 'DOUBT')
    """
    odd = alone_in_result(dict(enumerate(digests)))
    if not odd.suspects:
        return AGREED
    return CheckVerdict(CheckOutcome.WRONG if odd.agreeing else CheckOutcome.DOUBT, odd.suspects)


def _unclear(ranks: tuple[int, ...], *, has_agreed: bool) -> CheckVerdict:
    return CheckVerdict(CheckOutcome.DOUBT if has_agreed else CheckOutcome.NOT_REPEATABLE, ranks)
