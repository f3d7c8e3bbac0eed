"""`python -m benchmarks.checkpoint`: one JSON line per size; all figures are ratios to a memcpy of the same bytes."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from benchmarks.checkpoint.curve import Training, lost_ms
from benchmarks.checkpoint.nvrx import NvrxAsync, NvrxSync
from benchmarks.checkpoint.payload import Memcpy, Payload, timed_ms
from benchmarks.checkpoint.ways import DcpAsync, DcpSave, OursAsync, OursSync, TorchSave, Way, use_threads
from benchmarks.environment import print_result

WAYS: dict[str, type[Way]] = {
    "ours_sync": OursSync,
    "ours_async": OursAsync,
    "torch_save": TorchSave,
    "dcp_save": DcpSave,
    "dcp_async": DcpAsync,
    "nvrx_sync": NvrxSync,
    "nvrx_async": NvrxAsync,
}
HOW_TO_GET = {
    "nvrx": "pip install --no-deps --target FOLDER nvidia-resiliency-ext==0.4.1, then PYTHONPATH=FOLDER",
}


def main() -> None:
    """Measure and print."""
    options = parse()
    use_threads(options.threads)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    for spec in options.sizes.split(","):
        size, _, count = spec.partition("x")
        result = measure(Payload.of(int(size), int(count or 64)), options)
        print_result("checkpoint", size_mib=int(size), tensors=int(count or 64), threads=options.threads, **result)
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--sizes", default="16,256,1024,256x4096", help="MiB, and how many tensors after an x")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument(
        "--threads", type=int, default=1, help="of the floor, ours, and peers that can use several [1, as all can]"
    )
    parser.add_argument("--folder", default="/dev/shm", help="on tmpfs")
    return parser.parse_args()


def measure(payload: Payload, options: argparse.Namespace) -> dict[str, Any]:
    """All ways at one size, one after the other; what is timed follows the floor, so that noise hits both alike."""
    results: dict[str, Any] = {}
    for name in options.ways.split(","):
        peer = name.partition("_")[0]
        if peer in HOW_TO_GET and importlib.util.find_spec("nvidia_resiliency_ext") is None:
            results[name] = {"not_measured": HOW_TO_GET[peer]}
            continue
        gc.collect()
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder))
            results[name] = measure_way(WAYS[name](Path(folder), payload), payload, options.runs)
    return results


def measure_way(way: Way, payload: Payload, runs: int) -> dict[str, Any]:
    """One way; the first two saves are not counted: they allocate, and every way may."""
    floor, training = Memcpy(payload), Training()
    figures: dict[str, list[float]] = defaultdict(list)
    for run in range(runs + 2):
        payload.change()
        copy_ms = statistics.median(floor.once_ms() for _ in range(3))
        blocking_ms = timed_ms(way.save)
        durable_ms = blocking_ms + timed_ms(way.wait)
        way.tidy()
        elsewhere_ms = floor.elsewhere_ms()
        if run >= 2:
            figures["memcpy_ms"].append(copy_ms)
            figures["blocking_x"].append(blocking_ms / copy_ms)
            figures["durable_x"].append(durable_ms / copy_ms)
            if elsewhere_ms is not None:
                figures["blocking_elsewhere_x"].append(blocking_ms / elsewhere_ms)
    for _ in range(runs):
        copy_ms = floor.median_ms(3)
        if not way.is_async:  # the files are the same, and so is what reads them
            figures["load_x"].append(timed_ms(lambda: way.load(floor.targets)) / copy_ms)
        figures["lost_ms"].append(lost_ms(way, training))
        figures["lost_x"].append(figures["lost_ms"][-1] / copy_ms)
    saved = payload.checksums()
    for target in floor.targets.values():
        target.zero_()
    way.load(floor.targets)
    assert Payload(floor.targets, payload.size_bytes).checksums() == saved, "what was loaded is not what was saved"
    way.close()
    return {name: round(statistics.median(values), 2) for name, values in figures.items()} | {"runs": runs}


if __name__ == "__main__":
    main()
