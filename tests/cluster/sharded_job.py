"""The training job of the tests of sharded models: FSDP2 over gloo, in double precision; notes all that it does."""

from __future__ import annotations

import argparse
import logging
import os
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torchelastic
from tests.cluster.elastic_job import (
    FEATURES,
    EventLog,
    RecordedCoordinator,
    choose_device,
    hold_until,
    make_dataset,
)
from torchelastic.checkpoint import TieredCheckpointManager
from torchelastic.checkpoint.store import DiskTier
from torchelastic.data import ElasticBatchSampler, ElasticLoader
from torchelastic.p2p import step_agreement
from torchelastic.sharded import FullShard, HybridShard, ShardedState, copies, handover, transfers
from torchelastic.sharded.mesh import MeshRule
from torchelastic.testing.faults import FaultPlan
from torchelastic.worker_stats import SimpleWorkerStats

#: No multiple of any number of workers: parts are of different sizes, and of some tensors some ranks have nothing.
WIDTH = 17
SEED = 5


class Counted(torch.nn.Module):
    """Counts its calls in a buffer, which a step that is undone must undo."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def reset_parameters(self) -> None:
        self.calls.zero_()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return hidden


def plain_model(width: int, layers: int = 1) -> torch.nn.Sequential:
    hidden = [layer for _ in range(layers) for layer in (torch.nn.Linear(width, width), torch.nn.Tanh())]
    first = torch.nn.Linear(FEATURES, width), torch.nn.Tanh(), torch.nn.LayerNorm(width), Counted()
    return torch.nn.Sequential(*first, *hidden, torch.nn.Linear(width, 1)).double()


class RecordedShards(ShardedState):
    """A ShardedState that passes its phases to the fault plan and its commits to the log."""

    log: EventLog
    plan: FaultPlan
    coordinator: RecordedCoordinator
    before_bytes = 0

    def sync(self, world_size: int | None = None, rank: int | None = None) -> None:
        self.plan.reach("sync", self.step, rank)
        try:
            super().sync(world_size, rank)
        except RuntimeError:
            self.log("sync_failed", why=traceback.format_exc())
            raise
        grown_bytes = peak_bytes() - self.before_bytes
        self.log(
            "synced", step=self.step, round=self.round_number, rank=rank, world=world_size, grown_bytes=grown_bytes
        )

    def apply(self, snapshot: Any) -> None:
        self.log("rolled_back", step=self.step, round=self.round_number)
        super().apply(snapshot)

    def commit(self) -> None:
        number = self.step
        super().commit()
        self.log("committed", step=number, round=self.round_number, rank=self.coordinator.rank)

    def load_checkpoint_parts(self, tree: Any, parts: Any, step: int) -> None:
        super().load_checkpoint_parts(tree, parts, step)
        self.log("loaded", step=step, bytes=sum(tensor.nbytes for each in parts for tensor in each.tensors.values()))

    @property
    def round_number(self) -> int:
        return self.coordinator.rendezvous.joined.number


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=120)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=30.0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--hybrid", type=int, default=0, help="ranks that hold one copy of the state together")
    parser.add_argument("--tensor-parallel", type=int, default=0, help="ranks that compute each layer together")
    parser.add_argument("--optimizer", choices=["adamw", "sgd", "two"], default="adamw")
    parser.add_argument("--checkpoint-dir", type=Path)
    parser.add_argument("--checkpoint-every", type=int, default=4)
    parser.add_argument("--stop-at", type=int, help="the step before which this run ends")
    parser.add_argument("--perturbs", action="store_true", help="changes weights itself for a moment, as SAM does")
    parser.add_argument("--gates", type=int, nargs="*", default=[], help="steps that wait for a file gate-STEP")
    parser.add_argument("--wait-for-newcomer-at", type=int, nargs="*", default=[], help="steps")
    parser.add_argument("--full-world", type=int, default=3)
    return parser.parse_args()


#: One for each call of `build` in this process.
builds: list[int] = []


def build(options: argparse.Namespace, plan: FaultPlan, mesh: DeviceMesh) -> tuple[Any, ...]:
    plan.reach("build-again" if builds else "build")
    builds.append(1)
    with torch.device("meta"):
        model = plain_model(options.width, options.layers)
    data_mesh = mesh
    if options.tensor_parallel:
        data_mesh = mesh["dp"]
        last = len(model) - 1
        parallelize_module(model, mesh["tp"], {str(last - 2): ColwiseParallel(), str(last): RowwiseParallel()})
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=data_mesh)
    fully_shard(model, mesh=data_mesh)
    return model, *optimizers(options.optimizer, list(model.parameters()))


def optimizers(kind: str, parameters: list[torch.nn.Parameter]) -> tuple[Any, Any]:
    """The optimizers, and the schedulers of their learning rates; for the job and for what it is compared with."""
    made: list[torch.optim.Optimizer]
    if kind == "adamw":
        made = [torch.optim.AdamW(parameters, lr=0.02)]
    elif kind == "sgd":
        made = [torch.optim.SGD(parameters, lr=0.05, momentum=0.9)]
    else:
        made = [torch.optim.AdamW(parameters[:2], lr=0.02), torch.optim.SGD(parameters[2:], lr=0.05)]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 7, 0.8) for each in made]
    return (made, schedulers) if len(made) > 1 else (made[0], schedulers[0])


def mesh_rule(options: argparse.Namespace) -> MeshRule:
    if options.tensor_parallel:
        size = options.tensor_parallel
        return lambda world: init_device_mesh(options.device, (world // size, size), mesh_dim_names=("dp", "tp"))
    return HybridShard(options.hybrid) if options.hybrid else FullShard()


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def watch(plan: FaultPlan, state: RecordedShards) -> None:
    """Tell the plan of what happens inside: parts that move, and copies on their way."""
    moved, exchanged = transfers.move, copies._exchanged

    def move(*args: Any, **keywords: Any) -> int:
        plan.reach("moving", state.step, state.coordinator.rank)
        received_bytes = moved(*args, **keywords)
        plan.reach("moved", state.step, state.coordinator.rank)
        return received_bytes

    def exchange(*args: Any) -> Any:
        plan.reach("copying", state.step, state.coordinator.rank)
        received = exchanged(*args)
        plan.reach("copied", state.step, state.coordinator.rank)
        return received

    vars(handover)["move"], vars(copies)["_exchanged"] = move, exchange


def main() -> None:
    options = parse()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    torch.set_num_threads(1)
    log, plan = EventLog(options.out), FaultPlan(options.out)
    dataset = make_dataset(options.samples)
    Path("/proc/self/clear_refs").write_text("5")  # the most memory until now, of imports, is forgotten
    before_bytes = peak_bytes()
    sampler = ElasticBatchSampler(dataset, options.batch, epochs=options.epochs, seed=3)
    state = RecordedShards(
        lambda mesh: build(options, plan, mesh),
        mesh=mesh_rule(options),
        replicas=options.replicas, every=options.every, seed=SEED, sampler=sampler, extra={"seen": 0},
    )  # fmt: skip
    coordinator = RecordedCoordinator(choose_device(options.device), process_group_timeout=20000)
    state.log, state.plan, state.coordinator, coordinator.log, coordinator.plan = log, plan, coordinator, log, plan
    state.before_bytes = before_bytes
    step_agreement.interval_steps = lambda *_: 1
    watch(plan, state)
    manager = None
    if options.checkpoint_dir is not None:
        policy = torchelastic.checkpoint.EverySteps(options.checkpoint_every)
        manager = TieredCheckpointManager([DiskTier(options.checkpoint_dir)], policy=policy)
    loader = ElasticLoader(dataset, sampler)

    def train_step(state: RecordedShards) -> Any:
        step, rank = state.step, coordinator.rank
        if step == options.stop_at:
            raise StopIteration
        plan.reach("step", step, rank)
        if step in options.wait_for_newcomer_at and coordinator.world_size < options.full_world:
            hold_until(lambda: coordinator.rendezvous.num_nodes_waiting() > 0, "a newcomer")
        if step in options.gates:
            log("held", step=step, round=state.round_number, rank=rank)
            hold_until((options.out / f"gate-{step}").exists, f"gate {step}")
        try:
            inputs, targets = next(loader)
        except StopIteration:
            write_result(options.out, state)
            raise
        (share,) = sampler.pending
        log(
            "drawn", step=step, round=state.round_number, rank=rank, world=coordinator.world_size,
            indices=list(share.indices), total=share.global_samples,
        )  # fmt: skip
        plan.reach("drawn", step, rank)
        time.sleep(options.step_ms / 1000)
        for change in (1.0, -1.0) if options.perturbs else ():
            with torch.no_grad():
                for parameter in state.model.parameters():
                    parameter.add_(change)
            plan.reach("perturbed", step, rank)
        loss = torch.nn.functional.mse_loss(state.model(inputs.to(options.device)), targets.to(options.device))
        plan.reach("forward", step, rank)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        plan.reach("backward", step, rank)
        for optimizer in as_list(state.optimizer):
            optimizer.step()
            plan.reach("optimizer", step, rank)
            optimizer.zero_grad()
        for scheduler in as_list(state.scheduler):
            scheduler.step()
        state.extra["seen"] += share.global_samples
        log("loss", step=step, round=state.round_number, rank=rank, loss=loss.item(), weight=sampler.weight)
        plan.reach("tail", step, rank)
        return SimpleWorkerStats(1.0)

    torchelastic.train(coordinator, train_step, state, checkpoint=manager)
    log("finished", step=state.step, seen=state.extra["seen"], rank=coordinator.rank)


def peak_bytes() -> int:
    """The most memory that this process has held since it was told to forget it."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def write_result(out: Path, state: ShardedState) -> None:
    """All ranks put the weights together, while there is a group."""
    whole = [parameter.full_tensor() for parameter in state.model.parameters() if isinstance(parameter, DTensor)]
    weights = torch.cat([tensor.detach().reshape(-1).cpu() for tensor in whole])
    torch.save(weights, out / f"weights-{os.getpid()}.pt")
    assert [int(module.calls) for module in state.model.modules() if isinstance(module, Counted)] == [state.step]


if __name__ == "__main__":
    main()
