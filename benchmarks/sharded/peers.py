"""The same model and a kill under torchrun and torchft.

* torchrun: one agent starts all workers again, which read the newest checkpoint of torch.distributed.checkpoint.
* torchft: replicas of two workers which hold one model together, sharded by FSDP2. It loses a replica at a time: both
  of its workers are killed, and the other replicas go on.

Measured as in `benchmarks.recovery.peers`: from the signal until the last member of the next group has committed a
step.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.environment import summary
from benchmarks.recovery.peers import Peer, free_port, has_module, lose_replicas, measured_ms, restart

TMPFS = Path("/dev/shm")
#: Workers of one replica of torchft, over which its model is sharded.
REPLICA_SIZE = 2


def measure_peers(options: argparse.Namespace, ours_ms: float | None) -> dict[str, Any]:
    """All peers that were asked for; where one cannot be measured, why.

    Args:
        options: peers, model, step_ms, workers, every, peer_runs and peers_python.
        ours_ms: the median of ours, if there is one.
    """
    python = options.peers_python or Path(sys.executable)
    ways = {
        "torchrun": ("torchrun_dcp", lambda peer: _restarted(peer, options.every)),
        "torchft": ("torchft_hsdp", _replicas),
    }
    documents = {}
    for peer in options.peers:
        name, measure = ways[peer]
        if not has_module(python, peer):
            documents[name] = {"not_measured": f"{python} has no {peer}: see python -m benchmarks.recovery --help"}
            continue
        times_ms, why = measured_ms(measure, python, options)
        document: dict[str, Any] = {"kill_to_committed_ms": summary(times_ms)} if times_ms else {}
        if times_ms and ours_ms:
            document["times_ours"] = round(summary(times_ms)["median"] / ours_ms, 1)
        if why:
            document["gave_up"] = why
        documents[name] = document
    return documents


def _restarted(peer: Peer, every: int) -> Iterator[float]:
    folder = TMPFS if TMPFS.is_dir() else None
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as checkpoints:
        peer.arguments += [str(every), checkpoints]
        yield from restart(peer, "benchmarks.sharded.peer_torchrun")


def _replicas(peer: Peer) -> Iterator[float]:
    def commands(name: str) -> list[list[str | Path]]:
        with free_port() as port:
            pass
        program: list[str | Path] = [peer.python, "-m", "benchmarks.sharded.peer_torchft", *peer.arguments, name]
        return [[*program, str(rank), str(REPLICA_SIZE), str(port)] for rank in range(REPLICA_SIZE)]

    yield from lose_replicas(peer, peer.workers // REPLICA_SIZE, commands)
