"""Shards, one file format for every checkpoint: saved, loaded, and read by any number of ranks. See `format`.

Names are loaded on first use (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.checkpoint.format.loading import read_into as read_into
    from torchelastic.checkpoint.format.loading import read_tree as read_tree
    from torchelastic.checkpoint.format.shard_reader import ShardReader as ShardReader
    from torchelastic.checkpoint.format.shard_reader import load_tree as load_tree
    from torchelastic.checkpoint.format.shard_writing import save_tree as save_tree
    from torchelastic.checkpoint.format.tensor_parts import ShardOf as ShardOf
    from torchelastic.checkpoint.format.tree import flatten as flatten
    from torchelastic.checkpoint.format.tree import unflatten as unflatten

__getattr__, __dir__ = lazily(__name__)
