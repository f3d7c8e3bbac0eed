"""Values of the standard library and of numpy as simpler ones, and back: dates, exact numbers, ranges and the like.

Only a value of exactly such a class is one: a subclass (a `pandas.Timestamp`, say) may hold more.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch


class Plain(NamedTuple):
    """A value taken apart.

    Attributes:
        kind: which of those that this module knows.
        content: numbers, texts, bytes, tuples of them, and other values of this module.
    """

    kind: str
    content: Any


class _Kind(NamedTuple):
    name: str
    taken_apart: Callable[[Any], Any]
    made: Callable[[Any], Any]


def content_of(value: Any) -> Plain | None:
    """A value as a simpler one; None if it is none of those that this module knows."""
    kind = _KINDS.get(type(value))
    if kind is not None:
        return Plain(kind.name, kind.taken_apart(value))
    if isinstance(value, np.dtype) and value.fields is None and value.kind != "O":
        return Plain("numpy dtype", value.str)
    if type(value) is np.ndarray and value.dtype.kind in _NUMPY_KINDS:
        return Plain("numpy array", _array_content(value))
    return None


def made_of_content(kind: str, content: Any) -> Any:
    """The inverse of `content_of`.

    Raises:
        ValueError, TypeError, ArithmeticError, KeyError: this is nothing that `content_of` gives.
    """
    if kind not in _BY_NAME:
        raise ValueError(f"unknown kind of object {kind!r}")
    return _BY_NAME[kind](content)


def _time_content(value: datetime.time | datetime.datetime) -> tuple[str, Any, int]:
    return value.replace(tzinfo=None, fold=0).isoformat(), value.tzinfo, value.fold


def _time(content: Any) -> datetime.time:
    text, zone, fold = content
    return datetime.time.fromisoformat(text).replace(tzinfo=zone, fold=fold)


def _datetime(content: Any) -> datetime.datetime:
    text, zone, fold = content
    return datetime.datetime.fromisoformat(text).replace(tzinfo=zone, fold=fold)


def _timezone_content(value: datetime.timezone) -> tuple[datetime.timedelta, str]:
    return value.utcoffset(None), value.tzname(None)


def _timezone(content: Any) -> datetime.timezone:
    offset, name = content
    unnamed = datetime.timezone(offset)  # `datetime.timezone.utc` itself for no offset
    return unnamed if unnamed.tzname(None) == name else datetime.timezone(offset, name)


def _array_content(array: np.ndarray[Any, Any]) -> tuple[str, tuple[int, ...], bytes]:
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return native.dtype.str, native.shape, native.tobytes()


def _array(content: Any) -> np.ndarray[Any, Any]:
    name, shape, data = content
    dtype = np.dtype(name)
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"an array of {name!r} is not stored as bytes")
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _scalar_content(value: np.generic) -> tuple[str, tuple[int, ...], bytes]:
    return _array_content(np.asarray(value))


def _scalar(content: Any) -> Any:
    return _array(content)[()]


def _numpy_dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind == "O":
        raise ValueError("a dtype of objects is not stored")
    return dtype


def _of_torch(name: str, kind: type) -> Any:
    found = vars(torch).get(name.removeprefix("torch."))
    if not isinstance(found, kind):
        raise ValueError(f"this torch has no {kind.__name__} {name!r}")
    return found


#: Arrays that torch has no type for: times, their differences, texts, bytes.
_NUMPY_KINDS = "MmUS"

_KINDS: dict[type, _Kind] = {
    np.str_: _Kind("numpy text", str, np.str_),
    np.bytes_: _Kind("numpy bytes", bytes, np.bytes_),
    np.datetime64: _Kind("numpy time", _scalar_content, _scalar),
    np.timedelta64: _Kind("numpy times apart", _scalar_content, _scalar),
    datetime.date: _Kind("date", datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.datetime: _Kind("datetime", _time_content, _datetime),
    datetime.time: _Kind("time", _time_content, _time),
    datetime.timedelta: _Kind(
        "timedelta", lambda one: (one.days, one.seconds, one.microseconds), lambda parts: datetime.timedelta(*parts)
    ),
    datetime.timezone: _Kind("timezone", _timezone_content, _timezone),
    zoneinfo.ZoneInfo: _Kind("zone", lambda zone: zone.key, zoneinfo.ZoneInfo),
    range: _Kind("range", lambda one: (one.start, one.stop, one.step), lambda parts: range(*parts)),
    slice: _Kind("slice", lambda one: (one.start, one.stop, one.step), lambda parts: slice(*parts)),
    uuid.UUID: _Kind("uuid", str, uuid.UUID),
    decimal.Decimal: _Kind("decimal", str, decimal.Decimal),
    fractions.Fraction: _Kind(
        "fraction", lambda one: (one.numerator, one.denominator), lambda parts: fractions.Fraction(*parts)
    ),
    torch.layout: _Kind("layout", str, lambda name: _of_torch(name, torch.layout)),
    torch.memory_format: _Kind("memory format", str, lambda name: _of_torch(name, torch.memory_format)),
}
_BY_NAME: dict[str, Callable[[Any], Any]] = {
    **{kind.name: kind.made for kind in _KINDS.values()},
    "numpy dtype": _numpy_dtype,
    "numpy array": _array,
}
#: What `Plain.kind` may be.
PLAIN_KINDS = frozenset(_BY_NAME)
