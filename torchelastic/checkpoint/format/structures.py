"""Pure: walking over the structure that `flatten` makes, without building anything of it."""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torchelastic.checkpoint.format.places import place_text, token

#: What JSON can hold.
Plain = Any

_MAPPINGS = ("dict", "ordered", "made_of")
_SEQUENCES = ("tuple", "set", "frozenset")


def places_of(structure: Plain, kinds: Collection[str]) -> Iterator[tuple[str, str]]:
    """Where values of some kinds are, and of which kind each is.

    Args:
        structure: of a header.
        kinds: as `flatten` names them, such as "pickle"; a tensor also goes by the kind of its recipe.
    """
    for path, node in _nodes(structure, ()):
        kind = kind_of(node)
        if kind in kinds:
            yield place_text([key if key.removeprefix("-").isdecimal() else token(key) for key in path]), kind


def leaf_paths(structure: Plain) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """The path of each tensor, unescaped, and its recipe with the names of its parts.

    A tensor that is in several places comes once for each.
    """
    for path, node in _nodes(structure, ()):
        if isinstance(node, dict):
            kind, value = _opened(node)
            if kind == "leaf":
                yield path, value
            elif kind in ("numpy", "long_bytes") or (kind == "object" and is_leaf(value)):
                yield path, value["leaf"]


def is_leaf(node: Plain) -> bool:
    """Whether a node is a tensor."""
    return isinstance(node, dict) and "leaf" in node


def kind_of(node: Plain) -> str:
    """The kind of a node: `flatten`'s word for it, that of a tensor's recipe, or "" for what JSON holds itself."""
    if not isinstance(node, dict):
        return ""
    kind, value = _opened(node)
    if kind == "object":
        return str(node["about"]["as"])
    return str(value["kind"]) if kind == "leaf" else str(kind)


def children(node: Plain) -> list[tuple[str, Plain]] | None:
    """What a container holds, by key or position; None for everything else."""
    if isinstance(node, list):
        return [(str(index), item) for index, item in enumerate(node)]
    if not isinstance(node, dict):
        return None
    kind, value = _opened(node)
    if kind == "object":
        return children(value)
    if kind in _MAPPINGS:
        return [(key_text(key), item) for key, item in value]
    if kind in _SEQUENCES:
        return [(str(index), item) for index, item in enumerate(value)]
    return None


def key_text(key: Plain) -> str:
    """A key of a dict as text, as `str` would give it for plain ones."""
    if not isinstance(key, (dict, list)):
        return str(key)
    return value_text(key)


def value_text(node: Plain) -> str:
    """A value that is no container and no tensor, as Python would write it; nothing of it is built or run."""
    if isinstance(node, list):
        return f"[{', '.join(map(value_text, node))}]"
    if not isinstance(node, dict):
        return repr(node)
    kind, value = _opened(node)
    if kind in ("tuple", "set", "frozenset", "dict", "ordered"):
        return f"{kind}({', '.join(value_text(item) for _, item in children(node) or ())})"
    if kind == "object":
        about = node["about"]
        return f"{about.get('class', about['as']).replace(':', '.')}({value_text(value)})"
    if kind in ("bytes", "bytearray"):
        return f"{kind} of {len(base64.b64decode(value))} bytes"
    if kind == "complex":
        return f"complex({', '.join(value)})"
    if kind == "pickle":
        return f"pickle of {len(base64.b64decode(value))} bytes (not opened)"
    if kind in ("leaf", "numpy", "long_bytes"):
        return kind
    if kind == "made_of":
        return f"{node['class'].replace(':', '.')}({', '.join(key for key, _ in children(node) or ())})"
    return f"{kind}({value})" if kind != "float" else str(value)


def to_json(structure: Plain) -> str:
    """The structure as it goes into the metadata of other formats."""
    return json.dumps({"version": 1, "structure": structure}, separators=(",", ":"), allow_nan=False)


def from_json(text: str) -> Plain:
    """The inverse of `to_json`. Raises ValueError where it is not."""
    document = json.loads(text)
    if not isinstance(document, dict) or document.get("version") != 1:
        raise ValueError("a newer release of torchelastic wrote it, or something else did")
    return document["structure"]


def _nodes(node: Plain, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Plain]]:
    yield path, node
    for key, item in children(node) or ():
        yield from _nodes(item, (*path, key))


def _opened(node: Mapping[str, Any]) -> tuple[str, Any]:
    """The kind of a node that is no plain value, and what it is made of."""
    return next(iter(node.items()))
