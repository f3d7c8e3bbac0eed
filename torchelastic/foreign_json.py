"""JSON that somebody else has written, another process, host or service: decoded within bounds, or refused.

Whatever is wrong with it, there is one error, `RecordError`, and it names where the JSON came from. `decode_json`
bounds what there can be at all: no whole number is too large for `float()`, nothing is nested so deep that it cannot be
written again. `checked` makes a dataclass of an object: the types of its fields say what each may hold.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from torchelastic.text import escaped

#: A text has at most so many characters, unless its field says otherwise (a host's name has at most 253).
MAX_TEXT = 400
#: A counter is at most so large, unless its field says otherwise: a float holds every whole number up to here.
MAX_COUNT = 2**53
#: A whole number has at most so many digits: 2**64 has 20, and `float()` takes all of these.
MAX_DIGITS = 20
#: Lists and objects are in one another at most so often; what torchelastic writes needs fewer than ten.
MAX_DEPTH = 32
#: The text of an error is cut to so many characters.
_MOST_ERROR = 2000

#: Types of fields. A text; `checked` takes printable ones only: no line ends, no codes.
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
#: How often, how much, which one; -1 in the second: none, or not known.
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
CountIfAny = Annotated[int, Meta(ge=-1, le=MAX_COUNT)]
#: A finite number; in the second one that is not negative. JSON has no NaN and no Infinity; what Python writes for them
#: is refused.
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Amount = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
#: A time that calendars have, up to the year 9999.
UnixSeconds = Annotated[float, Meta(ge=0, le=253_402_300_799)]

T = TypeVar("T")


class RecordError(ValueError):
    """What was read is not what this version writes; the message, one printable line, names where it was read."""

    def __init__(self, text: str) -> None:
        super().__init__(escaped(text[:_MOST_ERROR]))


def decode_json(source: str, data: bytes | str, *, most_bytes: int) -> Any:
    """The value that somebody else has written as JSON.

    Args:
        source: named in errors: a key, a path, an address.
        data: UTF-8, or text.
        most_bytes: what is longer is refused (of text: characters).

    Returns:
        What it holds. A number that is too large is infinite, and NaN and Infinity, which JSON does not have and Python
        writes, are what they are: `checked` refuses them and names the field. Without it, mind that `int()` does too.

    Raises:
        RecordError: it is too long, no JSON, or nested too deep.
    """
    if len(data) > most_bytes:
        raise RecordError(f"{source} holds {len(data)} bytes; at most {most_bytes} are taken")
    try:
        document = _DECODER.decode(data if isinstance(data, str) else data.decode())
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{source} does not hold JSON: {str(error)[:200]}") from error
    if _is_deeper(document, MAX_DEPTH):
        raise RecordError(f"{source} holds JSON that is nested more than {MAX_DEPTH} deep")
    return document


def decode_object(source: str, data: bytes | str, *, most_bytes: int) -> dict[str, Any]:
    """As `decode_json`, of what has to be an object. Raises RecordError."""
    document = decode_json(source, data, most_bytes=most_bytes)
    if not isinstance(document, dict):
        raise RecordError(f"{source}: {type(document).__name__} where an object should be")
    return document


def converted(source: str, document: object, kind: type[T], *, needed: Collection[str] = ()) -> T:
    """What somebody else has written, as a value of one of our types.

    Args:
        source: named in errors.
        document: as JSON was read.
        kind: a dataclass, say, the types of whose fields say what they hold: those of this module have bounds. Nothing
            is made fit (no number is made of a text, none of 1.0 a whole one). What the document has and `kind` has not
            is left out.
        needed: names of fields that the document must have, although `kind` has a value for them.

    Raises:
        RecordError: it does not fit; names the field.
    """
    try:
        value = msgspec.convert(document, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # JSON can name halves of characters
        raise RecordError(f"{source}: {error}") from error
    for name in needed:
        if isinstance(document, Mapping) and name not in document:
            raise RecordError(f"{source}: Object missing required field `{name}`")
    return value


def checked(source: str, document: object, kind: type[T], *, needed: Collection[str] = ()) -> T:
    """As `converted`, and all texts in it are printable. Raises RecordError."""
    value = converted(source, document, kind, needed=needed)
    place = _unprintable(msgspec.to_builtins(value))
    if place is not None:
        raise RecordError(f"{source}: Expected a printable text - at `${place}`")
    return value


def _unprintable(value: object) -> str | None:
    """Where in it the first text is that a terminal may obey, such as `.workers[0].host`; None: there is none."""
    if isinstance(value, str):
        return None if value.isprintable() else ""
    if isinstance(value, dict):
        for name, inner in value.items():
            if not name.isprintable():
                return ""
            place = _unprintable(inner)
            if place is not None:
                return f".{name}{place}"
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            place = _unprintable(inner)
            if place is not None:
                return f"[{number}]{place}"
    return None


def _whole(text: str) -> int | float:
    # int() itself would take up to 4300 digits, and float() of such a number raises OverflowError
    return int(text) if len(text) <= MAX_DIGITS else math.copysign(math.inf, -1 if text.startswith("-") else 1)


_DECODER = json.JSONDecoder(parse_int=_whole)


def _is_deeper(document: object, most: int) -> bool:
    """Whether lists and objects are in one another more than so often; without recursion."""
    level = [document]
    for _ in range(most + 1):
        inner: list[object] = []
        for value in level:
            if isinstance(value, dict):
                inner.extend(value.values())
            elif isinstance(value, list):
                inner.extend(value)
        if not inner:
            return False
        level = inner
    return True
