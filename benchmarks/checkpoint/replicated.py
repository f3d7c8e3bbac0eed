"""`python -m benchmarks.checkpoint.replicated`: what replication costs training, on two ranks of one host.

Each rank saves the same bytes in the background, once without and once with a copy at the other rank, in turn. Printed
are ratios to a memcpy of them: how long training stands still, and when the checkpoint, with its copy, is there.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.checkpoint.nvrx import NvrxAsync
from benchmarks.checkpoint.payload import Memcpy, Payload, timed_ms
from benchmarks.checkpoint.ways import OursAsync, Way, use_threads
from benchmarks.environment import print_result
from torchelastic.checkpoint.local import LocalCheckpointManager
from torchelastic.checkpoint.replication import CliqueReplicationStrategy

RANKS = 2
#: Of each rank; see `use_threads`.
THREADS = 1


class OursReplicated(OursAsync):
    """With a copy at the other rank."""

    def make_manager(self) -> LocalCheckpointManager:
        strategy = CliqueReplicationStrategy.from_replication_params(1, RANKS)
        return LocalCheckpointManager(self.folder, repl_strategy=strategy)


class NvrxReplicated(NvrxAsync):
    """With a copy at the other rank."""

    def make_manager(self) -> Any:
        base = "nvidia_resiliency_ext.checkpointing.local"
        strategies = importlib.import_module(f"{base}.replication.strategies")
        local = importlib.import_module(f"{base}.ckpt_managers.local_manager")
        strategy = strategies.CliqueReplicationStrategy.from_replication_params(1, RANKS)
        return local.LocalCheckpointManager(str(self.folder), repl_strategy=strategy)


WAYS: dict[str, tuple[type[Way], type[Way]]] = {
    "ours": (OursAsync, OursReplicated),
    "nvrx": (NvrxAsync, NvrxReplicated),
}


def main() -> None:
    """Measure and print one line per size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint.replicated", description=__doc__)
    parser.add_argument("--sizes", default="256x32,256x4096", help="MiB per rank, and how many tensors after an x")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--ways", default="ours,nvrx")
    parser.add_argument("--folder", default="/dev/shm", help="on tmpfs")
    options = parser.parse_args()
    for spec in options.sizes.split(","):
        size, _, count = spec.partition("x")
        results: dict[str, Any] = {}
        for name in options.ways.split(","):
            if name == "nvrx" and importlib.util.find_spec("nvidia_resiliency_ext") is None:
                results[name] = {"not_measured": "see benchmarks.checkpoint for how to get it"}
                continue
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                arguments = (name, int(size), int(count or 32), options.runs, folder)
                spawn(work, arguments, nprocs=RANKS)  # type: ignore[no-untyped-call]
                results[name] = json.loads((Path(folder) / "result.json").read_text())
        print_result(
            "checkpoint.replicated",
            ranks=RANKS,
            threads=THREADS,
            size_mib=int(size),
            tensors=int(count or 32),
            **results,
        )


def work(rank: int, name: str, size_mib: int, count: int, runs: int, folder: str) -> None:
    """One rank; rank 0 writes down the medians."""
    use_threads(THREADS)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    payload = Payload.of(size_mib, count)
    floor = Memcpy(payload)
    plain, replicated = (kind(Path(folder) / f"{kind.__name__}-{rank}", payload) for kind in WAYS[name])
    figures: dict[str, list[float]] = defaultdict(list)
    for run in range(runs + 2):
        for label, way in (("plain", plain), ("replicated", replicated)):
            payload.change()
            copy_ms = statistics.median(floor.once_ms() for _ in range(3))
            dist.barrier()
            blocking_ms = timed_ms(way.save)
            durable_ms = blocking_ms + timed_ms(way.wait)
            way.tidy()
            if run >= 2:  # the first ones allocate
                figures[f"{label}_blocking_x"].append(blocking_ms / copy_ms)
                figures[f"{label}_durable_x"].append(durable_ms / copy_ms)
                figures["memcpy_ms"].append(copy_ms)
    if rank == 0:
        medians = {label: round(statistics.median(values), 2) for label, values in figures.items()}
        medians["blocking_ratio"] = round(medians["replicated_blocking_x"] / medians["plain_blocking_x"], 2)
        (Path(folder) / "result.json").write_text(json.dumps(medians | {"runs": runs}))
    for way in (plain, replicated):
        way.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
