"""`show`: what one checkpoint holds; nothing of it is run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torchelastic.checkpoint.command.format import Contents, FoundCheckpoint
from torchelastic.checkpoint.command.listing import record_of
from torchelastic.checkpoint.command.stored_saves import StoredSaves
from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.checkpoint.format.structures import children, value_text
from torchelastic.console import say, say_json, table
from torchelastic.text import age_text, bytes_text, number_text

#: Longer lists of plain values (the state of a random generator, say) are counted, not shown.
MAX_ITEMS = 20
MAX_VALUE_CHARS = 200


def show(saves: StoredSaves, *, tensors: bool, values: bool, as_json: bool, now_s: float) -> int:
    """`torchelastic checkpoint show`; returns the exit code.

    Args:
        saves: of several the newest complete one is shown.
        tensors: list every tensor.
        values: print the plain values as a tree.
        as_json: one line for programs instead.
        now_s: the time, to tell ages.

    Raises:
        CheckpointCommandError: there is no complete checkpoint, or it cannot be read in this way.
    """
    found, (contents, sizes) = saves.read_newest(
        lambda one: (one.format.contents(one), {shard.name: shard.stat().st_size for shard in one.shards})
    )
    try:
        lines = tree_lines(contents.structure) if values else []
        document = _document(found, contents, sizes, tensors=tensors, values=values)
    except (StopIteration, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"the structure of the state in {found.path} is damaged: {error!r}") from error
    if as_json:
        say_json(document)
        return 0
    _say_summary(found, contents, sizes, now_s)
    if tensors:
        say("")
        rows = [
            (t.name, t.dtype, str(list(t.shape)), bytes_text(t.size_bytes), " ".join(t.shards))
            for t in contents.tensors
        ]
        table(("TENSOR", "DTYPE", "SHAPE", "SIZE", "SHARDS"), rows)
    if values:
        say("")
        for line in lines:
            say(line)
    return 0


def tree_lines(structure: Any, indent: int = 0) -> list[str]:
    """Plain values as a tree, one line each; None where the shards that are here do not hold them."""
    if structure is None and not indent:
        return ["(the plain values are in the shard of another rank)"]
    lines = []
    for key, node in children(structure) or [("", structure)]:
        start = "  " * indent + (f"{key}: " if key else "")
        items = children(node)
        if not items or (len(items) > MAX_ITEMS and all(children(item) is None for _, item in items)):
            lines.append(start + _short(node, items))
        else:
            lines += [start.rstrip(), *tree_lines(node, indent + 1)]
    return lines


def _short(node: Any, items: list[tuple[str, Any]] | None) -> str:
    if items:
        return f"{len(items)} values"
    if isinstance(node, dict):
        kind, value = next(iter(node.items()))
        if kind in ("numpy", "long_bytes"):
            value = value["leaf"]
        if kind in ("leaf", "numpy", "long_bytes"):
            return f"tensor {value['names'].get('data') or min(value['names'].values())}"
    text = value_text(node)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}... ({len(text)} characters)"


def _say_summary(found: FoundCheckpoint, contents: Contents, sizes: Mapping[str, int], now_s: float) -> None:
    lines = {
        "checkpoint": str(found.path),
        "kind": found.format.kind,
        found.format.step_title: "-" if found.step is None else str(found.step),
        "world size": "-" if found.world_size is None else str(found.world_size),
        "age": age_text(now_s - found.saved_s),
        "size": bytes_text(found.size_bytes),
        **{name: str(value) for name, value in found.facts.items()},
        **{name: number_text(value) for name, value in found.metrics.items()},
        "tensors": _counted(contents),
    }
    width = max(map(len, lines))
    for name, text in lines.items():
        say(f"{name.ljust(width)}  {text}")
    if len(sizes) > 1:
        say("")
        table(("SHARD", "SIZE"), [(name, bytes_text(size)) for name, size in sizes.items()])


def _counted(contents: Contents) -> str:
    dtypes = Counter(row.dtype for row in contents.tensors)
    parts = ", ".join(f"{count} {dtype}" for dtype, count in sorted(dtypes.items()))
    total = sum(row.size_bytes for row in contents.tensors)
    return f"{len(contents.tensors)}, {bytes_text(total)}" + (f" ({parts})" if parts else "")


def _document(
    found: FoundCheckpoint, contents: Contents, sizes: Mapping[str, int], *, tensors: bool, values: bool
) -> dict[str, Any]:
    document: dict[str, Any] = {**record_of(found), "facts": dict(found.facts)}
    document["shards"] = [{"file": name, "size_bytes": size} for name, size in sizes.items()]
    document["tensor_count"] = len(contents.tensors)
    document["tensor_bytes"] = sum(row.size_bytes for row in contents.tensors)
    if tensors:
        document["tensors"] = [asdict(row) for row in contents.tensors]
    if values:
        document["values"] = _as_json(contents.structure)
    return document


def _as_json(node: Any) -> Any:
    """Containers as objects and arrays, plain values as they are, everything else as text."""
    items = children(node)
    if items is None:
        return node if not isinstance(node, dict) else _short(node, None)
    is_mapping = isinstance(node, dict) and next(iter(node)) in ("dict", "ordered")
    return {key: _as_json(item) for key, item in items} if is_mapping else [_as_json(item) for _, item in items]
