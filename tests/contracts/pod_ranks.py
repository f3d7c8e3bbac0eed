"""One rank of a job whose ranks are in pods: saves with replicas and says where they are; run by test_pods.py."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.contracts import memory_ranks
from torchelastic.checkpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager
from torchelastic.checkpoint.replication import CliqueReplicationStrategy


def local(root: Path, rank: int) -> dict[str, Any]:
    """With LocalCheckpointManager; then this pod's folder is lost."""
    manager = LocalCheckpointManager(
        root / f"pod-{rank}", repl_strategy=CliqueReplicationStrategy.from_replication_params(1, 2), timeout_s=30
    )
    manager.save(BasicTensorAwareStateDict({"weights": torch.full((1000,), float(rank))}), 7)
    return {"shards": len(list(manager.local_ckpt_dir.rglob("*.shard")))}


def memory(root: Path, rank: int) -> dict[str, Any]:
    """With DCP into memory."""
    memory_ranks.save(root, 7)
    shards = memory_ranks.shards_of(root, rank, 7)
    return {"shards": len(shards) - 1}  # the last one holds the metadata


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    kind, root = sys.argv[1], Path(sys.argv[2])
    answer = (local if kind == "local" else memory)(root, dist.get_rank())
    dist.barrier()
    print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
