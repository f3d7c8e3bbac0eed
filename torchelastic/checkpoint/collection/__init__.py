"""A checkpoint of several shards: one folder, filled by all ranks, published by one rename.

In a folder it looks like this::

    <root>/step-000000123.e1.r5.g7/shard-00000-of-00002.shard
                                   shard-00001-of-00002.shard
                                   manifest.json
    <root>/.tmp-step-000000124.e1.r5.g8/     being written: readers pass over what is hidden

Every rank calls `begin` and `write_shard`; when all have returned, one of them calls `commit`. Nothing in here waits
for another rank, talks to one, or orders anything by a clock. Names are loaded on first use (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.checkpoint.collection.manifest import (
        MANIFEST_NAME,
        CheckpointName,
        Manifest,
        ShardRecord,
        decode_manifest,
        encode_manifest,
        shard_file_name,
    )
    from torchelastic.checkpoint.collection.reading import (
        CheckpointInfo,
        OpenCheckpoint,
        list_checkpoints,
        open_checkpoint,
        open_shard,
        read_manifest,
        record_of,
    )
    from torchelastic.checkpoint.collection.removal import (
        abandon,
        prunable_checkpoints,
        prune,
        remove_checkpoint,
        remove_left_overs,
    )
    from torchelastic.checkpoint.collection.writing import begin, commit, require_stored, write_manifest, write_shard

__all__ = [
    "MANIFEST_NAME",
    "CheckpointInfo",
    "CheckpointName",
    "Manifest",
    "OpenCheckpoint",
    "ShardRecord",
    "abandon",
    "begin",
    "commit",
    "decode_manifest",
    "encode_manifest",
    "list_checkpoints",
    "open_checkpoint",
    "open_shard",
    "prunable_checkpoints",
    "prune",
    "read_manifest",
    "record_of",
    "remove_checkpoint",
    "remove_left_overs",
    "require_stored",
    "shard_file_name",
    "write_manifest",
    "write_shard",
]

_NAMES_OF_HOME = {
    "manifest": (
        "MANIFEST_NAME",
        "CheckpointName",
        "Manifest",
        "ShardRecord",
        "decode_manifest",
        "encode_manifest",
        "shard_file_name",
    ),
    "reading": (
        "CheckpointInfo",
        "OpenCheckpoint",
        "list_checkpoints",
        "open_checkpoint",
        "open_shard",
        "read_manifest",
        "record_of",
    ),
    "removal": ("abandon", "prunable_checkpoints", "prune", "remove_checkpoint", "remove_left_overs"),
    "writing": ("begin", "commit", "require_stored", "write_manifest", "write_shard"),
}
_HOME_OF_NAME = {name: f"{__name__}.{home}" for home, names in _NAMES_OF_HOME.items() for name in names}

__getattr__, __dir__ = lazily(__name__, _HOME_OF_NAME)
