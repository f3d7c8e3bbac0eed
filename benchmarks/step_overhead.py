"""What the train loop costs per step: microseconds over the bare loop, without checkpoint, module without buffers.

    python -m benchmarks.step_overhead [--runs 5] [--steps 300] [--step-ms 0]

One worker, and two workers against bare DDP; each run interleaves blocks of both loops in the same processes, so that
a noisy machine hits both alike. Target: at most 50 microseconds (median).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import uuid
from typing import Any

from benchmarks.environment import print_result, summary
from torchelastic.rendezvous.server import EtcdServer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--step-ms", type=float, default=0.0, help="sleep in each step besides computing")
    parser.add_argument("--worker", metavar="URL", help="internal: be one worker of this run")
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measure(options)))
        return
    with EtcdServer() as etcd:
        for world_size in (1, 2):
            runs = [run_workers(etcd.endpoint, world_size, options) for _ in range(options.runs)]
            print_result(
                "step_overhead",
                world_size=world_size,
                step_ms=options.step_ms,
                bare_step_us=summary([run["bare_us"] for run in runs]),
                overhead_us=summary([run["overhead_us"] for run in runs]),
                ratio=summary([1 + run["overhead_us"] / run["bare_us"] for run in runs], 4),
                snapshot_us=summary([run["snapshot_us"] for run in runs]),
                target_us=50,
            )


def run_workers(endpoint: str, world_size: int, options: argparse.Namespace) -> dict[str, float]:
    """One run; the figures are those of the slowest worker."""
    url = f"etcd://{endpoint}/{uuid.uuid4().hex}?min_workers={world_size}&max_workers={world_size}"
    command = [sys.executable, "-m", "benchmarks.step_overhead", "--worker", url]
    command += ["--steps", str(options.steps), "--step-ms", str(options.step_ms)]
    environment = {k: v for k, v in os.environ.items() if k != "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"}
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for _ in range(world_size)]
    results: list[dict[str, float]] = []
    for worker in workers:
        output, _ = worker.communicate(timeout=300)
        assert worker.returncode == 0
        results.append(json.loads(output.splitlines()[-1]))
    return max(results, key=lambda result: result["overhead_us"])


def measure(options: argparse.Namespace) -> dict[str, float]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import torchelastic
    from torchelastic.p2p import CoordinatorP2P

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    state = torchelastic.ModelState(model, optimizer)
    batch = torch.randn(32, 64)

    def compute(module: torch.nn.Module) -> None:
        loss = module(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(options.step_ms / 1000)

    coordinator = CoordinatorP2P(init_method=options.worker)
    elastic_s: list[float] = []
    bare_s: list[float] = []
    inside_s: list[float] = []

    def train_step(state: Any) -> None:
        if state.step == 6 * options.steps:
            raise StopIteration
        if state.step % options.steps == 0:  # a block of the bare loop before each block of the elastic one
            bare = state.model if coordinator.world_size == 1 else DistributedDataParallel(state.module)
            for _ in range(options.steps):
                began_s = time.perf_counter()
                compute(bare)
                bare_s.append(time.perf_counter() - began_s)
            del bare
            train_step.last_s = None  # type: ignore[attr-defined]  # where the block begins
        began_s = time.perf_counter()
        compute(state.model)
        now_s = time.perf_counter()
        last_s = train_step.last_s  # type: ignore[attr-defined]  # set above in the first step
        if last_s is not None:
            elastic_s.append(now_s - last_s)
            inside_s.append(now_s - began_s)
        train_step.last_s = now_s  # type: ignore[attr-defined]  # as above

    torchelastic.train(coordinator, train_step, state)
    snapshots_s = []
    for _ in range(200):
        began_s = time.perf_counter()
        state.snapshot()
        snapshots_s.append(time.perf_counter() - began_s)
    # the whole step less what the user's own code took in it: the loop's share, step by step
    own_s = [whole - inside for whole, inside in zip(elastic_s, inside_s, strict=True)]
    return {
        "bare_us": 1e6 * statistics.median(bare_s),
        "overhead_us": 1e6 * statistics.median(own_s),
        "elastic_us": 1e6 * statistics.median(elastic_s),
        "snapshot_us": 1e6 * statistics.median(snapshots_s),
    }


if __name__ == "__main__":
    main()
