"""Models of which every worker holds a part (FSDP2, HSDP), and that live through changes of the group: `ShardedState`.

In a new group `build(mesh)` makes model and optimizer again. Each rank publishes what it holds and what it needs; all
compute from that which state of the run is whole and is gone on from, and each receives just the parts that it lacks.
What was held before is given up when every rank has its parts. Between changes each rank keeps a copy of its parts in
the memory of another one. Everything runs on the training thread, but for the sending of copies.
"""

from __future__ import annotations

from torchelastic.sharded.mesh import FullShard, HybridShard
from torchelastic.sharded.sharded_state import ShardedState

__all__ = ["FullShard", "HybridShard", "ShardedState"]
