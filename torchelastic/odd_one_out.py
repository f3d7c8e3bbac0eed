"""Of several that have computed the same: who has another result than the others. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V", bound=Hashable)


@dataclass(frozen=True)
class OddOnes(Generic[K]):
    """Who agrees, and who does not.

    Attributes:
        suspects: who may be wrong, in the order in which they were given; empty: all have the same result.
        agreeing: who shares the result of the most; empty: no result has more than each other, so that nobody knows
            which of the suspects, who are all then, is right.
    """

    suspects: tuple[K, ...]
    agreeing: tuple[K, ...]


def alone_in_result(results: Mapping[K, V]) -> OddOnes[K]:
    """Find those whose result is not that of the most.

    Two that are wrong independently of each other do not agree by chance: a result that two share, and no other one is
    shared by as many, is right, also where the two are no majority.

    Args:
        results: what each has computed, such as a digest of it.

    >>> alone_in_result({0: "a", 1: "a", 2: "b"})
    OddOnes(suspects=(2,), agreeing=(0, 1))
    >>> alone_in_result({"core 0": 7, "core 1": 8})
    OddOnes(suspects=('core 0', 'core 1'), agreeing=())
    >>> alone_in_result({0: "a", 1: "b", 2: "c", 3: "c"}).suspects, alone_in_result({0: "a"}).agreeing
    ((0, 1), (0,))
    """
    groups: dict[V, list[K]] = {}
    for who, result in results.items():
        groups.setdefault(result, []).append(who)
    most = max(map(len, groups.values()), default=0)
    largest = [group for group in groups.values() if len(group) == most]
    agreeing = tuple(largest[0]) if len(largest) == 1 and (most > 1 or len(groups) == 1) else ()
    return OddOnes(tuple(who for who in results if who not in agreeing), agreeing)
