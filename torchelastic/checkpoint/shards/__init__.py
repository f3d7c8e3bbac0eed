"""The engine under every tier: one shard format, written once and checked whenever it is read.

A shard is a file of aligned raw tensor bytes behind a small header (`header.py`). A state becomes plain values and
named tensors (`tree.py`, `tensors.py`); a tensor may be split over ranks (`regions.py`) and is put together again by
whatever number of ranks reads it (`loading.py`). Names are loaded on first use (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.checkpoint.shards.loading import read_into, read_tree
    from torchelastic.checkpoint.shards.reading import ShardReader, load_tree
    from torchelastic.checkpoint.shards.tensors import ShardOf
    from torchelastic.checkpoint.shards.tree import flatten, unflatten
    from torchelastic.checkpoint.shards.writing import save_tree

__all__ = [
    "ShardOf",
    "ShardReader",
    "flatten",
    "load_tree",
    "read_into",
    "read_tree",
    "save_tree",
    "unflatten",
]

_MODULE_OF_NAME = {
    "ShardOf": "tensors",
    "ShardReader": "reading",
    "flatten": "tree",
    "load_tree": "reading",
    "read_into": "loading",
    "read_tree": "loading",
    "save_tree": "writing",
    "unflatten": "tree",
}

__getattr__, __dir__ = lazily(__name__, _MODULE_OF_NAME)
