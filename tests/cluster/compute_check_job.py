"""A training job in which one rank computes wrong from some step on, with a check of computations: see its tests."""

from __future__ import annotations

import argparse
import os
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import torchelastic
from tests.cluster.elastic_job import EventLog, hold_until, make_dataset, make_model
from torchelastic.checkpoint import DiskTier, EverySteps, KeepLast, TieredCheckpointManager
from torchelastic.data import ElasticBatchSampler, ElasticLoader
from torchelastic.p2p import CoordinatorP2P, step_agreement
from torchelastic.testing.faults import FaultPlan
from torchelastic.testing.wrong_bits import computes_wrong

SAMPLES, GLOBAL_BATCH, SEED = 240, 12, 7


class Annealed(torch.nn.Module):
    """Counts its own calls, as models do that anneal something."""

    def __init__(self, inner: torch.nn.Module, first_call: int) -> None:
        super().__init__()
        self.inner, self.first_call, self.calls = inner, first_call, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        outputs: torch.Tensor = self.inner(inputs / (1 + 0.01 * max(0, self.calls - self.first_call)))
        return outputs


class State(torchelastic.ModelState):
    """A rank may die where the run has gone back."""

    dying: Path | None = None  # made by the one that does
    log: EventLog

    def sync(self, world_size: int | None = None, rank: int | None = None) -> None:
        goes_back = self.rollback is not None and self.rollback.at_most is not None
        if self.dying is not None and rank == 1 and goes_back and not self.dying.exists():
            self.dying.touch()
            self.log("went back", step=self.step)
            os.kill(os.getpid(), signal.SIGKILL)
        super().sync(world_size, rank)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--logical-shards", type=int, default=None)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--on-wrong", default="leave")
    parser.add_argument("--on-doubt", default="stop")
    parser.add_argument("--saves-every", type=int, default=0, help="steps; all saves are kept")
    parser.add_argument("--dies-when-back", help="rank 1, in the sync; all, in the next step; or both")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--batchnorm", action="store_true")
    parser.add_argument("--wrong-at", default="", help="see `testing.wrong_bits.PLACES`")
    parser.add_argument("--wrong-rank", type=int, default=1)
    parser.add_argument("--wrong-host", help="what JOB_HOST says; in place of a rank")
    parser.add_argument("--gate", type=int, help="a step that waits for a file gate-STEP")
    parser.add_argument("--wrong-from", type=int, default=6, help="committed steps")
    parser.add_argument("--mixes", choices=["by random", "by its own"], help="augments now and then, in the step")
    parser.add_argument("--two-reductions", action="store_true", help="where a step should have one")
    parser.add_argument("--wait-for", type=int, default=0, help="workers, from step 12 on")
    parser.add_argument("--two-threads-on", help="a LOCAL_RANK")
    parser.add_argument("--times", type=int, default=10**9)
    parser.add_argument("--only-large", action="store_true", help="only of what is large")
    parser.add_argument("--anneals-from", type=int, help="calls of the model")
    parser.add_argument("--varies", choices=["each time", "by rank"], help="a model that is not repeatable")
    options = parser.parse_args()
    # bits depend on it
    torch.set_num_threads(2 if options.two_threads_on == os.environ.get("LOCAL_RANK") else 1)
    log, plan = EventLog(options.out), FaultPlan(options.out)
    dataset = make_dataset(SAMPLES)
    sampler = ElasticBatchSampler(dataset, GLOBAL_BATCH, epochs=options.epochs, seed=SEED)
    step_agreement.interval_steps = lambda *_: 1  # digests of replicas travel with it
    loader = ElasticLoader(dataset, sampler)
    coordinator = CoordinatorP2P("gloo")
    model = make_model(SEED, dropout=options.dropout, batchnorm=options.batchnorm)
    if options.anneals_from is not None:
        model = Annealed(model, options.anneals_from)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = State(
        model,
        optimizer,
        sampler=sampler,
        logical_shards=options.logical_shards,
        check=torchelastic.ComputeCheck(every=options.every, on_wrong=options.on_wrong, on_doubt=options.on_doubt),
    )
    state.dying, state.log = options.out / "dying" if "rank 1" in str(options.dies_when_back) else None, log
    saves = None
    if options.saves_every:
        tiers = [DiskTier(options.out / "saves", keep=KeepLast(1000))]
        saves = TieredCheckpointManager(tiers, policy=EverySteps(options.saves_every))
    newest = [0]
    flips: list[int] = []
    chosen: list[int] = []

    def becomes_wrong() -> bool:
        """One process of the run does, and no other, which may get its rank later."""
        if options.wrong_host:
            return bool(os.environ.get("JOB_HOST") == options.wrong_host)
        if coordinator.rank != options.wrong_rank:
            return False
        try:
            (options.out / "wrong-worker").touch(exist_ok=False)
        except FileExistsError:
            return False
        chosen.append(state.step)
        return True

    def is_wrong(tensor: torch.Tensor) -> bool:
        if state.step < options.wrong_from or len(flips) >= options.times or not (chosen or becomes_wrong()):
            return False
        if options.only_large and tensor.detach().abs().max() < 1.0:
            return False
        flips.append(state.step)
        log("flipped", step=state.step, rank=coordinator.rank)
        return True

    if options.wrong_at:
        where = next(model.children()) if options.wrong_at == "output" else model
        computes_wrong(where, options.wrong_at, is_wrong, optimizer=optimizer)

    def train_step(state: torchelastic.ModelState) -> None:
        if "all" in str(options.dies_when_back) and saves is not None and state.step < newest[0]:
            log("went back", step=state.step)
            saves.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        newest[0] = state.step
        plan.reach("begin", state.step, coordinator.rank)
        is_whole = coordinator.world_size >= options.wait_for
        if state.step >= 12 and not (is_whole or (state.rollback is not None and state.rollback.count)):
            hold_until(lambda: coordinator.rendezvous.num_nodes_waiting() > 0, "a newcomer")
        if state.step == options.gate:
            hold_until((options.out / f"gate-{options.gate}").exists, "the gate opens")
        for inputs, targets in state.shards(loader):
            if options.mixes is not None:
                inputs, targets = mixed(inputs, targets)
            if not options.logical_shards:
                state.optimizer.zero_grad()
            if options.two_reductions:
                mse_of(state.model(inputs), targets).backward()
            outputs = state.model(inputs)
            if options.varies == "each time":
                outputs = outputs + 1e-9 * torch.rand(1, generator=chance, dtype=torch.float64)
            elif options.varies == "by rank":
                outputs = outputs + 1e-9 * coordinator.rank
            mse_of(outputs, targets).backward()
        state.optimizer.step()
        indices = [index for share in sampler.pending for index in share.indices]
        log("trained", step=state.step, round=coordinator.rendezvous.joined.number, indices=indices)

    def mixed(inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As Mixup is mostly written; each rank draws otherwise."""
        source = random if options.mixes == "by random" else own_random
        if source.random() >= 0.2:
            return inputs, targets
        share = source.betavariate(0.4, 0.4)
        mix = partial(torch.lerp, weight=share)
        return mix(inputs, inputs.flip(0)), mix(targets, targets.flip(0))

    mse_of: Callable[..., Any] = torch.nn.functional.mse_loss
    chance, own_random = torch.Generator().manual_seed(1), random.Random(log.worker)
    random.seed(log.worker)
    torchelastic.train(coordinator, train_step, state, checkpoint=saves)
    if coordinator.rank < 0:
        return  # it came when the others had finished, and has no result
    flat = torch.cat([one.detach().reshape(-1) for one in (*model.parameters(), *model.buffers())])
    torch.save(flat, options.out / f"weights-{log.worker}-{coordinator.rank}.pt")
    log("finished", step=state.step, rank=coordinator.rank, calls=getattr(model, "calls", 0))


if __name__ == "__main__":
    main()
