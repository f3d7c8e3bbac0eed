"""What the train loop costs per step over bare DDP with a DataLoader: microseconds, and percent of the step.

    python -m benchmarks.overhead [--pairs 20] [--workers 1,2] [--variants plain,discard,drop,shards,layers]
        [--steps-ms 1,20] [--snapshots auto,commit,full] [--hidden 64]

Blocks of both loops follow each other in the same processes, so that a noisy machine hits both alike; each pair of
blocks is one run. A step computes a small perceptron (4,225 parameters) and sleeps so that the bare one takes about
`--steps-ms`; the sleep is the same in both loops.

* overhead: median step of ours less median step of bare DDP next to it: all there is, the communication hook and the
  sampler's bookkeeping too. Targets: 50 us at 1 ms per step, 1 % at 20 ms.
* loop: of this, what passes between two calls of the train step (snapshot, commit, monitoring, agreement).

Variants: `plain` has no sampler on either side; `discard` and `drop` are `ModelState(salvage=..)` with an
`ElasticLoader`, beside a plain DataLoader; `shards` has `logical_shards=8`, which is another computation: eight forward
and backward passes over all workers, and an exchange of their gradients' partial sums. Its price is not judged:
`received_bytes` is what a worker receives in a step beside bare DDP's all-reduce, `ratio` the time. `layers` is `plain`
with a model of 75 linear and 75 BatchNorm layers of 16 features: 300 parameters and 225 buffers, so that each cost per
tensor shows. `--snapshots` are `ModelState`'s: how weights are undone.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from benchmarks.environment import print_result, summary
from torchelastic.rendezvous.server import EtcdServer

VARIANTS = ("plain", "discard", "drop", "shards")
LAYERS, FEATURES = 75, 16
LOGICAL_SHARDS = 8
SAMPLES_PER_WORKER = 32
DATASET = 4096
#: Steps of a block, by what one takes. Short blocks in turn: two sleeping processes wander by more than is looked for.
BLOCK_S, FEWEST_STEPS, MOST_STEPS, WARM_UP = 0.25, 12, 100, 3
TARGETS = {"overhead_us_at_1_ms": 50, "overhead_percent_at_20_ms": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="runs")
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--snapshots", default="auto")
    parser.add_argument("--steps-ms", default="1,20", help="0: no sleep")
    parser.add_argument("--hidden", type=int, default=64, help="width of the model")
    parser.add_argument("--worker", metavar="URL", help="internal: be one worker of this run")
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(_Worker(options).measure()))
        return
    with EtcdServer() as etcd:
        for world_size in map(int, options.workers.split(",")):
            for variant, snapshot in itertools.product(options.variants.split(","), options.snapshots.split(",")):
                for result in run_workers(etcd.endpoint, world_size, variant, snapshot, options):
                    about = {"workers": world_size, "variant": variant, "snapshot": snapshot}
                    print_result("overhead", **about, **result, targets=TARGETS)


def run_workers(
    endpoint: str, world_size: int, variant: str, snapshot: str, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One job; for each step length the figures of the slowest worker of each run."""
    url = f"etcd://{endpoint}/{uuid.uuid4().hex}?min_workers={world_size}&max_workers={world_size}"
    command = [sys.executable, "-m", "benchmarks.overhead", "--worker", url, "--variants", variant]
    command += ["--pairs", str(options.pairs), "--steps-ms", options.steps_ms, "--hidden", str(options.hidden)]
    command += ["--workers", str(world_size), "--snapshots", snapshot]
    environment = {k: v for k, v in os.environ.items() if k != "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"}
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for _ in range(world_size)]
    answers: list[list[dict[str, Any]]] = []
    for worker in workers:
        output, _ = worker.communicate(timeout=300)
        assert worker.returncode == 0
        answers.append(json.loads(output.splitlines()[-1]))
    results = []
    for ranks in zip(*answers, strict=True):  # the same step length on all ranks
        runs = [
            max(pairs, key=lambda pair: pair["overhead_us"]) for pairs in zip(*(r["pairs"] for r in ranks), strict=True)
        ]
        names = ("bare_us", "elastic_us", "overhead_us", "overhead_percent", "loop_us", "ratio")
        result = {name: summary([run[name] for run in runs], 4 if name == "ratio" else 2) for name in names}
        rest = {name: value for name, value in ranks[0].items() if name != "pairs"}
        results.append({**rest, **result})
    return results


