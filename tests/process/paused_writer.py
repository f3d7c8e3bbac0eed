"""A job that stops itself at a call into its disk while it commits, and says how it ended; run by test_fence.py."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.process.tier_saves import context_of, name_at, sealed
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.store import DiskTier, Manifest
from torchelastic.testing import FaultyDisk, pause_at


def main(folder: Path, number: int, method: str) -> None:
    tier = DiskTier(folder)
    context = context_of(tier)
    tier.prepare(context)

    def put(step: int) -> Manifest:
        name = name_at(step, epoch=context.epoch)
        return Manifest(name, context.run_id, 1, (tier.put(sealed(name)),))

    counted = FaultyDisk()
    DiskTier(folder, disk=counted).commit(put(1))
    calls = [place for place, call in enumerate(counted.calls) if call == method]
    manifest, slow = put(2), DiskTier(folder, disk=FaultyDisk(pause_at(calls[number - 1])))
    try:
        slow.commit(manifest)
        print("published", flush=True)
    except CheckpointError as error:
        print(type(error).__name__, error, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
