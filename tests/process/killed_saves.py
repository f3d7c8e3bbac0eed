"""Kills a process at every single call that a save makes into the disk; run by test_tiers_faults.py.

Prints, per killing call: the step that was committed before, the step that the next process finds, what is hidden in
the folder after that process has prepared it, and what is damaged.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from tests.process.tier_saves import DiskThatSignals, context_of, hidden_in, name_at, restore, save
from torchelastic.checkpoint.policy import KeepLast
from torchelastic.checkpoint.shards.disk import REAL_DISK, Disk
from torchelastic.checkpoint.store import DiskTier, MemoryTier, Tier


def tier_of(kind: str, folder: Path, disk: Disk) -> Tier:
    if kind == "memory":
        return MemoryTier(folder, KeepLast(2), disk=disk)
    return DiskTier(folder, KeepLast(2), shared=kind == "shared", disk=disk)


def job(kind: str, folder: Path, disk: Disk, step: int | None) -> tuple[int | None, list[str], list[str | None]]:
    """One job from its start to its end: what it restores, what is hidden or damaged; then it saves a step, if any."""
    tier = tier_of(kind, folder, disk)
    context = context_of(tier)
    tier.prepare(context)
    restored, hidden = restore(tier), hidden_in(folder)
    damage = [entry.damage for entry in tier.inventory() if entry.damage or (tier.is_shared and not entry.ranks)]
    if step is not None:
        save([tier], name_at(step, epoch=context.epoch))
    tier.close()
    return restored, hidden, damage


def main(kind: str, folder: Path) -> None:
    torch.set_num_threads(1)  # a forked child has none of its parent's threads
    outcomes = []
    step = 0
    for killing_call in range(1, 1000):
        step += 1
        job(kind, folder, REAL_DISK, step)
        child = os.fork()
        if child == 0:
            job(kind, folder, DiskThatSignals(killing_call), step + 1)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        outcomes.append((step, *job(kind, folder, REAL_DISK, None)))
        step += 1
        if os.WIFEXITED(status):
            break
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
