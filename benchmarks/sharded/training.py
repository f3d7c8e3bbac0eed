"""What a worker of the benchmark's job trains, and what it writes down."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from typing import Any

import torch
from torch.utils.data import TensorDataset

import torchelastic
from benchmarks.job import tickets
from benchmarks.job.events import EventLog
from benchmarks.job.training import NotedCoordinator
from benchmarks.sharded import gpt
from benchmarks.sharded.copying import CopySchedule
from benchmarks.sharded.floor import move_plainly
from benchmarks.sharded.slots import SlotWatch
from torchelastic.data import ElasticBatchSampler, ElasticLoader
from torchelastic.metrics import MetricData, MetricHandler, configure
from torchelastic.sharded import FullShard, HybridShard, ShardedState, handover

SAMPLES = 4096
#: Steps of a survivors' group in which the floor is measured.
FLOOR_STEPS = range(2, 5)


class NotedMetrics(MetricHandler):
    """Writes down the metrics of sharded models."""

    def __init__(self, coordinator: NotedCoordinator, slots: SlotWatch) -> None:
        self._coordinator, self._slots = coordinator, slots

    def emit(self, metric_data: MetricData) -> None:
        if metric_data.name.startswith("sharded."):
            number = self._coordinator.rendezvous.joined.number
            self._coordinator.note("metric", name=metric_data.name, value=metric_data.value, round=number)
        if metric_data.name == "sharded.copy.duration.ms":
            self._slots.look()  # on the training thread, when the memory of a copy has just been taken


def train(options: argparse.Namespace) -> None:
    """Be one worker until all is measured, or until somebody ends it."""
    torch.set_num_threads(1)
    note = EventLog(options.folder)
    sampler = ElasticBatchSampler(SAMPLES, gpt.SAMPLES_PER_WORKER * options.workers, epochs=1_000_000)
    loader = ElasticLoader(TensorDataset(gpt.make_data(SAMPLES)), sampler)
    state = ShardedState(
        lambda mesh: gpt.build(options.model, mesh),
        mesh=HybridShard(options.hybrid) if options.hybrid else FullShard(),
        replicas=0 if options.hybrid else 1,
        every=options.every,
        sampler=sampler,
    )
    coordinator = NotedCoordinator(process_group_timeout=60000)
    coordinator.note = note
    slots = SlotWatch(state, note)
    configure(NotedMetrics(coordinator, slots), "torchelastic")
    moved = _note_moves(coordinator, note)
    schedule = CopySchedule(state, note, rounds=options.rounds, steps=options.steps) if options.rounds else None
    note("warm")
    tickets.take(options.folder, "join")
    note("joins")

    def train_step(state: ShardedState) -> None:
        number = coordinator.steps_of_group
        if schedule is not None and coordinator.world_size == options.workers:
            if schedule.step_begins(number):
                raise StopIteration
            slots.look()
        if coordinator.world_size == options.workers - 1 and number in FLOOR_STEPS:
            move_plainly(state, moved, note, round=coordinator.rendezvous.joined.number)
        coordinator.began_s = time.monotonic()
        (tokens,) = next(loader)
        time.sleep(options.step_ms / 1000 / gpt.SAMPLES_PER_WORKER * len(tokens))
        gpt.loss_of(state.model, tokens).backward()  # type: ignore[no-untyped-call]  # torch has no types here
        state.optimizer.step()
        state.optimizer.zero_grad()

    torchelastic.train(coordinator, train_step, state)
    slots.tell()
    note("finished", step=state.step)


def _note_moves(coordinator: NotedCoordinator, note: EventLog) -> Counter[int]:
    """Write down when parts begin to move to a new group's members, and when this rank has its own.

    Returns:
        The bytes that this rank has received in the last such move, by the rank that they came from; changes.
    """
    original = vars(handover)["move"]  # the name by which `take_over` calls it
    moved: Counter[int] = Counter()

    def move(pieces: Any, *, target: Any, **where: Any) -> int:
        moved.clear()
        for piece in pieces:
            moved[piece.source] += target(piece).nbytes
        local_bytes = moved.pop(coordinator.rank, 0)
        began_s = time.monotonic()
        received_bytes: int = original(pieces, target=target, **where)
        number = coordinator.rendezvous.joined.number
        note("moved", round=number, began=began_s, ended=time.monotonic(), bytes=received_bytes, local=local_bytes)
        return received_bytes

    vars(handover)["move"] = move
    return moved
