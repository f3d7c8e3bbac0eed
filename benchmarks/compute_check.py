"""What `ModelState(check=ComputeCheck())` costs: how much longer a step takes that is checked, and what that makes.

    python -m benchmarks.compute_check [--workers 2] [--steps 400] [--width 1024] [--samples 256]

Steps that are checked (every tenth here) and those that are not follow each other in one run. With logical shards a
check is one shard more for one worker; without them the whole step is computed once more by all. By default so few
steps are checked that their median cost is `share_percent` of the training time. Target: below 0.5 %.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.environment import print_result, summary

EVERY, WARM_UP = 10, 20
#: Logical shards of a global batch; 0: without.
VARIANTS = (8, 0)
TARGET_PERCENT = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--width", type=int, default=1024, help="of the model's three layers")
    parser.add_argument("--samples", type=int, default=256, help="of a global batch")
    parser.add_argument("--shards", type=int, help="internal: be a worker")
    parser.add_argument("--out", type=Path, help="internal")
    options = parser.parse_args()
    if options.shards is not None:
        measure(options)
        return
    for shards in VARIANTS:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "torchelastic.launch", "run", "--standalone"]
            command += [f"--nproc-per-node={options.workers}", "-m", "benchmarks.compute_check", f"--out={folder}"]
            given = {"shards": shards, "steps": options.steps, "width": options.width, "samples": options.samples}
            command += [f"--{name}={value}" for name, value in given.items()]
            done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            if done.returncode:
                raise SystemExit(done.stdout.decode(errors="replace")[-3000:])
            found = json.loads((Path(folder) / "times.json").read_text())
        print_result("compute_check", workers=options.workers, logical_shards=shards, **_figures(found))


def _figures(found: dict[str, Any]) -> dict[str, Any]:
    plain_ms, checked_ms = found["plain_ms"], found["checked_ms"]
    usual_ms = sorted(plain_ms)[len(plain_ms) // 2]
    more_ms = [each - usual_ms for each in checked_ms]
    share = 100 * sorted(more_ms)[len(more_ms) // 2] / (usual_ms * found["interval_steps"])
    return {
        "step_ms": summary(plain_ms),
        "more_in_a_checked_step_ms": summary(more_ms),
        "interval_steps": found["interval_steps"],
        "share_percent": round(share, 3),
        "target_percent": TARGET_PERCENT,
        "agreed": found["agreed"],
    }


def measure(options: argparse.Namespace) -> None:
    """One worker."""
    import torch

    import torchelastic
    from torchelastic.data import ElasticBatchSampler, ElasticLoader
    from torchelastic.p2p import CoordinatorP2P

    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = options.width
    model = torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(),
        torch.nn.Linear(width, 1),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    data = torch.utils.data.TensorDataset(torch.randn(4096, 64), torch.randn(4096, 1))
    sampler = ElasticBatchSampler(data, options.samples, epochs=10**6)
    check = torchelastic.ComputeCheck(every=EVERY)
    shards = options.shards or None
    state = torchelastic.ModelState(model, optimizer, sampler=sampler, logical_shards=shards, check=check)
    loader = ElasticLoader(data, sampler)
    coordinator = CoordinatorP2P("gloo")
    times: list[tuple[int, float]] = []

    def train_step(state: Any) -> None:
        if not times or times[-1][0] != state.step:
            times.append((state.step, time.perf_counter()))
        if state.step >= options.steps:
            raise StopIteration
        for inputs, targets in state.shards(loader):
            if shards is None:
                state.optimizer.zero_grad()
            torch.nn.functional.mse_loss(state.model(inputs), targets).backward()  # type: ignore[no-untyped-call]  # torch has no types here
        state.optimizer.step()

    torchelastic.train(coordinator, train_step, state)
    if int(os.environ["LOCAL_RANK"]) == 0:
        took_ms = {step: 1e3 * (later - began) for (step, began), (_, later) in itertools.pairwise(times)}
        kept = {step: each for step, each in took_ms.items() if step >= WARM_UP}
        usual = torchelastic.ComputeCheck()
        found = {
            "plain_ms": [each for step, each in kept.items() if (step + 1) % EVERY],
            "checked_ms": [each for step, each in kept.items() if not (step + 1) % EVERY],
            "interval_steps": usual.interval_steps(
                1.0 if shards is None else 1 / -(-shards // int(os.environ["WORLD_SIZE"]))
            ),
            "agreed": len(kept) // EVERY,
        }
        (options.out / "times.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
