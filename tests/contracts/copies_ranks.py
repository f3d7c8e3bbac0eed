"""Ranks whose checkpoints lie in two places each, one of which is damaged before they resume; by public names alone."""

from __future__ import annotations

import errno
import json
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.contracts import durable_ranks, memory_ranks
from tests.contracts.damages import (
    FOLDER_DAMAGES,
    MANIFEST_DAMAGES,
    SHARD_DAMAGES,
    Stored,
    Victim,
    bad_disk,
    copied,
    obey_modes,
    repair_disk,
    wear_out,
)
from tests.contracts.facades import Model, Streamed, outcome, step_of, weights_at
from tests.contracts.faults import with_fault
from tests.contracts.local_ranks import rank
from torchelastic.checkpoint import BCPState, DiskTier, DurableTier, KeepLast, MemoryTier, TieredCheckpointManager
from torchelastic.checkpoint.api import load_latest, save
from torchelastic.checkpoint.errors import explained
from torchelastic.checkpoint.format.disk import REAL_DISK, Disk
from torchelastic.checkpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager
from torchelastic.checkpoint.replication import LazyCliqueReplicationStrategy

OLDER, NEWER = 3, 5
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Facade:
    """One way to keep two copies of each shard.

    Attributes:
        save: a step, on all ranks, and keeps so many checkpoints.
        resume: gives the step that this rank has loaded, whose values were compared; None: a job would start afresh.
        world_sizes: that can resume it, the one that saves it first.
        keeps: how many checkpoints it may keep.
    """

    save: Callable[[Path, int, int], None]
    resume: Callable[[Path, int], int | None]
    world_sizes: Sequence[int] = (2, 1, 3)
    keeps: Sequence[int] = (1, 2)


def _host(root: Path) -> Path:
    return root / f"host-{rank()}"


# --- local ------------------------------------------------------------------------------------------------------------


def _local(root: Path, keep: int = 1, disk: Disk = REAL_DISK) -> LocalCheckpointManager:
    os.environ["TORCHELASTIC_FAILURE_DOMAIN"] = f"host-{rank()}"
    strategy = LazyCliqueReplicationStrategy(1, 2) if dist.is_initialized() else None
    return LocalCheckpointManager(_host(root), "", strategy, keep=keep, timeout_s=TIMEOUT_S, disk=disk)


def _save_local(root: Path, step: int, keep: int) -> None:
    manager = _local(root, keep)
    manager.save(_state(step), step)
    manager.close()


def _state(step: int) -> BasicTensorAwareStateDict:
    return BasicTensorAwareStateDict({"weights": weights_at(step + 100 * rank()), "rank": rank()})


def _resume_local(root: Path, saved_by: int) -> int | None:
    manager = _local(root)
    try:
        if manager.find_latest() < 0:
            return None
        state, id_ = manager.load(shard=rank() % saved_by)
        assert isinstance(state, BasicTensorAwareStateDict)
        tree = state.to_tree()
        assert step_of(tree["weights"]) == id_.iteration + 100 * tree["rank"]
        assert tree["rank"] == rank() % saved_by
        return id_.iteration
    finally:
        if dist.is_initialized():
            dist.barrier()
        manager.close()


def _resume_local_resharded(root: Path, saved_by: int) -> int | None:
    manager = _local(root)
    try:
        template = {"weights": weights_at(0), "rank": -1}
        tree, id_ = manager.load_resharded(template, strict=False)
        assert step_of(tree["weights"]) % 100 == id_.iteration
        return id_.iteration
    finally:
        if dist.is_initialized():
            dist.barrier()
        manager.close()


# --- with copies in durable storage -----------------------------------------------------------------------------------


def _with_durable(kind: str) -> Facade:
    def save_durable(root: Path, step: int, keep: int) -> None:
        durable_ranks.save(kind, root, [step])

    return Facade(save_durable, lambda root, _: durable_ranks.resume(kind, root), (2,), (2,))


# --- tiers ------------------------------------------------------------------------------------------------------------

Tiers = Callable[[Path, int], "list[DiskTier | MemoryTier | DurableTier]"]


def _training(tiers: Tiers, replicas: int = 0, world_sizes: Sequence[int] = (2, 1, 3)) -> Facade:
    """BCPState over tiers; each rank has something of its own."""

    def state(root: Path, keep: int) -> tuple[Model, BCPState]:
        module, mine = Model(weights_at(0)), {"rank": rank()}
        options: dict[str, Any] = {"replicas": replicas, "host": f"host-{rank()}", "timeout_s": TIMEOUT_S}
        return module, BCPState(module, None, tiers=tiers(root, keep), get_extra_fn=lambda: mine, **options)

    def save_training(root: Path, step: int, keep: int) -> None:
        module, training = state(root, keep)
        training.maybe_resume_from_ckpt()
        module.weights.data.copy_(weights_at(step))
        training.save()
        training.close()

    def resume(root: Path, saved_by: int) -> int | None:
        module, training = state(root, 2)
        try:
            extra = training.maybe_resume_from_ckpt()
            if extra is None:
                return None
            assert extra["rank"] == rank() % saved_by
            return step_of(module.weights.detach())
        finally:
            training.close()

    return Facade(save_training, resume, world_sizes)


