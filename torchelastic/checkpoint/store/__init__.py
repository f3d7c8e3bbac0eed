"""Where checkpoints lie, and what makes one: names, the manifest, commits, inventories; memory, disks, durable storage.

In a folder that all ranks share, a checkpoint looks like this::

    <root>/step-000000123.e1.r5.g7/shard-00000-of-00002.shard
                                   shard-00001-of-00002.shard
                                   manifest.json
    <root>/.tmp-step-000000124.e1.r5.g8/     being written: readers pass over what is hidden

All ranks fill it and one of them publishes it, by one rename. Where no rename can do that (storage of objects; folders
of which each host has its own) the same files lie under the final name from the beginning, and the manifest comes last.
Hosts with folders of their own learn of the commit at other times: if the first one removes the older checkpoint and
dies, its shards of the new one are found on the others, although nobody there has committed them.
Nothing in here waits for another rank, talks to one, or orders anything by a clock. Names are loaded on first use
(PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.checkpoint.store.disk_tier import DiskTier as DiskTier
    from torchelastic.checkpoint.store.durable_tier import DurableTier as DurableTier
    from torchelastic.checkpoint.store.manifest import MANIFEST_NAME as MANIFEST_NAME
    from torchelastic.checkpoint.store.manifest import Manifest as Manifest
    from torchelastic.checkpoint.store.manifest import ShardRecord as ShardRecord
    from torchelastic.checkpoint.store.memory_tier import MemoryTier as MemoryTier
    from torchelastic.checkpoint.store.reading import list_checkpoints as list_checkpoints
    from torchelastic.checkpoint.store.reading import open_checkpoint as open_checkpoint
    from torchelastic.checkpoint.store.save_id import SaveId as SaveId
    from torchelastic.checkpoint.store.tier import SealedShard as SealedShard
    from torchelastic.checkpoint.store.tier import Tier as Tier
    from torchelastic.checkpoint.store.tier import TierContext as TierContext
    from torchelastic.checkpoint.store.tier import TierEntry as TierEntry

__getattr__, __dir__ = lazily(__name__)
