"""The engine under every tier: one shard format, written once and checked whenever it is read.

A shard is a file of aligned raw tensor bytes behind a small header (`header.py`). A state becomes plain values and
named tensors (`tree.py`, `tensors.py`); a tensor may be split over ranks (`regions.py`) and is put together again by
whatever number of ranks reads it (`loading.py`). Names are loaded on first use (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.checkpoint.shards.loading import read_into as read_into
    from torchelastic.checkpoint.shards.loading import read_tree as read_tree
    from torchelastic.checkpoint.shards.reading import ShardReader as ShardReader
    from torchelastic.checkpoint.shards.reading import load_tree as load_tree
    from torchelastic.checkpoint.shards.tensors import ShardOf as ShardOf
    from torchelastic.checkpoint.shards.tree import flatten as flatten
    from torchelastic.checkpoint.shards.tree import unflatten as unflatten
    from torchelastic.checkpoint.shards.writing import save_tree as save_tree

__getattr__, __dir__ = lazily(__name__)
