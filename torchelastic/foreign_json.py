"""JSON that somebody else has written, another process, host or service: decoded within bounds, or refused.

Whatever is wrong with it, there is one error, `RecordError`, and it names where the JSON came from. `decode_json`
bounds what there can be at all: no whole number is too large for `float()`, nothing is nested so deep that it cannot be
written again. `Fields` takes the values out of an object, each within the bounds of its field.
"""

from __future__ import annotations

import enum
import json
import math
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

from torchelastic.text import escaped

#: A text has at most so many characters, unless its reader says otherwise (a host's name has at most 253).
MAX_TEXT = 400
#: A counter is at most so large, unless its reader says otherwise: a float holds every whole number up to here.
MAX_COUNT = 2**53
#: A whole number has at most so many digits: 2**64 has 20, and `float()` takes all of these.
MAX_DIGITS = 20
#: Lists and objects are in one another at most so often; what torchelastic writes needs fewer than ten.
MAX_DEPTH = 32
#: The text of an error is cut to so many characters.
_MOST_ERROR = 2000
_LARGEST = sys.float_info.max

E = TypeVar("E", bound=enum.Enum)


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
        writes, are what they are: `Fields` refuses them and names the field. Without it, mind that `int()` does too.

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


def is_text(value: object, most: int) -> bool:
    """Whether it is a text of at most so many characters that UTF-8 can hold: JSON can name halves of characters."""
    if not isinstance(value, str) or len(value) > most:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


class Fields:
    """One object. What it lacks is as it is by default; what it has is checked. A default of None: it must be there.

    Args:
        source: named in errors.
        document: as JSON was read.

    Raises:
        RecordError: it is no object.
    """

    def __init__(self, source: str, document: object) -> None:
        if not isinstance(document, Mapping):
            raise RecordError(f"{source}: {type(document).__name__} where an object should be")
        self.source, self._document = source, document

    def text(self, name: str, default: str | None = "", *, most: int = MAX_TEXT) -> str:
        """A printable text: no line ends, no codes. Raises RecordError."""
        value = self._document.get(name, default)
        if not is_text(value, most) or not value.isprintable():
            raise self._wrong(name, f"a printable text of at most {most} characters")
        return str(value)

    def whole(self, name: str, default: int | None = 0, *, least: int = 0, most: int = MAX_COUNT) -> int:
        """A whole number within bounds. Raises RecordError."""
        value = self._document.get(name, default)
        # bool is an int in Python; a number is wanted where the record says number
        if type(value) is not int or not least <= value <= most:
            raise self._wrong(name, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str, default: float | None = 0.0, *, most: float = _LARGEST) -> float:
        """A finite number that is not negative. Raises RecordError."""
        value = self._document.get(name, default)
        if not _is_finite(value) or not 0 <= value <= most:
            bound = "" if most == _LARGEST else f" and at most {most:g}"
            raise self._wrong(name, f"a finite number that is not negative{bound}")
        return float(value)

    def flag(self, name: str, default: bool | None = False) -> bool:
        """True or false. Raises RecordError."""
        value = self._document.get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def member_of(self, kind: type[E], name: str) -> E:
        """One of an enumeration, by its value; it must be there. Raises RecordError."""
        value = self._document.get(name)
        for member in kind:
            if type(value) is type(member.value) and value == member.value:
                return member
        raise self._wrong(name, f"one of {', '.join(str(member.value) for member in kind)}")

    def texts(self, name: str, *, most: int = MAX_TEXT, is_optional: bool = False) -> tuple[str, ...]:
        """A list of texts, each printable; an optional one is empty where it is missing. Raises RecordError."""
        values = self._document.get(name, [] if is_optional else None)
        if not isinstance(values, list) or not all(is_text(value, most) and value.isprintable() for value in values):
            raise self._wrong(name, f"a list of printable texts of at most {most} characters")
        return tuple(values)

    def wholes(self, name: str, *, least: int = 0, below: int) -> tuple[int, ...]:
        """A list of whole numbers within bounds; it must be there. Raises RecordError."""
        values = self._document.get(name)
        if not isinstance(values, list) or not all(type(value) is int and least <= value < below for value in values):
            raise self._wrong(name, f"a list of whole numbers from {least}, below {below}")
        return tuple(values)

    def parts(self, name: str, most: int) -> list[Fields]:
        """A list of at most so many objects. Raises RecordError."""
        values = self._document.get(name, [])
        if not isinstance(values, list) or len(values) > most:
            raise self._wrong(name, f"a list of at most {most}")
        return [Fields(f"{self.source}: {name}", value) for value in values]

    def numbers(self, name: str, most: int) -> dict[str, float]:
        """At most so many finite numbers by name. Raises RecordError."""
        values = self._document.get(name, {})
        if not isinstance(values, dict) or len(values) > most or not all(map(_is_finite, values.values())):
            raise self._wrong(name, f"at most {most} finite numbers by name")
        if not all(label.isprintable() and len(label) <= MAX_TEXT for label in values):
            raise self._wrong(name, "numbers with printable names")
        return {label: float(value) for label, value in values.items()}

    def object(self, name: str) -> Mapping[str, Any]:
        """Something by name; nothing by default. Raises RecordError."""
        value = self._document.get(name, {})
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return value

    def _wrong(self, name: str, wanted: str) -> RecordError:
        return RecordError(f"{self.source}: field {name!r} is not {wanted}")


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


def _is_finite(value: object) -> bool:
    # a whole number may be larger than any float
    return type(value) in (int, float) and -_LARGEST <= value <= _LARGEST  # type: ignore[operator]  # they are numbers
