"""Ranks that save with LocalCheckpointManager, by public names alone; each is a host with a folder of its own."""

from __future__ import annotations

import gc
import os
import shutil
import stat
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchelastic.checkpoint import CheckpointError
from torchelastic.checkpoint.async_ckpt import AsyncCallsQueue, AsyncRequest
from torchelastic.checkpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager
from torchelastic.checkpoint.replication import CliqueReplicationStrategy, LazyCliqueReplicationStrategy

MIB = 2**20
#: For how long a save that is held back has to wait.
BUSY_S = 5.0


def rank() -> int:
    """Of this process in the group."""
    return dist.get_rank() if dist.is_initialized() else 0


def _manager(root: Path, **options: Any) -> LocalCheckpointManager:
    strategy = LazyCliqueReplicationStrategy(1, 2) if dist.is_initialized() else None
    options = {"repl_strategy": strategy, "timeout_s": 30.0} | options
    return LocalCheckpointManager(root / f"host-{rank()}", **options)


def _state(step: int, size_bytes: int = 4000, value: object = None) -> BasicTensorAwareStateDict:
    weights = torch.full((size_bytes // 4,), float(step))
    return BasicTensorAwareStateDict({"weights": weights, "rank": rank(), "value": value})


def save(root: Path, step: int, value: object = None, **options: Any) -> None:
    """Save a step, with a value of this rank's own."""
    _manager(root, **options).save(_state(step, value=value), step)


def save_as_if_on(root: Path, hosts: str, step: int) -> None:
    """Save a step; ranks with the same letter are lost together, and no jump is given."""
    host = hosts[rank()]
    os.environ |= {"TORCHELASTIC_FAILURE_DOMAIN": host, "LOCAL_WORLD_SIZE": str(hosts.count(host))}
    strategy = CliqueReplicationStrategy.from_replication_params()
    manager = LocalCheckpointManager(root / f"host-{rank()}", repl_strategy=strategy, timeout_s=30)
    manager.save(_state(step), step)


def save_two(root: Path) -> None:
    """Save the steps 1 and 2, and keep both."""
    manager = _manager(root, keep=2)
    for step in (1, 2):
        manager.save(_state(step), step)


def resume(root: Path, **options: Any) -> dict[str, Any]:
    """What is found and what is loaded, of the own rank's number or, with fewer ranks, of the ranks there are."""
    manager = _manager(root, **options)
    found, saved_by = manager.find_latest(), manager.latest_world_size
    loaded = None
    if found >= 0:
        state, id_ = manager.load(shard=rank() % saved_by)
        assert isinstance(state, BasicTensorAwareStateDict)
        tree = state.to_tree()
        assert (float(tree["weights"].unique()), tree["rank"]) == (id_.iteration, id_.rank)
        loaded = id_.iteration
    return {"found": found, "loaded": loaded}


def resume_and_save(root: Path, size_bytes: int, steps: list[int], keep: int = 1) -> list[str]:
    """One rank resumes, keeps what it has loaded, and saves; how each save ended."""
    manager = _manager(root, keep=keep)
    kept, id_ = manager.load() if manager.find_latest() >= 0 else (None, None)
    ended = []
    for step in steps:
        try:
            manager.save(_state(step, size_bytes), step)
            ended.append("saved")
        except CheckpointError as error:
            ended.append(str(error))
    if isinstance(kept, BasicTensorAwareStateDict) and id_ is not None:
        assert float(kept.to_tree()["weights"].unique()) == id_.iteration
    return ended


def train_and_save(root: Path, steps: int) -> tuple[list[float], list[bytes]]:
    """One rank resumes a model and its optimizer, on the CPU, and saves after each step.

    The optimizer keeps the tensors of its state that are loaded.

    Returns:
        How many MiB of the tmpfs are taken after each save, and at the end the model and the optimizer's state.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(512, 1024)
    optimizer = torch.optim.AdamW(model.parameters())
    manager, taken = _manager(root), []
    begun = manager.find_latest()
    if begun >= 0:
        loaded = manager.load()[0]
        assert isinstance(loaded, BasicTensorAwareStateDict)
        tree = loaded.to_tree()
        model.load_state_dict(tree["model"])
        optimizer.load_state_dict(tree["optimizer"])
    for step in range(begun + 1, begun + 1 + steps):
        optimizer.zero_grad()
        model(torch.ones(2, 512)).sum().backward()
        optimizer.step()
        manager.save(
            BasicTensorAwareStateDict({"model": model.state_dict(), "optimizer": optimizer.state_dict()}), step
        )
        taken.append(round(shutil.disk_usage(root).used / MIB, 1))
    moments = [value for each in optimizer.state.values() for value in each.values()]
    return taken, [tensor.detach().numpy().tobytes() for tensor in (*model.parameters(), *moments)]


def drop_managers(root: Path, count: int) -> dict[str, list[int]]:
    """Descriptors, threads and bytes in hidden files after each of some managers that saved and were not closed."""
    seen: dict[str, list[int]] = {"descriptors": [], "threads": [], "hidden": []}
    for step in range(count):
        _manager(root).save(_state(step, MIB), step)
        gc.collect()
        if dist.is_initialized():
            dist.barrier()
        hidden = list(root.rglob(".tmp-*"))
        seen["descriptors"].append(len(list(Path("/proc/self/fd").iterdir())))
        seen["threads"].append(threading.active_count())
        seen["hidden"].append(len(hidden))
        if dist.is_initialized():
            dist.barrier()
    return seen


def _held_bytes(root: Path) -> int:
    """What files take; one that gets another name while we look is counted once."""
    held = {}
    for path in root.rglob("*"):
        with suppress(FileNotFoundError):  # removed while we look
            status = path.stat()
            held[status.st_ino] = status.st_blocks * 512 if stat.S_ISREG(status.st_mode) else 0
    return sum(held.values())


def save_quickly(root: Path, count: int) -> int:
    """Some asynchronous saves while the background is busy for some seconds; how many states came to lie in memory."""
    manager, queue, goes_on, most = _manager(root), AsyncCallsQueue(worker="thread"), threading.Event(), 0
    queue.schedule_async_request(AsyncRequest(goes_on.wait, (BUSY_S,), []))
    for step in range(count):
        request = manager.save(_state(step, MIB), step, is_async=True)
        assert request is not None
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=False)
        most = max(most, _held_bytes(root) // MIB)
    goes_on.set()
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    return most
