"""JSON that others have written: taken within bounds, or refused by one error that names where it was read."""

from __future__ import annotations

import enum
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.hostile_json import VALUES, taken, text_of
from torchelastic.foreign_json import MAX_COUNT, MAX_DEPTH, Fields, RecordError, decode_json, is_text

SOURCE = "/a/key"


class Number(enum.IntEnum):
    ONE = 1


def fields(**document: Any) -> Fields:
    return Fields(SOURCE, document)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff", b"[1,]", b"[" * 100_000, b"[" * 33 + b"1" + b"]" * 33, b" " * 1001, "[", '"' + "x" * 1001],
    ids=repr,
)
def test_what_is_no_json_within_the_bounds_is_refused_with_its_source(data: bytes | str) -> None:
    with pytest.raises(RecordError, match=SOURCE):
        decode_json(SOURCE, data, most_bytes=200_000 if len(data) > 10_000 else 1000)


def test_what_fits_the_bounds_just_so_is_taken() -> None:
    nested = b"[" * MAX_DEPTH + b"1" + b"]" * MAX_DEPTH
    assert str(decode_json(SOURCE, nested, most_bytes=len(nested))).count("[") == MAX_DEPTH
    assert decode_json(SOURCE, "[18446744073709551616]", most_bytes=100) == [2**64]


def test_numbers_that_are_too_large_are_infinite() -> None:
    values = decode_json(SOURCE, f"[{'7' * 400}, -{'7' * 5000}, 1e400, -1e400]", most_bytes=10_000)
    assert values == [math.inf, -math.inf, math.inf, -math.inf]


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


READERS: dict[str, Any] = {
    "text": lambda one: one.text("x", None),
    "whole": lambda one: one.whole("x", None),
    "number": lambda one: one.number("x", None),
    "flag": lambda one: one.flag("x", None),
    "member of": lambda one: one.member_of(Number, "x"),
    "texts": lambda one: one.texts("x"),
    "wholes": lambda one: one.wholes("x", below=3),
    "parts": lambda one: one.parts("x", 2),
    "numbers": lambda one: one.numbers("x", 2),
    "object": lambda one: one.object("x"),
}


@pytest.mark.parametrize("reader", READERS)
@given(value=VALUES)
def test_whatever_stands_in_a_field_it_is_taken_or_refused_with_the_fields_name(reader: str, value: str) -> None:
    document = taken(SOURCE, lambda: decode_json(SOURCE, f'{{"x":{value}}}', most_bytes=100_000))
    if document is not None:
        read = taken(f"{SOURCE}: ", lambda: READERS[reader](Fields(SOURCE, document)))
        plain = str(read) if isinstance(read, list) else read
        if reader != "object":  # what is in one is for others to check
            json.dumps(plain, ensure_ascii=False, allow_nan=False).encode()


def test_fields_that_are_right_are_taken() -> None:
    one = fields(t="a", n=2, s=1.5, f=True, e=1, ts=["a"], ns=[0, 2], ps=[{}], v={"a": 1}, o={"b": []})
    assert (one.text("t"), one.whole("n"), one.number("s")) == ("a", 2, 1.5)
    assert (one.flag("f"), one.member_of(Number, "e"), one.texts("ts"), one.wholes("ns", below=3)) == (
        True, Number.ONE, ("a",), (0, 2),
    )  # fmt: skip
    assert len(one.parts("ps", 1)) == 1
    assert (one.numbers("v", 1), one.object("o")) == ({"a": 1.0}, {"b": []})


def test_what_is_missing_is_as_usual_or_refused() -> None:
    one = fields()
    assert (one.text("x"), one.whole("x"), one.number("x"), one.flag("x")) == ("", 0, 0.0, False)
    assert (one.texts("x", is_optional=True), one.parts("x", 1), one.numbers("x", 1), one.object("x")) == (
        (), [], {}, {},
    )  # fmt: skip
    for name in set(READERS) - {"parts", "numbers", "object"}:
        with pytest.raises(RecordError, match="field 'x'"):
            READERS[name](one)


@pytest.mark.parametrize(
    ("reader", "value"),
    [
        ("text", "a\nb"),
        ("text", "x" * 401),
        ("whole", True),
        ("whole", 1.0),
        ("whole", -1),
        ("whole", MAX_COUNT + 1),
        ("number", 10**400),
        ("number", -0.5),
        ("number", math.nan),
        ("number", math.inf),
        ("flag", 1),
        ("member of", 2),
        ("member of", True),
        ("member of", 1.0),
        ("texts", ["a", "\ud800"]),
        ("texts", "a"),
        ("wholes", [3]),
        ("wholes", [True]),
        ("parts", [{}, {}, {}]),
        ("parts", [1]),
        ("numbers", {"a": math.nan}),
        ("numbers", {"a\n": 1.0}),
        ("object", []),
    ],
)
def test_what_is_not_right_is_refused(reader: str, value: Any) -> None:
    with pytest.raises(RecordError, match="x"):
        READERS[reader](fields(x=value))


def test_a_number_may_have_a_bound_of_its_own() -> None:
    assert fields(x=5).number("x", most=5) == 5.0
    with pytest.raises(RecordError, match="at most 5"):
        fields(x=6).number("x", most=5)


def test_a_text_is_one_that_can_be_written() -> None:
    assert is_text("", 0)
    assert not is_text("ab", 1)
    assert not is_text(b"a", 1)