def _streamed(tiers: Tiers) -> Facade:
    """A state for managers of 0.1's interface, of one rank."""

    def save_streamed(root: Path, step: int, keep: int) -> None:
        manager, state = TieredCheckpointManager(tiers(root, keep)), Streamed()
        load_latest(manager, state)
        state.weights = weights_at(step)
        save(manager, state)
        manager.close()

    def resume(root: Path, saved_by: int) -> int | None:
        manager, state = TieredCheckpointManager(tiers(root, 2)), Streamed()
        try:
            return step_of(state.weights) if load_latest(manager, state) else None
        finally:
            manager.close()

    return Facade(save_streamed, resume, (1,))


def _memory(root: Path, keep: int) -> MemoryTier:
    return MemoryTier(_host(root) / "memory", KeepLast(keep))


def _durable(root: Path, keep: int) -> DurableTier:
    return DurableTier((root / "store").as_uri(), KeepLast(keep))


FACADES: Mapping[str, Facade] = {
    "local": Facade(_save_local, _resume_local),
    "local, resharded": Facade(_save_local, _resume_local_resharded),
    "local, durable": _with_durable("local"),
    "memory": Facade(
        lambda root, step, _: memory_ranks.save(root, step),
        lambda root, saved_by: _recovered(memory_ranks.recover(root, saved_by)),
        keeps=(1,),
    ),
    "memory, durable": _with_durable("memory"),
    "training, memory": _training(lambda root, keep: [_memory(root, keep)], replicas=1),
    "training, memory and durable": _training(lambda root, keep: [_memory(root, keep), _durable(root, keep)]),
    "training, disk and durable": _training(
        lambda root, keep: [DiskTier(root / "shared", KeepLast(keep)), _durable(root, keep)]
    ),
    "training, own disks and durable": _training(
        lambda root, keep: [DiskTier(_host(root), KeepLast(keep), shared=False), _durable(root, keep)]
    ),
    "streamed, memory and disk": _streamed(
        lambda root, keep: [_memory(root, keep), DiskTier(root / "shared", KeepLast(keep))]
    ),
}


def _recovered(found: tuple[int | None, bool]) -> int | None:
    step, is_equal = found
    assert is_equal, "other values"
    return step


# --- what the ranks do ------------------------------------------------------------------------------------------------


def save_steps(name: str, root: Path, keep: int, steps: Sequence[int]) -> None:
    """Save some steps, one after the other; each as a job of its own."""
    for step in steps:
        FACADES[name].save(root, step, keep)
        if dist.is_initialized():
            dist.barrier()


@dataclass(frozen=True)
class Fault:
    """One fault: what is done to which files.

    Attributes:
        name: for people.
        damage: as `damages` calls it.
        files: below the root.
        others: of each of them, what another rank has saved, and another save; below the root that was saved.
    """

    name: str
    damage: str
    files: Sequence[Path]
    others: Sequence[tuple[Path, Path]]


def resume_after(
    name: str, saved: Path, older: Path, saved_by: int, faults: Sequence[Fault], lengths: Mapping[str, int]
) -> list[dict[str, Any]]:
    """What becomes of each fault on this rank: see `outcome`.

    And of each of its files, whether the fault has happened, and whether what was saved is there at the end.

    Args:
        name: of the façade.
        saved: what was saved, which is copied for each fault.
        older: where another save lies.
        saved_by: how many ranks saved it.
        faults: one after the other, each as a job of its own.
        lengths: of each file, how much of it counts.
    """
    logging.getLogger("torchelastic").setLevel(logging.WARNING)
    obey_modes()
    root, told = saved.parent / "now", []
    for fault in faults:
        repair_disk()
        if rank() == 0:
            copied(saved, root)
        if dist.is_initialized():
            dist.barrier()
        damage = {**SHARD_DAMAGES, **MANIFEST_DAMAGES, **FOLDER_DAMAGES}[fault.damage]
        for file, (other_rank, other_save) in zip(fault.files, fault.others, strict=True):
            victim = Victim(
                root / file,
                (saved / other_rank).read_bytes()[: lengths[str(other_rank)]],
                (older / other_save).read_bytes(),
                lengths.get(str(file), 0),
            )
            if fault.damage == "on a bad disk" or rank() == 0:
                damage(victim)
        if dist.is_initialized():
            dist.barrier()
        with bad_disk(), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            is_hurt = [not is_as_saved(saved, root, file, lengths) for file in fault.files]
            if dist.is_initialized():
                dist.barrier()  # nobody makes anything whole before all have looked
            found = outcome(lambda: FACADES[name].resume(root, saved_by))
        found["is_hurt"] = is_hurt
        found["warnings"] += [str(one.message) for one in warned]
        if dist.is_initialized():
            dist.barrier()
        found["whole"] = [is_as_saved(saved, root, file, lengths) for file in fault.files]
        told.append(found)
    return told


