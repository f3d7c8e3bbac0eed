"""Values as JSON spells them, of every type, of every magnitude and depth: what may stand in a field of others."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import strategies as st

from torchelastic.foreign_json import RecordError

T = TypeVar("T")

#: Where conversions, comparisons and bounds end: 2**31, 2**53, 2**63, 2**64, the largest float, Python's longest int.
_EDGES = [
    *map(str, (0, 1, 2**31, 2**52, 2**53, 2**63, 2**64, 10**19, 10**20, 10**308, 10**309, 10**400)),
    *("9" * digits for digits in (4300, 4301)),
]

NUMBERS = st.one_of(
    st.tuples(st.sampled_from(["", "-"]), st.sampled_from(_EDGES)).map("".join),
    st.integers(-5, 5).map(str),
    st.integers().map(str),
    st.sampled_from(["1e400", "-1e400", "1E9999999", "1e308", "1e-400", "-0.0", "NaN", "Infinity", "-Infinity"]),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
)
TEXTS = st.one_of(
    st.text(max_size=5).map(json.dumps),
    st.sampled_from(['"\\ud800"', '"\\u0000"', '"a\\nb"', json.dumps("x" * 2000), '"1e400"', json.dumps("9" * 400)]),
)
DEEP = st.sampled_from([5, 31, 32, 33, 900, 5000, 30_000]).flatmap(
    lambda depth: st.sampled_from(["[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "[" * depth])
)
SCALARS = NUMBERS | TEXTS | st.sampled_from(["null", "true", "false", "", "{}", "[]"])
#: One value, spelled out.
VALUES = (
    SCALARS
    | DEEP
    | st.lists(SCALARS, max_size=3).map(lambda inner: f"[{','.join(inner)}]")
    | SCALARS.map(lambda inner: f'{{"a":{inner}}}')
)


def text_of(value: str | list[Any]) -> str:
    """A value, or a list of values and lists, spelled out."""
    return value if isinstance(value, str) else f"[{','.join(map(text_of, value))}]"


def with_field(document: dict[str, Any], name: str, value: str) -> bytes:
    """A document as JSON, one field of which is spelled out as it is."""
    rest = [f"{json.dumps(key)}:{json.dumps(one)}" for key, one in document.items() if key != name]
    return ("{" + ",".join([*rest, f"{json.dumps(name)}:{value}"]) + "}").encode()


def taken(source: str, read: Callable[[], T]) -> T | None:
    """What was read; None: it was refused, by the one error there is, which names where it stood."""
    try:
        return read()
    except RecordError as error:
        refusal = str(error)
    assert refusal.startswith(source)
    return None
