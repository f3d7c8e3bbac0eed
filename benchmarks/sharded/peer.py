"""The same model and the same kill under torchrun, with checkpoints of torch.distributed.checkpoint in tmpfs."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.environment import summary
from benchmarks.recovery.peers import Peer, measured_ms, restart

TMPFS = Path("/dev/shm")


def measure_peer(options: argparse.Namespace, ours_ms: float | None) -> dict[str, Any]:
    """One agent starts all workers again, which read the newest checkpoint: from the signal to a step of all.

    Args:
        options: model, step_ms, workers, every, peer_runs and peers_python.
        ours_ms: the median of ours, if there is one.
    """

    def restarted(peer: Peer) -> Iterator[float]:
        with tempfile.TemporaryDirectory(
            dir=TMPFS if TMPFS.is_dir() else None, ignore_cleanup_errors=True
        ) as checkpoints:
            peer.arguments += [str(options.every), checkpoints]
            yield from restart(peer, "benchmarks.sharded.peer_torchrun")

    times_ms, why = measured_ms(restarted, options.peers_python or Path(sys.executable), options)
    document: dict[str, Any] = {"kill_to_committed_ms": summary(times_ms)} if times_ms else {}
    if times_ms and ours_ms:
        document["times_ours"] = round(summary(times_ms)["median"] / ours_ms, 1)
    if why:
        document["gave_up"] = why
    return document
