"""A training job in which single ranks do something else in a step than the others: see `test_steps_that_part.py`.

A fault with the verb "raise" marks where; its phase says what the rank does instead. What is kept of each step's
samples is what the sampler has counted when the step committed.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

import torchelastic
from tests.cluster.elastic_job import EventLog, make_dataset, make_model
from torchelastic.data import ElasticBatchSampler, ElasticLoader
from torchelastic.p2p import CoordinatorP2P
from torchelastic.testing.faults import FaultPlan

SAMPLES, GLOBAL_BATCH, SEED = 240, 12, 7


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--logical-shards", type=int, default=None)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--salvage", default="discard")
    parser.add_argument("--between-halves-s", type=float, default=0.0)
    parser.add_argument("--wait-for", type=int, default=0, help="workers, from step 12 on")
    options = parser.parse_args()
    log, plan = EventLog(options.out), FaultPlan(options.out)
    dataset = make_dataset(SAMPLES)
    sampler = ElasticBatchSampler(dataset, GLOBAL_BATCH, seed=SEED)
    loader = ElasticLoader(dataset, sampler)
    coordinator = CoordinatorP2P("gloo")
    state = made_state(sampler, options)

    mse_of = torch.nn.functional.mse_loss

    def is_here(what: str) -> bool:
        try:
            plan.reach(what, state.step, coordinator.rank)
        except RuntimeError:
            return True
        return False

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = state.model(inputs)
        if is_here("catch"):
            raise MemoryError("this batch does not fit")
        return outputs

    def train_step(state: torchelastic.ModelState) -> None:
        plan.reach("begin", state.step, coordinator.rank)
        if state.step == 0:
            torch.manual_seed(coordinator.rank)
        if state.step >= SAMPLES // GLOBAL_BATCH // 2 and coordinator.world_size < options.wait_for:
            raise torchelastic.RetryableException("waits for a newcomer")
        if is_here("stop"):
            raise StopIteration
        for inputs, targets in state.shards(loader) if options.logical_shards else [next(loader)]:
            if is_here("return"):
                return
            if is_here("draw again"):
                inputs, targets = next(loader)
            try:
                loss = mse_of(forward(inputs), targets)
            except MemoryError:
                state.optimizer.zero_grad()
                return
            if is_here("evaluate"):
                state.model(inputs)  # on one rank, and with gradients, which nobody wants
            if is_here("skip"):
                state.skip_step("no number")
            if not options.logical_shards:
                state.optimizer.zero_grad()
            if is_here("halves"):  # as whoever has run out of memory tries again: both are averaged
                half, loss = loss / 2, loss / 2
                half.backward(retain_graph=True)  # type: ignore[no-untyped-call]
                time.sleep(options.between_halves_s)
                loss = mse_of(state.model(inputs), targets) / 2
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        if is_here("skip late"):
            state.skip_step("too late")
        if is_here("no optimizer"):
            return
        state.optimizer.step()
        indices = [index for share in sampler.pending for index in share.indices]
        log("trained", step=state.step, round=coordinator.rendezvous.joined.number, indices=indices)

    torchelastic.train(coordinator, train_step, state)
    if coordinator.rank < 0:
        return  # it came when the others had finished, and has no result
    weights = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in state.model.parameters()]
    flat = torch.cat([one.detach().reshape(-1) for one in weights])
    torch.save(flat, options.out / f"weights-{log.worker}-{coordinator.rank}.pt")
    log("finished", step=state.step, rank=coordinator.rank)


def made_state(sampler: ElasticBatchSampler, options: argparse.Namespace) -> torchelastic.ModelState:
    model = make_model(SEED, dropout=options.dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torchelastic.ModelState(
        model, optimizer, sampler=sampler, logical_shards=options.logical_shards, salvage=options.salvage
    )


if __name__ == "__main__":
    main()
