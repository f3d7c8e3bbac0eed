"""What the live page does with a change, in Python: a JSON Merge Patch (RFC 7396)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def applied(document: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """The document once it is patched."""
    result = dict(document)
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict):
            before = result.get(name)
            result[name] = applied(before if isinstance(before, dict) else {}, value)
        else:
            result[name] = value
    return result
