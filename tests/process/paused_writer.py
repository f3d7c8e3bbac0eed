"""A job that stops itself at a call into its disk while it commits, and says how it ended; run by test_fence.py."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from tests.process.tier_saves import DiskThatSignals, context_of, name_at, save, sealed
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.store import DiskTier, Manifest


def main(folder: Path, number: int, method: str) -> None:
    tier = DiskTier(folder)
    context = context_of(tier)
    tier.prepare(context)
    save([tier], name_at(1, epoch=context.epoch))
    name = name_at(2, epoch=context.epoch)
    tier.put(sealed(name))
    record = sealed(name).record
    slow = DiskTier(folder, disk=DiskThatSignals(number, signal.SIGSTOP, method))
    try:
        slow.commit(Manifest(name, context.run_id, 1, (record,)))
        print("published", flush=True)
    except CheckpointError as error:
        print(type(error).__name__, error, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
