"""How much training is lost to a save: the area under the throughput curve, not only the time it stands still.

A loop of equal steps of computation runs; at one of them a save is begun. Everything that the steps take longer than
usual, until the checkpoint is durable, and the call itself, is what the save has cost.
"""

from __future__ import annotations

import statistics
import threading
import time

import torch

from benchmarks.checkpoint.ways import Way

STEP_S = 0.02


class Training:
    """Steps of computation on one thread, as long as `STEP_S`."""

    def __init__(self) -> None:
        self._matrix = torch.rand(256, 256)
        self._products = 1
        per_product_s = statistics.median(self._time_s() for _ in range(50))
        self._products = max(1, int(STEP_S / per_product_s))
        self.usual_s = statistics.median(self.step_s() for _ in range(50))

    def step_s(self) -> float:
        """One step; returns how long it took."""
        return self._time_s()

    def _time_s(self) -> float:
        began_s = time.perf_counter()
        for _ in range(self._products):
            torch.mm(self._matrix, self._matrix)
        return time.perf_counter() - began_s


def lost_ms(way: Way, training: Training) -> float:
    """What one save costs training, in milliseconds of it."""
    usual_s = statistics.median(training.step_s() for _ in range(20))
    began_s = time.perf_counter()
    way.save()
    done = threading.Event()
    if way.is_async:
        threading.Thread(target=_when_durable, args=(way, done), daemon=True).start()
    else:
        done.set()
    steps = 0
    while not done.is_set():
        training.step_s()
        steps += 1
    took_ms = (time.perf_counter() - began_s - steps * usual_s) * 1e3
    way.tidy()
    return took_ms


def _when_durable(way: Way, done: threading.Event) -> None:
    way.wait()
    done.set()