def is_as_saved(saved: Path, now: Path, what: Path, lengths: Mapping[str, int]) -> bool:
    """Whether what counts of a file, or of all in a folder, is what was saved."""
    if (saved / what).is_dir():
        inside = [Path(file) for file in lengths if Path(file).parent == what]
        return all(is_as_saved(saved, now, file, lengths) for file in inside)
    length = lengths[str(what)]
    try:
        descriptor = os.open(now / what, os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.pread(descriptor, length, 0) == (saved / what).read_bytes()[:length]  # see `bad_disk`
    except OSError:
        return False
    finally:
        os.close(descriptor)


def lengths_of(root: Path, stored: Stored) -> dict[str, int]:
    """How much of each file counts: of a shard what its manifest says."""
    sizes = {}
    for manifest in stored.manifests:
        for record in json.loads((root / manifest).read_text())["shards"]:
            sizes[record["file"]] = record["size_bytes"]
    found = {str(path): sizes[path.name] for copies in stored.shards.values() for path in copies}
    return found | {str(path): (root / path).stat().st_size for path in stored.manifests}


# --- killed while they do it ------------------------------------------------------------------------------------------


def resume_and_be_killed(name: str, root: Path, saved_by: int, victim: int, number: int) -> bool:
    """Resume; one rank is killed at its n-th call to the disk. Returns whether it came to that, on that rank."""
    return _with_kill(lambda: FACADES[name].resume(root, saved_by), victim, number)


class NoRoom(Disk):
    """A disk on which there is no room for anything new, and of which somebody has been told."""

    refused = 0

    def allocate(self, descriptor: int, size_bytes: int, path: Path) -> None:
        """See `Disk`."""
        NoRoom.refused += 1
        with explained("reserve room for the checkpoint", path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def resume_without_room(root: Path) -> dict[str, Any]:
    """A host that has lost its shard has no room for another one: what becomes of it, and how often it was refused."""
    manager = _local(root, disk=NoRoom() if rank() == 1 else REAL_DISK)

    def load() -> list[float]:
        state, id_ = manager.load()
        assert isinstance(state, BasicTensorAwareStateDict)
        return [id_.iteration, step_of(state.to_tree()["weights"])]

    found = outcome(load)
    if dist.is_initialized():
        dist.barrier()
    manager.close()
    return found | {"refused": NoRoom.refused}


def read_after_a_bad_sector(root: Path) -> dict[str, Any]:
    """What DCP reads where the disk of rank 1 goes bad after the checkpoint was found, and how often that was met."""
    with memory_ranks.parts(rank()) as (_, loader):
        latest = loader.get_latest_complete_checkpoint(memory_ranks.container_of(root, rank()))
        assert latest is not None
        expected = memory_ranks.state_of(rank(), NEWER)
        if rank() == 1:
            (own,) = memory_ranks.container_of(root, 1).glob(f"step-{NEWER:09d}.*/shard-00001-of-*.shard")
            wear_out(own)
        dist.barrier()
        state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        with bad_disk() as met:
            found = outcome(lambda: memory_ranks.load(state, str(latest), loader))
        dist.barrier()
        found["is_equal"] = all(torch.equal(state[name], expected[name]) for name in expected)
        return found | {"met": met.count}


class Stuck(Disk):
    """A disk that removes nothing of the first save."""

    refused = 0

    def remove(self, path: Path) -> None:
        """See `Disk`."""
        if path.parent.name.startswith("step-000000001."):
            Stuck.refused += 1
            with explained("remove a file of a checkpoint", path):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().remove(path)


def save_beside(root: Path, obstacle: str) -> dict[str, Any]:
    """Saves once more where the oldest save cannot be removed; which saves are there then, and what was said."""
    (oldest,) = root.glob("host-0/step-000000001.*")
    if obstacle == "another user's folder":
        obey_modes()
        oldest.chmod(0)
        assert not os.access(oldest, os.R_OK)
    manager = _local(root, 1, Stuck() if obstacle == "bad disk" else REAL_DISK)
    told = outcome(lambda: manager.save(_state(4), 4))
    manager.close()
    assert Stuck.refused or obstacle != "bad disk"
    left = sorted(path.name.split(".")[0] for path in (root / "host-0").glob("step-*"))
    oldest.chmod(0o700)
    return {"left": left, "warnings": told["warnings"]}


def save_and_be_killed(name: str, root: Path, keep: int, victim: int, number: int) -> bool:
    """The same of a save."""
    return _with_kill(lambda: FACADES[name].save(root, NEWER, keep), victim, number)


def _with_kill(action: Callable[[], object], victim: int, number: int) -> bool:
    if rank() != victim:
        action()
        return False
    _, has_struck = with_fault(action, "kill", number)()
    return bool(has_struck)


def resume_and_save(name: str, root: Path, saved_by: int, step: int) -> list[Any]:
    """What this rank has found, and after one more save once more, each as a job of its own."""
    found = [outcome(lambda: FACADES[name].resume(root, saved_by)).get("value")]
    FACADES[name].save(root, step, 1)
    if dist.is_initialized():
        dist.barrier()
    return [*found, outcome(lambda: FACADES[name].resume(root, saved_by)).get("value")]
