"""A coordinator for a world of one, a state that counts, and checkpoints in memory: for tests of deadlines."""

from __future__ import annotations

import io
from typing import Any

import torchelastic
from torchelastic.checkpoint import Checkpoint, CheckpointManager
from torchelastic.coordinator import Coordinator
from torchelastic.errors import DrainedException
from torchelastic.testing.clock import FakeClock


class World(Coordinator):
    """A world of one, whose process ends it may be told of."""

    def __init__(self) -> None:
        self.stopped = False
        self.calls: list[str] = []
        self.drain: bool = False

    def rendezvous_barrier(self) -> Any:
        self.calls.append("rendezvous")
        if self.drain:
            raise DrainedException("left")
        return None, 0, 1

    def init_process_group(self) -> None: ...

    def should_save_checkpoint(self) -> bool:
        return False

    def should_rendezvous(self, state: torchelastic.State) -> bool:
        return self.drain

    def should_stop_training(self) -> bool:
        return self.stopped

    def signal_training_done(self) -> None:
        self.calls.append("done")
        self.stopped = True

    def monitor_progress(self, state: torchelastic.State, worker_stats: Any) -> None: ...

    def report_progress(self, state: torchelastic.State) -> None: ...

    def on_error(self, e: BaseException) -> None: ...

    def leave(self) -> None:
        self.calls.append("leave")
        self.drain = True

    def stop_early(self) -> None:
        self.calls.append("stop early")


class Counter(torchelastic.State):
    def __init__(self) -> None:
        self.step = 0

    def sync(self) -> None: ...

    def save(self, stream: Any) -> None:
        stream.write(str(self.step).encode())

    def load(self, stream: Any) -> None:
        self.step = int(stream.read())


class Kept(io.BytesIO):
    def close(self) -> None: ...


class InMemory(CheckpointManager):
    """Keeps what was saved; a save takes a while by the clock, and may fail."""

    def __init__(self, clock: FakeClock | None = None, save_s: float = 0.0, failing: int = 0) -> None:
        self.saved: list[Kept] = []
        self.clock, self.save_s, self.failing = clock, save_s, failing

    def create_checkpoint(self) -> Checkpoint:
        return InMemoryCheckpoint(self, Kept())

    def get_checkpoint(self, sequence_id: int) -> Checkpoint | None:
        return None

    def get_latest_checkpoint(self) -> Checkpoint | None:
        return next(iter(self.list_checkpoints()), None)

    def list_checkpoints(self) -> list[Checkpoint]:
        return [InMemoryCheckpoint(self, stream) for stream in reversed(self.saved)]

    @property
    def steps(self) -> list[int]:
        return [int(stream.getvalue()) for stream in self.saved]


class InMemoryCheckpoint(Checkpoint):
    def __init__(self, manager: InMemory, stream: Kept) -> None:
        self.manager, self.stream = manager, stream

    def open_output_stream(self, key: str) -> Any:
        return self.stream

    def open_input_stream(self, key: str) -> Any:
        return io.BytesIO(self.stream.getvalue())

    def commit(self) -> None:
        if self.manager.clock is not None:
            self.manager.clock.advance(self.manager.save_s)
        if self.manager.failing:
            self.manager.failing -= 1
            raise OSError(28, "No space left on device")
        self.manager.saved.append(self.stream)

    def discard(self) -> None: ...
