"""What of many is tried every day, of examples and of cases; CI tries all.

Of the examples of hypothesis a quarter: `make test` says `--hypothesis-profile daily`, and `make test-long` chooses the
property tests a second time, with all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from hypothesis import settings

#: What hypothesis tries unless a test says otherwise.
ALL = 100
#: The same, of every day.
FEW = 25


def examples(number: int) -> int:
    """For `settings(max_examples=..)`, at import: so many, or the same share of them as of every test's.

    At least as many as it takes to try more than the simplest.
    """
    return max(min(number, 5), number * settings().max_examples // ALL)


def some_daily(cases: Iterable[Any], is_daily: Callable[[Any], bool]) -> list[ParameterSet]:
    """For `parametrize`: all cases, of which those that are not daily are long."""

    def values(case: Any) -> tuple[Any, ...]:
        return case if isinstance(case, tuple) else (case,)

    return [pytest.param(*values(case), marks=[] if is_daily(case) else [pytest.mark.long]) for case in cases]


def one_of_each(cases: Iterable[tuple[Any, ...]], rest: Sequence[Any]) -> frozenset[tuple[Any, ...]]:
    """Of cases whose first value is a kind: one of each kind, whose last value is another one from kind to kind.

    >>> sorted(one_of_each([("a", 1), ("a", 2), ("b", 1), ("b", 2), ("c", 1), ("c", 2)], [1, 2]))
    [('a', 1), ('b', 2), ('c', 1)]
    """
    kinds: dict[Any, list[tuple[Any, ...]]] = {}
    for case in cases:
        kinds.setdefault(case[0], []).append(case)
    wanted = itertools.cycle(rest)
    chosen = []
    for of_kind in kinds.values():
        last = next(wanted)
        chosen.append(next((case for case in of_kind if case[-1] == last), of_kind[0]))
    return frozenset(chosen)
