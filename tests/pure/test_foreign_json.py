"""JSON that others have written: taken within bounds, or refused by one error that names where it was read."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.hostile_json import VALUES, taken, text_of
from torchelastic.foreign_json import (
    MAX_COUNT,
    Amount,
    Count,
    CountIfAny,
    Finite,
    RecordError,
    Text,
    checked,
    decode_json,
)

SOURCE = "/a/key"


class Number(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff", b"[1,]", b"[" * 100_000, b"[" * 33 + b"1" + b"]" * 33, b" " * 1001, "[", '"' + "x" * 1001],
    ids=repr,
)
def test_what_is_no_json_within_the_bounds_is_refused_with_its_source(data: bytes | str) -> None:
    with pytest.raises(RecordError, match=SOURCE):
        decode_json(SOURCE, data, most_bytes=200_000 if len(data) > 10_000 else 1000)


@given(st.recursive(VALUES, lambda inner: st.lists(inner, max_size=3), max_leaves=5))
def test_whatever_is_taken_can_be_written_and_every_number_converted(value: str | list[Any]) -> None:
    document = taken(SOURCE, lambda: decode_json(SOURCE, text_of(value), most_bytes=100_000))
    json.dumps(document)
    for one in [document] if not isinstance(document, list) else document:
        if isinstance(one, (int, float)):
            float(one)


@given(st.binary(max_size=40))
def test_whatever_bytes_there_are_they_are_json_or_refused(data: bytes) -> None:
    taken(SOURCE, lambda: decode_json(SOURCE, data, most_bytes=100))


@dataclass(frozen=True)
class Part:
    text: Text


@dataclass(frozen=True)
class Record:
    """One field of each sort there is."""

    text: Text = ""
    count: Count = 0
    rank: CountIfAny = -1
    amount: Amount = 0.0
    finite: Finite = 0.0
    flag: bool = False
    member: Number = Number.ONE
    texts: tuple[Text, ...] = ()
    parts: tuple[Part, ...] = ()
    numbers: Mapping[Text, Finite] = field(default_factory=dict)
    anything: Any = None


NAMES = sorted(vars(Record()))


@pytest.mark.parametrize("name", NAMES)
@given(value=VALUES)
def test_whatever_stands_in_a_field_it_is_taken_or_refused_with_its_source(name: str, value: str) -> None:
    document = taken(SOURCE, lambda: decode_json(SOURCE, f'{{"{name}":{value}}}', most_bytes=100_000))
    record = None if document is None else taken(f"{SOURCE}: ", lambda: checked(SOURCE, document, Record))
    if record is not None and name != "anything":  # what is in that is for others to check
        json.dumps(asdict(record), ensure_ascii=False, allow_nan=False).encode()


def test_fields_that_are_right_are_taken_and_unknown_ones_left_out() -> None:
    document = {
        "text": "a", "count": 2, "rank": -1, "amount": 1.5, "finite": -3, "flag": True, "member": 1, "texts": ["a"],
        "parts": [{"text": "b"}], "numbers": {"a": 1}, "anything": {"b": [0]}, "of a later version": "",
    }  # fmt: skip
    assert checked(SOURCE, document, Record) == Record(
        "a", 2, -1, 1.5, -3.0, True, Number.ONE, ("a",), (Part("b"),), {"a": 1.0}, {"b": [0]}
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("text", "a\nb"),
        ("text", "x" * 401),
        ("text", None),
        ("count", True),
        ("count", 1.0),
        ("count", "1"),
        ("count", -1),
        ("count", MAX_COUNT + 1),
        ("rank", -2),
        ("amount", 10**400),
        ("amount", -0.5),
        ("amount", math.nan),
        ("amount", math.inf),
        ("finite", -math.inf),
        ("flag", 1),
        ("member", 2),
        ("member", True),
        ("member", 1.0),
        ("texts", ["a", "b\x1b[2J"]),
        ("texts", "a"),
        ("parts", [1]),
        ("parts", [{"text": "a\u2028b"}]),
        ("numbers", {"a": math.nan}),
        ("numbers", {"a\n": 1.0}),
    ],
)
def test_what_is_not_right_is_refused_with_the_name_of_the_field(name: str, value: Any) -> None:
    with pytest.raises(RecordError, match=rf"^{SOURCE}: .*\$\.{name}\b"):
        checked(SOURCE, {name: value}, Record)
