"""What the ranks of the tests of tiered checkpoints do; each function runs on every rank of a real gloo group."""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import torchelastic
from tests.process.tier_saves import sealed
from tests.pure.worlds_of_one import World
from tests.waiting import wait_until
from torchelastic.checkpoint import EverySteps, TieredCheckpointManager
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.format.disk import Disk
from torchelastic.checkpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager
from torchelastic.checkpoint.loop_checkpoints import LoopCheckpoints
from torchelastic.checkpoint.policy import KeepLast
from torchelastic.checkpoint.store import DiskTier, DurableTier, MemoryTier, SaveId, SealedShard, Tier
from torchelastic.group.peers import Alone
from torchelastic.p2p.group_peers import GroupPeers

STREAM_BYTES = 5000


def join(round_number: int = 1) -> GroupPeers:
    """The group as a coordinator would give it, with a store of its own."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    port = torch.zeros(1, dtype=torch.int64)
    store: TCPStore | None = None
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        port[0] = store.port
    dist.broadcast(port, 0)
    if store is None:
        store = TCPStore("127.0.0.1", int(port), None, False, wait_for_workers=False)
    assert dist.group.WORLD is not None
    return GroupPeers(dist.group.WORLD, store, rank, world_size, round_number, lambda: None)


def make_state(seed: int, steps: int) -> torchelastic.ModelState:
    """Equal on all ranks that give the same seed, but for the random numbers and the running statistics."""
    torch.manual_seed(seed)
    module = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 32), torch.nn.Linear(32, 7, bias=False)
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    state = torchelastic.ModelState(module, optimizer, extra={"seed": seed, "losses": [0.5]})
    inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))
    for _ in range(steps):
        optimizer.zero_grad()
        module(inputs).square().sum().backward()
        optimizer.step()
        state.commit()
    rank = dist.get_rank() if dist.is_initialized() else 0
    with torch.no_grad():
        module.get_buffer("1.running_mean").add_(rank)  # as real ranks differ: each has seen other samples
    torch.manual_seed(100 + rank)
    return state


def digest(state: torchelastic.ModelState) -> str:
    """Of all bits that are to come back, in the order of the names."""
    found = hashlib.sha256()
    tree = state.state_dict()
    for name, tensor in tree["module"].items():
        found.update(name.encode() + tensor.numpy().tobytes())
    for number, values in tree["optimizer"]["state"].items():
        for name, tensor in values.items():
            found.update(f"{number}/{name}".encode() + tensor.numpy().tobytes())
    found.update(repr((state.step, tree["extra"], tree["random"].tolist())).encode())
    return found.hexdigest()


def make_tiers(kinds: str, folder: str) -> list[Tier]:
    """`memory` of one host, `hosts` (each rank is a host of its own) and `disk`, in this order."""
    rank, place = dist.get_rank(), Path(folder)
    tiers: dict[str, Any] = {
        "memory": lambda: MemoryTier(place / "memory"),
        "hosts": lambda: MemoryTier(place / f"host-{rank}", name="hosts"),
        "disk": lambda: DiskTier(place / "disk"),
    }
    return [tiers[kind]() for kind in kinds.split()]


def steps_in(tier: Tier) -> list[int]:
    """At which steps what is committed in a tier was taken, newest first."""
    return [entry.name.step for entry in tier.inventory() if entry.is_committed]


def steps_of(manager: TieredCheckpointManager) -> list[int]:
    """At which steps the complete checkpoints were taken, newest first."""
    return [one.sequence_id for one in manager.list_checkpoints()]


def close(manager: TieredCheckpointManager) -> None:
    manager.end_run()
    manager.close()


def save(kinds: str, folder: str, steps: int = 3, replicas: int = 0) -> Any:
    """One save after each of the last two steps; returns the digest, the failures, and what was stored of the last."""
    peers = join()
    manager = TieredCheckpointManager(
        make_tiers(kinds, folder), run_id="test", patience_s=20.0, replicas=replicas, host=f"host-{peers.rank}"
    )
    manager.enter_group(peers)
    for step in (steps - 1, steps):
        state = make_state(7, step)
        manager.save_step(state, step, peers)
        manager.wait()
    sizes = {}
    for tier in manager.tiers:
        with tier.open(tier.inventory()[0].name, peers.rank) as shard:
            entries = shard.header.entries
            shared = sum(e.size_bytes for e in entries if e.name.startswith(("module/", "optimizer/")))
            sizes[tier.name] = {"shared": shared, "all": sum(entry.size_bytes for entry in shard.header.entries)}
    result = {"digest": digest(state), "failures": list(manager.failures), "sizes": sizes}
    close(manager)
    return result


def push_what_the_group_before_has_begun(folder: str) -> Any:
    """How a late replica of a former group fares with the partner, and one of this group."""
    manager = TieredCheckpointManager(
        make_tiers("hosts", folder), run_id="test", replicas=1, host=f"host-{dist.get_rank()}"
    )
    told = []
    for round_number in (1, 2):
        manager.enter_group(peers := join(round_number))
        manager.wait()
    peers.barrier()
    replicas = manager._replicas
    assert replicas is not None
    for number in (1, 2):
        try:
            replicas.push(sealed(SaveId(1, number, 1, 1), peers.rank, peers.world_size))
            told.append("taken")
        except CheckpointError as error:
            told.append(type(error).__name__)
    peers.barrier()
    close(manager)
    return told


def restore(kinds: str, folder: str, run_id: str = "test") -> Any:
    """Returns the digest on rank 0, the step or the error on each."""
    peers, manager = join(5), TieredCheckpointManager(make_tiers(kinds, folder), run_id=run_id)
    manager.enter_group(peers)
    state = make_state(1, 1)
    try:
        step = manager.restore(state, peers)
    except CheckpointError as error:
        manager.close()
        return {"error": f"{type(error).__name__}: {error}"}
    # the next save counts as newer than whatever was found
    manager.save_step(state, 50, peers)
    manager.end_run()
    newest = manager.tiers[0].inventory()[0].name
    result = {"step": step, "digest": digest(state), "newest": str(newest), "failures": list(manager.failures)}
    manager.close()
    return result


def _own_manager(folder: str, host: str) -> TieredCheckpointManager:
    return TieredCheckpointManager([MemoryTier(Path(folder) / host)], run_id="test", patience_s=20.0)


def save_with_a_host_of_an_earlier_job(folder: str) -> Any:
    """Rank 1 was not there when this job of the run began, and brings what one before it had saved in later rounds."""
    rank = dist.get_rank()
    if rank == 1:
        earlier = _own_manager(folder, "host-1")
        earlier.save_step(make_state(1, 10), 10, Alone(7))
        close(earlier)
    manager = _own_manager(folder, f"host-{rank}")
    if rank == 0:
        manager.save_step(make_state(7, 1), 1, Alone(1))
        manager.wait()
    peers = join(2)
    manager.save_step(make_state(7, 2), 2, peers)
    close(manager)
    return _restored(folder, f"host-{rank}")


def restore_of_two_jobs(folder: str) -> Any:
    """Two jobs of a run have saved alike, each on hosts of its own; one host of each is left."""
    rank = dist.get_rank()
    for hosts, seed in (("ab", 1), ("cd", 7)):
        manager, peers = _own_manager(folder, hosts[rank]), join()
        manager.save_step(make_state(seed, 2), 2, peers)
        close(manager)
    return _restored(folder, "ad"[rank])


def _restored(folder: str, host: str) -> Any:
    manager, peers = _own_manager(folder, host), join()
    manager.enter_group(peers)
    try:
        return manager.restore(make_state(3, 1), peers)
    except CheckpointError as error:
        return type(error).__name__
    finally:
        manager.close()


class FullDisk(DiskTier):
    """Full for one rank at step 2; the others are in the middle of writing by then, if the machine is quick enough."""

    full_rank = 0

    def put(self, shard: SealedShard) -> Any:
        if shard.name.step == 2 and shard.rank == self.full_rank:
            raise CheckpointError("the disk is full")
        return super().put(shard)


class SlowDisk(Disk):
    """Takes its time between writing a shard and giving it its name; whatever the order, the outcome is the same."""

    def rename(self, source: Path, target: Path) -> None:
        if target.suffix == ".shard" and "000000002" in target.parent.name:
            time.sleep(0.3)
        super().rename(source, target)


def save_where_one_disk_is_full(folder: str, full_rank: int) -> Any:
    peers = join()
    tier = FullDisk(Path(folder) / "disk", disk=SlowDisk())
    tier.full_rank = full_rank
    manager = TieredCheckpointManager([tier], run_id="test", patience_s=20.0)
    for step in (1, 2, 3):
        manager.save_step(make_state(7, step), step, peers)
        manager.wait()
    result = {
        "failures": list(manager.failures),
        "steps": [entry.name.step for entry in manager.tiers[0].inventory()],
        "left": sorted(path.name for path in (Path(folder) / "disk").glob(".tmp-step*")),
    }
    close(manager)
    return result


class SmallMemory(Disk):
    """Has room for the two slots that a memory tier needs, and for no third beside them."""

    slots = 0

    def allocate(self, descriptor: int, size_bytes: int, path: Path) -> None:
        self.slots += 1
        if self.slots == 3:
            raise CheckpointError("no room")
        super().allocate(descriptor, size_bytes, path)


def save_what_outgrows_its_slot_where_memory_is_full(folder: str) -> Any:
    """What rank 0 has beside its tensors has grown by step 2, and a larger slot cannot be had."""
    peers, disk = join(), SmallMemory()
    manager = TieredCheckpointManager([MemoryTier(Path(folder) / "memory", disk=disk)], run_id="test", patience_s=60.0)
    waits = []
    for step in (1, 2, 3):
        state = make_state(7, step)
        state.extra["losses"] = [0.5] * (100_000 if step == 2 else 1)
        manager.save_step(state, step, peers)
        waits.append(not manager.wait(10.0))
    result = {"waits": waits, "failures": list(manager.failures), "complete": steps_of(manager)}
    close(manager)
    return result


def save_where_one_rank_has_no_memory(folder: str) -> Any:
    """The folder of its host is on a tmpfs that is too small; there is a disk, too."""
    peers = join()
    manager = TieredCheckpointManager(make_tiers("hosts disk", folder), run_id="test", patience_s=60.0)
    waits = []
    for step in (1, 2, 3):
        manager.save_step(make_state(7, step), step, peers)
        waits.append(not manager.wait(10.0))
    result = {
        "waits": waits,
        "failures": list(manager.failures),
        "steps": {tier.name: steps_in(tier) for tier in manager.tiers},
        "restored": manager.restore(make_state(1, 1), peers),
    }
    close(manager)
    return result


def save_locally_where_one_host_has_no_room(folder: str) -> Any:
    """Each rank is a host of its own; there is durable storage, too."""
    rank, root = dist.get_rank(), Path(folder) / f"host-{dist.get_rank()}"
    tier = DurableTier(f"file://{folder}/durable")
    manager = LocalCheckpointManager(root / "job", durable=tier, timeout_s=30.0)
    for step in (1, 2):
        manager.save(BasicTensorAwareStateDict({"w": torch.full((20_000,), step + rank / 2)}), step)
        manager.wait_for_durable(30)
        dist.barrier()
    latest = manager.find_latest()
    (loaded, _), here = manager.load(), sorted(path.name for path in root.glob("job/step-*/shard*"))
    result = {"failures": list(manager.failures), "latest": latest, "own": float(loaded.to_tree()["w"][0])}
    manager.close()
    return {**result, "here": [name for name in here if f"-{rank:05d}-of" not in name]}


class SlowPrune(DiskTier):
    """Removes nothing on rank 1 before a file is there."""

    def prune(self) -> list[SaveId]:
        while Path(self.where).name == "host-1" and not (Path(self.where) / "go").exists():
            time.sleep(0.01)
        return super().prune()


def save_where_the_disk_of_rank_1_hangs(folder: str) -> Any:
    """Where it hangs rank 0 does not wait for it; returns how long the training stood still, and what is where."""
    peers, place = join(), Path(folder)
    disk = SlowPrune(place / f"host-{peers.rank}", KeepLast(10), shared=False)
    manager = TieredCheckpointManager([MemoryTier(place / "memory"), disk], run_id="test", slot_wait_s=10.0)
    stalls_s = []
    for step in range(1, 6):
        began_s = time.monotonic()
        manager.save_step(make_state(7, step), step, peers)
        stalls_s.append(time.monotonic() - began_s)
        wait_until(lambda at=step: steps_in(manager.tiers[0]) == [at], 10, f"{step} is in memory")  # type: ignore[misc]
        dist.barrier()
    (Path(disk.where) / "go").touch()
    manager.wait()
    result = {"stall_s": max(stalls_s), "failures": list(manager.failures), "on_disk": steps_in(disk)}
    close(manager)
    return result


class SlowToRemove(DiskTier):
    """As is rank 0 then, which alone removes checkpoints of a shared place."""

    def prune(self) -> list[SaveId]:
        time.sleep(0.3)
        return super().prune()


def save_where_rank_0_is_slower(folder: str) -> Any:
    """Saves come faster than the disk works on them; returns what is there at the end."""
    peers, place = join(), Path(folder)
    disk = SlowToRemove(place / "disk", KeepLast(10))
    manager = TieredCheckpointManager([MemoryTier(place / "memory"), disk], run_id="test")
    for step in range(1, 9):
        manager.save_step(make_state(7, step), step, peers)
        wait_until(lambda at=step: steps_in(manager.tiers[0]) == [at], 10, f"{step} is in memory")  # type: ignore[misc]
        dist.barrier()
    manager.wait()
    folders = [path.name for path in (place / "disk").iterdir() if path.is_dir()]
    result = {"failures": list(manager.failures), "on_disk": steps_in(disk), "folders": len(folders)}
    close(manager)
    return result


class SlowToStore(MemoryTier):
    """On rank 1, for longer than the others wait for one that gives no sign of life."""

    def put(self, shard: SealedShard) -> Any:
        if shard.rank == 1:
            time.sleep(2.0)
        return super().put(shard)


def save_again_after_rank_1_was_silent(folder: str) -> Any:
    """Rank 1 seems to be lost while step 1 is waited for, and lives; returns what there is of step 2."""
    peers, tier = join(), SlowToStore(Path(folder) / "memory")
    manager = TieredCheckpointManager([tier], run_id="test", patience_s=20.0)
    with patch.object(peers, "silent_s", lambda: {1: 99.0} if peers.rank == 0 else {}):
        manager.save_step(make_state(7, 1), 1, peers)
        manager.wait()
    dist.barrier()
    manager.save_step(make_state(7, 2), 2, peers)
    manager.wait()
    result = {"failures": list(manager.failures), "complete": steps_of(manager)}
    close(manager)
    return result


def save_where_one_rank_does_not(folder: str) -> Any:
    """Rank 1 never saves step 2; a new group ends the waiting of the others."""
    peers = join()
    manager = TieredCheckpointManager(
        [MemoryTier(Path(folder) / "memory")], run_id="test", patience_s=60.0, grace_s=0.3
    )
    manager.save_step(make_state(7, 1), 1, peers)
    manager.wait()
    if peers.rank != 1:
        manager.save_step(make_state(7, 2), 2, peers)
    dist.barrier()
    again = join(2)
    manager.enter_group(again)
    manager.save_step(make_state(7, 3), 3, again)
    manager.wait()
    result = {
        "failures": list(manager.failures),
        "complete": steps_of(manager),
    }
    close(manager)
    return result


def save_that_rank_0_tells_to_some(folder: str) -> Any:
    """The group breaks while rank 0 says that step 1 is to be saved: it does not know whether anybody has heard it."""
    peers, world = join(), World()

    def says(_value: bool) -> bool:
        if peers.rank == 0:
            raise RuntimeError("a peer is lost")
        return True

    with patch.object(peers, "rank_0_says", says), patch.object(world, "peers", lambda: peers):
        manager = TieredCheckpointManager([MemoryTier(Path(folder) / "memory")], policy=EverySteps(1), grace_s=10.0)
        checkpoints, state = LoopCheckpoints(world, manager), make_state(7, 1)
        checkpoints.enter_group(state, peers.rank)
        checkpoints.in_sync(state)
        with suppress(RuntimeError):
            checkpoints.after_step(state)
    dist.barrier()
    again = join(2)
    manager.enter_group(again)
    waits = not manager.wait(5.0)
    manager.save_step(state, 2, again)
    manager.wait()
    result = {"waits": waits, "complete": steps_of(manager)}
    close(manager)
    return result


class Plain(torchelastic.State):
    """A state without a tree."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def sync(self, *args: Any) -> None: ...

    def save(self, stream: Any) -> None:
        stream.write(self.content)

    def load(self, stream: Any) -> None:
        self.content = stream.read()


def save_and_restore_a_plain_state(folder: str) -> Any:
    peers = join()
    manager = TieredCheckpointManager([DiskTier(Path(folder) / "disk")], run_id="test")
    manager.save_step(Plain(f"rank {peers.rank}".encode() * STREAM_BYTES), 4, peers)
    manager.wait()
    other = Plain(b"nothing")
    step = manager.restore(other, peers)
    close(manager)
    return step, other.content == b"rank 0" * STREAM_BYTES