class _Worker:
    """One rank: the blocks of both loops, and what they have taken."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from torch.utils.data import TensorDataset

        torch.set_num_threads(1)
        self.options, self.variant = options, options.variants
        self.world_size = int(options.workers)
        torch.manual_seed(0)
        model = _layers() if self.variant == "layers" else _perceptron(options.hidden)
        self.model, self.bare_model = model, copy.deepcopy(model)  # `ModelState` hangs hooks on what it is given
        self.optimizer, self.bare_optimizer = (
            torch.optim.SGD(one.parameters(), lr=1e-4, momentum=0.9) for one in (self.model, self.bare_model)
        )
        self.data = TensorDataset(torch.randn(DATASET, 64), torch.randn(DATASET, 1))
        self.batch = self.data[:SAMPLES_PER_WORKER]
        self.has_sampler = self.variant not in ("plain", "layers")
        self.bare: Any = None  # the bare model, wrapped
        self.plain_batches = self._plain_batches()
        self.sleep_s = 0.0
        self.received_bytes = 0

    def compute(self, module: Any, optimizer: Any, batches: Iterable[Any]) -> None:
        """One step; of several batches with logical shards."""
        import torch

        optimizer.zero_grad()
        for inputs, targets in batches:
            torch.nn.functional.mse_loss(module(inputs), targets).backward()  # type: ignore[no-untyped-call]  # torch has no types here
        optimizer.step()
        if self.sleep_s:
            time.sleep(self.sleep_s)

    # --- the bare loop ----------------------------------------------------------------------------

    def bare_block(self, steps: int) -> list[float]:
        """Seconds of each step of bare DDP; with a DataLoader where ours has one."""
        import torch
        from torch.nn.parallel import DistributedDataParallel

        if self.bare is None:
            self.bare = self.bare_model if self.world_size == 1 else DistributedDataParallel(self.bare_model)
        module, batches = self.bare, self.plain_batches
        for _ in range(WARM_UP):
            self.compute(module, self.bare_optimizer, (next(batches),))
        taken_s, last_s = [], time.perf_counter()
        for _ in range(steps):
            self.compute(module, self.bare_optimizer, (next(batches),))
            now_s = time.perf_counter()
            taken_s.append(now_s - last_s)
            last_s = now_s
        if self.world_size > 1:
            torch.distributed.barrier()
        return taken_s

    def _plain_batches(self) -> Iterator[Any]:
        from torch.utils.data import DataLoader

        if not self.has_sampler:
            while True:
                yield self.batch
        while True:
            yield from DataLoader(self.data, SAMPLES_PER_WORKER, shuffle=True, drop_last=True)

    def calibrate(self, step_ms: float) -> int:
        """Choose the sleep for a step length; returns how many steps a block has."""
        self.sleep_s = 0.0
        computing_s = statistics.median(self.bare_block(100))
        self.sleep_s = max(0.0, step_ms / 1000 - computing_s)
        return max(FEWEST_STEPS, min(MOST_STEPS, int(BLOCK_S / max(computing_s, step_ms / 1000))))

    # --- ours -------------------------------------------------------------------------------------

    def measure(self) -> list[dict[str, Any]]:
        """For each step length: settings, and the figures of each pair of blocks."""
        import torchelastic
        from torchelastic.data import ElasticBatchSampler, ElasticLoader
        from torchelastic.p2p import CoordinatorP2P

        sampler = ElasticBatchSampler(DATASET, SAMPLES_PER_WORKER * self.world_size, epochs=10**6)
        state = torchelastic.ModelState(
            self.model, self.optimizer, sampler=sampler if self.has_sampler else None,
            snapshot=self.options.snapshots,
            salvage="drop" if self.variant == "drop" else "discard",
            logical_shards=LOGICAL_SHARDS if self.variant == "shards" else None,
        )  # fmt: skip
        loader = ElasticLoader(self.data, sampler)

        def step(state: Any) -> None:
            if self.variant == "shards":
                batches = state.shards(loader)
            else:
                batches = (next(loader) if self.has_sampler else self.batch,)
            self.compute(state.model, self.optimizer, batches)

        schedule = self._schedule()
        next(schedule)  # up to where it asks for the first elastic step
        is_over = False

        def train_step(state: Any) -> None:
            nonlocal is_over
            began_s = time.perf_counter()
            try:
                schedule.send((began_s, lambda: step(state)))
            except StopIteration as end:
                self.results = end.value
                is_over = True
            if is_over:
                raise StopIteration

        torchelastic.train(CoordinatorP2P(init_method=self.options.worker), train_step, state)
        return list(self.results)

    def _schedule(self) -> Any:
        """A generator that is sent each call of the train step, and runs blocks of the bare loop in between."""
        results = []
        began_s, step = yield
        for step_ms in map(float, self.options.steps_ms.split(",")):
            steps = self._agree(self.calibrate(step_ms))
            pairs = []
            for _ in range(self.options.pairs):
                bare_s = self.bare_block(steps)
                elastic_s: list[float] = []
                loop_s: list[float] = []
                last_s: float | None = None
                for number in range(WARM_UP + steps + 1):
                    if number == WARM_UP:
                        self._count_bytes(step)
                    else:
                        step()
                    ended_s = time.perf_counter()
                    if last_s is not None and number > WARM_UP:
                        elastic_s.append(ended_s - last_s)
                        loop_s.append(began_s - last_s)
                    last_s = ended_s
                    began_s, step = yield
                pairs.append(_pair(bare_s, elastic_s, loop_s))
            results.append({"step_ms": step_ms, "steps": steps, "received_bytes": self._bytes(), "pairs": pairs})
        return results

    def _agree(self, steps: int) -> int:
        import torch
        import torch.distributed as dist

        if self.world_size == 1:
            return steps
        agreed = torch.tensor([steps])
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        return int(agreed)

    def _bytes(self) -> dict[str, int]:
        gradient = 4 * sum(parameter.numel() for parameter in self.model.parameters())
        ring = 2 * (self.world_size - 1) * gradient // self.world_size
        return {"bare_all_reduce": ring, "ours": self.received_bytes if self.variant == "shards" else ring}

    def _count_bytes(self, step: Callable[[], None]) -> None:
        """One step, with what this rank receives by all-gathers counted."""
        import torch.distributed as dist

        gather, gather_into = dist.all_gather, dist.all_gather_into_tensor
        others = self.world_size - 1
        self.received_bytes = 0

        def counted(output: Any, own: Any, **keywords: Any) -> Any:
            self.received_bytes += others * own.numel() * own.element_size()
            return (gather if isinstance(output, list) else gather_into)(output, own, **keywords)

        vars(dist).update(all_gather=counted, all_gather_into_tensor=counted)
        try:
            step()
        finally:
            vars(dist).update(all_gather=gather, all_gather_into_tensor=gather_into)


def _perceptron(width: int) -> Any:
    from torch.nn import Linear, ReLU, Sequential

    return Sequential(Linear(64, width), ReLU(), Linear(width, 1))


def _layers() -> Any:
    from torch.nn import BatchNorm1d, Linear, Sequential

    layers = [layer for _ in range(LAYERS) for layer in (Linear(FEATURES, FEATURES), BatchNorm1d(FEATURES))]
    return Sequential(Linear(64, FEATURES), *layers, Linear(FEATURES, 1))


def _pair(bare_s: list[float], elastic_s: list[float], loop_s: list[float]) -> dict[str, float]:
    bare_us, elastic_us = 1e6 * statistics.median(bare_s), 1e6 * statistics.median(elastic_s)
    return {
        "bare_us": bare_us,
        "elastic_us": elastic_us,
        "overhead_us": elastic_us - bare_us,
        "overhead_percent": 100 * (elastic_us / bare_us - 1),
        "loop_us": 1e6 * statistics.median(loop_s),
        "ratio": elastic_us / bare_us,
    }


if __name__ == "__main__":
    main()
