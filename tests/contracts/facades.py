"""The five ways to save a checkpoint, by their public names alone, and what one process does with them."""

from __future__ import annotations

import logging
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from torchelastic.checkpoint import (
    BCPState,
    DiskTier,
    DurableTier,
    FileSystemCheckpointManager,
    KeepLast,
    MemoryTier,
    TieredCheckpointManager,
)
from torchelastic.checkpoint.api import load_latest, save
from torchelastic.checkpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager
from torchelastic.checkpoint.memory import (
    CheckpointContainerId,
    CheckpointObjectManager,
    DefaultCheckpointLoader,
    DefaultCheckpointSaver,
    MemoryStorageReader,
    MemoryStorageWriter,
)
from torchelastic.checkpoint.replication import ReplicationManager

LENGTH = 1000
#: Where states are: see the option `--device` of pytest.
device = "cpu"


def weights_at(step: int) -> torch.Tensor:
    """What is saved at a step: every element says which one it is."""
    return torch.arange(LENGTH, dtype=torch.float64, device=device) + step


def step_of(weights: torch.Tensor) -> int:
    """The inverse, wherever the weights were loaded to; fails if they are those of no step."""
    step = int(weights[0])
    assert torch.equal(weights.cpu(), weights_at(step).cpu()), "weights of no step"
    return step


class Streamed:
    """A state for managers of 0.1's interface."""

    def __init__(self) -> None:
        self.weights = weights_at(0)

    def save(self, stream: BinaryIO, /) -> None:
        torch.save(self.weights, stream)

    def load(self, stream: BinaryIO, /) -> None:
        self.weights = torch.load(stream, weights_only=True)


class Model(torch.nn.Module):
    """A model with these weights."""

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(weights)


class Facade(ABC):
    """One way to save and resume, in a folder; every save and every resume is that of a job of its own.

    Attributes:
        words: how an error names who has saved this way.
    """

    words: str

    @abstractmethod
    def save(self, folder: Path, step: int) -> None:
        """Save a step, and keep one checkpoint."""

    @abstractmethod
    def resume(self, folder: Path) -> int | None:
        """The step of the newest checkpoint; None: a job would start afresh."""


class Streams(Facade):
    words = "FileSystemCheckpointManager"

    def save(self, folder: Path, step: int) -> None:
        state = Streamed()
        state.weights = weights_at(step)
        save(FileSystemCheckpointManager(folder, keep=1), state)

    def resume(self, folder: Path) -> int | None:
        state = Streamed()
        return step_of(state.weights) if load_latest(FileSystemCheckpointManager(folder), state) else None


class Tiered(Facade):
    words = "TieredCheckpointManager"

    def __init__(self, tier: Callable[[Path], DiskTier | MemoryTier | DurableTier]) -> None:
        self._tier = tier

    def save(self, folder: Path, step: int) -> None:
        state = Streamed()
        state.weights = weights_at(step)
        manager = TieredCheckpointManager([self._tier(folder)])
        try:
            save(manager, state)
        finally:
            manager.close()

    def resume(self, folder: Path) -> int | None:
        state = Streamed()
        manager = TieredCheckpointManager([self._tier(folder)])
        try:
            return step_of(state.weights) if load_latest(manager, state) else None
        finally:
            manager.close()


class Training(Facade):
    words = "BCPState"

    def __init__(self, tier: Callable[[Path], DiskTier | MemoryTier | DurableTier] | None = None) -> None:
        self._tier = tier

    def save(self, folder: Path, step: int) -> None:
        module, state = self._state(folder)
        module.weights.data.copy_(weights_at(step))
        try:
            state.save()
        finally:
            state.close()

    def resume(self, folder: Path) -> int | None:
        module, state = self._state(folder)
        try:
            return None if state.maybe_resume_from_ckpt() is None else step_of(module.weights.data)
        finally:
            state.close()

    def _state(self, folder: Path) -> tuple[Model, BCPState]:
        module = Model(weights_at(0))
        if self._tier is None:
            return module, BCPState(module, None, default_ckpt_path=folder, keep=1)
        return module, BCPState(module, None, tiers=[self._tier(folder)])


