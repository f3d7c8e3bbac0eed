"""Takes fields out of a JSON object that somebody else has written: what is not as it should be is a RecordError."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torchelastic.rendezvous.records import MAX_COUNT, RecordError

#: No text in a status is longer (a host's name has at most 253 characters).
MAX_TEXT = 400
_LARGEST = sys.float_info.max


class Fields:
    """One object. What it lacks is as it is by default; what it has is checked.

    Args:
        source: named in errors.
        document: as JSON was read.

    Raises:
        RecordError: it is no object.
    """

    def __init__(self, source: str, document: object) -> None:
        if not isinstance(document, dict):
            raise RecordError(f"{source}: {type(document).__name__} where an object should be")
        self.source, self._document = source, document

    def text(self, name: str, default: str | None = "") -> str:
        """A text that can be printed; without a default it must be there. Raises RecordError."""
        value = self._document.get(name, default)
        if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
            raise self._wrong(name, f"a printable text of at most {MAX_TEXT} characters")
        return value

    def whole(self, name: str, default: int = 0, *, least: int = 0, most: int = MAX_COUNT) -> int:
        """A whole number within bounds. Raises RecordError."""
        value = self._document.get(name, default)
        if type(value) is not int or not least <= value <= most:
            raise self._wrong(name, f"a whole number from {least} on")
        return value

    def number(self, name: str, default: float | None = 0.0) -> float:
        """A finite number that is not negative; without a default it must be there. Raises RecordError."""
        value = self._document.get(name, default)
        if value is None or not _is_finite(value) or value < 0:
            raise self._wrong(name, "a finite number that is not negative")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false; false by default. Raises RecordError."""
        value = self._document.get(name, False)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

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


def _is_finite(value: object) -> bool:
    # a whole number may be larger than any float
    return type(value) in (int, float) and -_LARGEST <= value <= _LARGEST  # type: ignore[operator]  # they are numbers
