"""The training job of the stream tests: logical shards of uneven lengths, and every sample that a step has seen.

Which samples a step was trained on is read off its batch, and not off what the stream says of it.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchelastic
from tests.cluster.elastic_job import (
    FEATURES,
    EventLog,
    RecordedCoordinator,
    RecordedState,
    hold_until,
    make_model,
)
from torchelastic.checkpoint import FileSystemCheckpointManager
from torchelastic.p2p import step_agreement
from torchelastic.testing.faults import FaultPlan
from torchelastic.worker_stats import SimpleWorkerStats

#: Uneven, one of them empty, none longer than it takes 15 batches to read.
LENGTHS = (17, 0, 29, 9, 21, 4)
BATCH = 12
EPOCHS = 3
SAMPLES_PER_SHARD = 1000  # a sample's number is that many times its shard's, plus its place there

Sample = tuple[int, torch.Tensor, torch.Tensor]


def sample_of(number: int) -> Sample:
    inputs = torch.sin(torch.arange(1, FEATURES + 1, dtype=torch.float64) * (number + 1))
    return number, inputs, inputs.sum().sin().reshape(1)


class _Placed(Iterator[Sample]):
    """An iterator that tells its position."""

    def __init__(self, numbers: list[int], place: int, plan: FaultPlan | None) -> None:
        self._numbers, self._place, self._plan = numbers, place, plan

    def __next__(self) -> Sample:
        if self._plan is not None:
            self._plan.reach("read")
        if self._place == len(self._numbers):
            raise StopIteration
        self._place += 1
        return sample_of(self._numbers[self._place - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"file": "part", "place": self._place}


@dataclass(frozen=True)
class Shards:
    """Each epoch another order, the same in each process."""

    placed: bool
    epoch: int = 0
    out: Path | None = None

    def for_epoch(self, epoch: int) -> Shards:
        return replace(self, epoch=epoch)

    def __call__(self, shard: int, num_shards: int, position: Any) -> Iterator[Sample]:
        assert num_shards == len(LENGTHS)
        numbers = [SAMPLES_PER_SHARD * shard + place for place in range(LENGTHS[shard])]
        random.Random(100 * self.epoch + shard).shuffle(numbers)
        if not self.placed:
            assert isinstance(position, int)
            return (sample_of(number) for number in numbers[position:])
        plan = None if self.out is None else FaultPlan(self.out)
        return _Placed(numbers, position["place"] if position else 0, plan)


class RunLog(EventLog):
    """Says of each event in which of several runs, one after the other, it was."""

    run = 0

    def __call__(self, event: str, **fields: Any) -> None:
        super().__call__(event, run=self.run, **fields)


class Seen(Iterator[Any]):
    """Takes the samples' numbers off each batch on its way to the step."""

    def __init__(self, stream: torchelastic.ElasticStream) -> None:
        self._stream = stream
        self.numbers: list[int] = []

    def __next__(self) -> Any:
        batch = next(self._stream)
        self.numbers = batch[0].tolist()
        return batch


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--run", type=int, default=0, help="its number among several, one after the other")
    parser.add_argument("--salvage", default="discard")
    parser.add_argument("--shards", choices=["logical", "data only"], default="logical")
    parser.add_argument("--positions", choices=["places", "numbers"], default="places")
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--checkpoint-dir", type=Path)
    parser.add_argument("--checkpoint-every", type=int, default=3)
    parser.add_argument("--gates", type=int, nargs="*", default=[], help="steps that wait for a file gate-STEP")
    parser.add_argument("--wait-for-newcomer-at", type=int, nargs="*", default=[], help="steps")
    parser.add_argument("--full-world", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=20.0)
    return parser.parse_args()


def watch_exchanges(plan: FaultPlan, state: RecordedState) -> None:
    """Tell the plan of each collective, by number: that of the stream is the first of a step."""
    original = dist.all_reduce
    seen = {"step": -1, "count": 0}

    def watched(*args: Any, **keywords: Any) -> Any:
        seen.update({"step": state.step, "count": seen["count"] + 1 if seen["step"] == state.step else 1})
        plan.reach(f"collective-{seen['count']}", state.step)
        return original(*args, **keywords)

    dist.all_reduce = watched


def main() -> None:
    options = parse()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    torch.set_num_threads(1)
    log, plan = RunLog(options.out), FaultPlan(options.out)
    log.run = options.run
    model = make_model(5, 0.2 if options.shards == "logical" else 0.0)
    stream = torchelastic.ElasticStream(
        Shards(options.positions == "places", out=options.out if not options.num_workers else None), len(LENGTHS),
        global_batch_size=BATCH, epochs=EPOCHS, seed=3, num_workers=options.num_workers,
    )  # fmt: skip
    seen = Seen(stream)
    state = RecordedState(
        model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), sampler=stream, extra={"seen": 0},
        logical_shards=len(LENGTHS) if options.shards == "logical" else None, salvage=options.salvage,
        on_out_of_sync="raise",
    )  # fmt: skip
    coordinator = RecordedCoordinator(process_group_timeout=20000)
    state.log, state.plan, state.coordinator, coordinator.log, coordinator.plan = log, plan, coordinator, log, plan
    step_agreement.interval_steps = lambda *_: 1
    manager = None
    if options.checkpoint_dir is not None:
        manager = FileSystemCheckpointManager(str(options.checkpoint_dir))
        state.checkpoint_every = options.checkpoint_every
    watch_exchanges(plan, state)

    def train_step(state: RecordedState) -> Any:
        step, rank = state.step, coordinator.rank
        plan.reach("step", step, rank)
        if step in options.wait_for_newcomer_at and coordinator.world_size < options.full_world:
            hold_until(lambda: coordinator.rendezvous.num_nodes_waiting() > 0, "a newcomer")
        if step in options.gates:
            log("held", step=step, round=state.round_number)
            hold_until((options.out / f"gate-{step}").exists, f"gate {step}")
        state.optimizer.zero_grad()
        batches = state.shards(seen)
        (share,) = stream.pending
        # before the others can have the gradients of it
        log(
            "drawn", step=step, round=state.round_number, rank=rank, world=coordinator.world_size, epoch=share.epoch,
            numbers=seen.numbers if share.local_samples else [], weight=stream.weight, total=share.global_samples,
            carried=[list(piece) for piece in share.carried], padding=0 if share.local_samples else len(seen.numbers),
        )  # fmt: skip
        plan.reach("drawn", step, rank)
        time.sleep(options.step_ms / 1000)
        for _, inputs, targets in batches:
            loss = torch.nn.functional.mse_loss(state.model(inputs), targets)
            plan.reach("backward", step, rank)
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        plan.reach("optimizer", step, rank)
        state.optimizer.step()
        plan.reach("tail", step, rank)
        state.extra["seen"] += share.global_samples
        return SimpleWorkerStats(1.0)

    torchelastic.train(coordinator, train_step, state, checkpoint=manager)
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    if coordinator.rank >= 0:
        torch.save(weights, options.out / f"weights-{os.getpid()}.pt")
    log("finished", step=state.step, seen=state.extra["seen"], rank=coordinator.rank, epoch=stream.epoch)


if __name__ == "__main__":
    main()