class Local(Facade):
    words = "LocalCheckpointManager"

    def __init__(self, keep: int = 1) -> None:
        self._keep = keep

    def save(self, folder: Path, step: int) -> None:
        manager = LocalCheckpointManager(folder, keep=self._keep)
        try:
            manager.save(BasicTensorAwareStateDict({"weights": weights_at(step)}), step)
        finally:
            manager.close()

    def resume(self, folder: Path) -> int | None:
        manager = LocalCheckpointManager(folder)
        try:
            found = manager.find_latest()
            if found < 0:
                return None
            state, id_ = manager.load()
            assert id_.iteration == found, "what is found is what is loaded"
            assert isinstance(state, BasicTensorAwareStateDict)
            return step_of(state.to_tree()["weights"])
        finally:
            manager.close()


class Memory(Facade):
    words = "torchelastic.checkpoint.memory"

    def __init__(self, **also: Any) -> None:
        self._also = also  # what is loaded besides

    def save(self, folder: Path, step: int) -> None:
        writer = self.writer()
        name = CheckpointContainerId.format_version_container(step)
        state = {"weights": weights_at(step)}
        with _unwrapped():
            dcp.state_dict_saver.save(state, checkpoint_id=str(folder / name), storage_writer=writer)

    def resume(self, folder: Path) -> int | None:
        loader = DefaultCheckpointLoader(*self._parts())
        latest = loader.get_latest_complete_checkpoint(folder)
        if latest is None:
            return None
        state = {"weights": weights_at(0), **self._also}
        reader = MemoryStorageReader(checkpoint_loader=loader)
        with _unwrapped():
            dcp.state_dict_loader.load(state, checkpoint_id=str(latest), storage_reader=reader)
        return step_of(state["weights"])

    @classmethod
    def writer(cls, **options: Any) -> MemoryStorageWriter:
        """For DCP; a save that is left out raises."""
        objects, replication = cls._parts()
        saver = DefaultCheckpointSaver(ckpt_obj_manager=objects, replication_manager=replication)
        return MemoryStorageWriter(saver, on_failure="raise", **options)

    @staticmethod
    def _parts() -> tuple[CheckpointObjectManager, ReplicationManager]:
        objects, replication = CheckpointObjectManager(), ReplicationManager()
        replication.initialize(objects)
        return objects, replication


@contextmanager
def _unwrapped() -> Iterator[None]:
    """What a rank has raised, without DCP's wrapper around it, which is no Exception."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


#: One for each kind of checkpoint.
KINDS: Mapping[str, Facade] = {
    "streams": Streams(),
    "tiered": Tiered(DiskTier),
    "training": Training(),
    "local": Local(),
    "memory": Memory(),
}
#: Others that read and write the same kinds elsewhere.
VARIANTS: Mapping[str, tuple[str, Facade]] = {
    "private disk": ("tiered", Tiered(lambda folder: DiskTier(folder, KeepLast(1), shared=False))),
    "memory tier": ("tiered", Tiered(MemoryTier)),
    "training-memory": ("training", Training(MemoryTier)),
    "training-durable": ("training", Training(lambda folder: DurableTier(folder.as_uri(), KeepLast(1)))),
    "durable": ("tiered", Tiered(lambda folder: DurableTier(folder.as_uri(), KeepLast(1)))),
}


#: All of them.
FACADES: Mapping[str, Facade] = {**KINDS, **{name: facade for name, (_, facade) in VARIANTS.items()}}


def files_in(folder: Path) -> list[Path]:
    """What a reader would look at, the largest last."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return sorted(files, key=lambda path: path.stat().st_size)


class _Warnings(logging.Handler):
    """Keeps what is logged as a warning or worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def outcome(action: Callable[[], Any]) -> dict[str, Any]:
    """What an action returned, or the names of the classes of what it raised, and its text; and what was logged."""
    handler = _Warnings()
    logging.getLogger("torchelastic").addHandler(handler)
    try:
        return {"value": action(), "warnings": handler.texts}
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {"error": str(error), "kinds": kinds, "warnings": handler.texts, "trace": traceback.format_exc()}
    finally:
        logging.getLogger("torchelastic").removeHandler(handler)


def do(lines: Sequence[tuple[str, str, Path, int]]) -> list[dict[str, Any]]:
    """In one process, what each line says: "save" or "resume", a facade, a folder, and a step to save."""
    done = []
    for verb, name, folder, step in lines:
        facade = KINDS[name] if name in KINDS else VARIANTS[name][1]
        action = partial(facade.save, folder, step) if verb == "save" else partial(facade.resume, folder)
        done.append(outcome(action))
    return done
