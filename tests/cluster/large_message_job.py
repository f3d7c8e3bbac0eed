"""Steps that broadcast 64 MiB, and a rank 1 that is killed in the middle of one: for test_large_messages.py.

Usage: large_message_job.py FOLDER STEPS STEP_OF_THE_KILL
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchelastic
from tests.process.half_transferred import moved_bytes
from torchelastic.p2p import CoordinatorP2P

NUMBERS = 16 * 2**20


class Count(torchelastic.State):
    """How many steps were done, and the sum of what was received in them."""

    def __init__(self) -> None:
        self.step, self.total = 0, 0.0

    def sync(self, world_size: int, rank: int) -> None:
        if world_size > 1:
            values = torch.tensor([float(self.step), self.total], dtype=torch.float64)
            dist.broadcast(values, src=0)
            self.step, self.total = int(values[0]), float(values[1])

    def snapshot(self) -> tuple[int, float]:
        return self.step, self.total

    def apply(self, snapshot: Any) -> None:
        self.step, self.total = snapshot


def main() -> None:
    folder, steps, fatal = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    file = (folder / f"events-{os.getpid()}.jsonl").open("ab", buffering=0)

    def note(event: str, **fields: Any) -> None:
        file.write(json.dumps({"e": event, "t": time.monotonic(), "pid": os.getpid(), **fields}).encode() + b"\n")

    note("started")
    numbers = torch.zeros(NUMBERS)
    coordinator = CoordinatorP2P()

    def die_half_way() -> None:
        began = moved_bytes()
        while moved_bytes() < began + 2**20:
            pass
        note("dies")
        os.kill(os.getpid(), signal.SIGKILL)

    def train_step(state: Count) -> None:
        if state.step == steps:
            raise StopIteration
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if is_first and state.step == fatal and coordinator.rank == 1 and coordinator.world_size == 3:
            threading.Thread(target=die_half_way, daemon=True).start()
        numbers.fill_(float(state.step) if coordinator.rank == 0 else -1.0)
        if coordinator.world_size > 1:
            dist.broadcast(numbers, src=0)
        state.step, state.total = state.step + 1, state.total + float(numbers[-1])
        note("trained", step=state.step, world=coordinator.world_size)

    state = Count()
    torchelastic.train(coordinator, train_step, state)
    note("finished", total=state.total)


if __name__ == "__main__":
    main()
