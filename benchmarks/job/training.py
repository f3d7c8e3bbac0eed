"""What a worker of a benchmark's job trains, and what it writes down."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import torchelastic
from benchmarks.job import models, tickets
from benchmarks.job.events import EventLog
from torchelastic import model_state
from torchelastic.data import ElasticBatchSampler, ElasticLoader
from torchelastic.model import transfer
from torchelastic.p2p import CoordinatorP2P

#: Steps of a full group in which a probe is measured.
PROBED_STEPS = range(2, 5)


class NotedCoordinator(CoordinatorP2P):
    """Writes down when a step has committed, and what a recovery took."""

    note: EventLog
    began_s = 0.0
    steps_of_group = 0

    def init_process_group(self) -> None:
        super().init_process_group()
        self.steps_of_group = 0
        self.note("formed", round=self.rendezvous.joined.number, rank=self.rank, world=self.world_size)

    def step_committed(self) -> None:
        step, before = self._committed_steps, self.last_recovery
        super().step_committed()
        ms = 1000 * (time.monotonic() - self.began_s)
        number, recovery = self.rendezvous.joined.number, self.last_recovery
        where = {"round": number, "rank": self.rank, "world": self.world_size, "step": step}
        if recovery is not None and recovery is not before:
            self.note("recovered", noticed=recovery.noticed_s, phases=recovery.phases_ms, **where)
        self.note("committed", ms=ms, number=self.steps_of_group, **where)
        self.steps_of_group += 1


def train(options: argparse.Namespace) -> None:
    """Be one worker until the data are used up, or until somebody ends it."""
    torch.set_num_threads(1)
    note = EventLog(options.folder)
    model = models.make_model(options.model, options.seed)
    optimizer = models.make_optimizer(model, options.rate)
    batch = models.SIZES[options.model].samples_per_worker * options.workers
    sampler = ElasticBatchSampler(options.samples, batch, epochs=options.epochs, seed=options.seed)
    loader = ElasticLoader(TensorDataset(*models.make_data(options.model, options.samples)), sampler)
    state = torchelastic.ModelState(
        model, optimizer, sampler=sampler, salvage=options.salvage, logical_shards=options.logical_shards
    )
    coordinator = NotedCoordinator(process_group_timeout=30000)
    coordinator.note = note
    if options.probe == "transfer":
        _time_transfers(coordinator, note)
    note("warm", parameters=sum(parameter.numel() for parameter in model.parameters()))
    tickets.take(options.folder, "join")
    note("joins")
    sleep_s_per_sample = options.step_ms / 1000 / models.SIZES[options.model].samples_per_worker

    def train_step(state: Any) -> None:
        coordinator.began_s = time.monotonic()
        shards = state.shards(loader)
        share = sampler.pending[-1]
        if options.ledger:
            note(
                "drawn", step=state.step, round=coordinator.rendezvous.joined.number, rank=coordinator.rank,
                world=coordinator.world_size, epoch=share.epoch, indices=share.indices, carried=share.carried,
            )  # fmt: skip
        time.sleep(sleep_s_per_sample * share.local_samples)
        optimizer.zero_grad()
        for inputs, targets in shards:
            torch.nn.functional.mse_loss(state.model(inputs), targets).backward()  # type: ignore[no-untyped-call]  # torch has no types here
        optimizer.step()
        if options.probe and coordinator.world_size == options.workers and coordinator.steps_of_group in PROBED_STEPS:
            _probe(options.probe, state, coordinator, note)

    torchelastic.train(coordinator, train_step, state)
    if coordinator.rank >= 0:
        torch.save(model.state_dict(), options.folder / f"weights-{os.getpid()}.pt")
    note("finished", step=state.step, rank=coordinator.rank)


def _probe(what: str, state: Any, coordinator: NotedCoordinator, note: EventLog) -> None:
    """Measure a floor in this very group: called by all its members in the same step."""
    if what == "all_reduce":
        flat = torch.zeros(sum(parameter.numel() for parameter in state.module.parameters()))
        began_s = time.monotonic()
        dist.all_reduce(flat)
        note("all_reduce", ms=1000 * (time.monotonic() - began_s))
        return
    tensors = transfer.pack(state.state_dict()).tensors
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    warm = torch.ones(size_bytes, dtype=torch.uint8)
    rank, last = coordinator.rank, coordinator.world_size - 1
    for name in ("broadcast", "message", "message_into_fresh_memory"):
        dist.barrier()
        began_s = time.monotonic()
        if name == "broadcast":
            dist.broadcast(warm, src=0)
        elif rank == 0:
            dist.send(warm, dst=last)
        elif rank == last:
            dist.recv(warm if name == "message" else torch.empty_like(warm), src=0)
        if name == "broadcast" or rank in (0, last):
            number = coordinator.rendezvous.joined.number
            note(name, round=number, began=began_s, ended=time.monotonic(), bytes=size_bytes)


def _time_transfers(coordinator: NotedCoordinator, note: EventLog) -> None:
    """Write down when the state's transfers begin and end."""
    original = transfer.synchronize

    def timed(tree: Any, **where: Any) -> Any:
        began_s = time.monotonic()
        received = original(tree, **where)
        role = "source" if where["rank"] == where["source"] else "stale" if received is not None else "none"
        number = coordinator.rendezvous.joined.number
        note("transfer", round=number, role=role, began=began_s, ended=time.monotonic(), stale=len(where["stale"]))
        return received

    vars(model_state)["synchronize"] = timed  # the name by which `ModelState` calls it
