"""Models of which every worker holds a part: see README.md."""

from __future__ import annotations

from torchelastic.sharded.mesh import FullShard, HybridShard
from torchelastic.sharded.state import ShardedState

__all__ = ["FullShard", "HybridShard", "ShardedState"]
