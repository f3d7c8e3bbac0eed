"""What has changed between two JSON documents, as a JSON Merge Patch (RFC 7396). Pure.

The documents hold no nulls, which a merge patch keeps for what is gone, and lists only where they may be sent whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Document = dict[str, Any]


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> Document:
    """The patch that makes `new` of `old`; empty: they are the same."""
    patch: Document = {name: None for name in old if name not in new}
    for name, value in new.items():
        if name not in old:
            patch[name] = value
        elif isinstance(value, dict) and isinstance(old[name], dict):
            inner = difference(old[name], value)
            if inner:
                patch[name] = inner
        elif old[name] != value or type(old[name]) is not type(value):
            patch[name] = value
    return patch


def applied(document: Mapping[str, Any], patch: Mapping[str, Any]) -> Document:
    """The document once it is patched; the page does the same."""
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
