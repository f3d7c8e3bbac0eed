"""Jobs with a `BCPState`: in this process, as ranks of a group, and as ranks that may be killed."""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.process.replicas import counting_pulls
from torchelastic.checkpoint import BCPState, MemoryTier
from torchelastic.checkpoint.format.disk import REAL_DISK, Disk
from torchelastic.checkpoint.format.shard_reader import ShardReader
from torchelastic.testing.disk_faults import FaultyDisk, full_at

TIMEOUT_S = 20.0


def net(seed: int, *, wide: int = 12, buffers: bool = True) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    middle = torch.nn.BatchNorm1d(wide) if buffers else torch.nn.LayerNorm(wide)
    layers = (torch.nn.Linear(6, wide), middle, torch.nn.Dropout(0.4), torch.nn.Linear(wide, 3))
    return torch.nn.Sequential(*layers)


class Job:
    """A training loop whose batches come from all generators, so that only a complete resume goes on as before."""

    def __init__(
        self, folder: Path, kind: str = "plain", *, seed: int = 0, disk: Disk = REAL_DISK, **more: Any
    ) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        plain = net(seed, wide=more.pop("wide", 12), buffers=kind != "fsdp2")
        self.model: torch.nn.Module = plain
        if kind == "ddp":
            self.model = DistributedDataParallel(plain, **more.pop("ddp", {}))
        elif kind == "fsdp2":
            fully_shard(plain, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.iteration = 0
        for seeding in (random.seed, np.random.seed, torch.manual_seed):
            seeding(1000 + 10 * seed + self.rank)
        framework = "fsdp2" if kind == "fsdp2" else "ddp"
        arguments = {"timeout_s": TIMEOUT_S, **more}
        where = None if "tiers" in more else folder
        self.state = BCPState(self.model, self.optimizer, framework, self.extra, where, disk=disk, **arguments)

    def extra(self) -> dict[str, Any]:
        return {"iteration": self.iteration, "rank": self.rank, "digest": self.digest(), "next": torch.ones(3)}

    def digest(self) -> str:
        """Of all that this rank holds; a mixture of two checkpoints would not have it."""
        digest = hashlib.sha256()
        state = self.optimizer.state_dict()["state"]
        # DDP gives rank 0's buffers to all before each step; what the others have after it is lost anyway
        model = self.model.state_dict() if self.rank == 0 else dict(self.model.named_parameters())
        tensors = [*model.values(), *(value for kept in state.values() for value in kept.values())]
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            digest.update(local.detach().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            shift = random.random() + float(np.random.rand())
            loss = (self.model(torch.randn(8, 6) + shift) - shift).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
            self.iteration += 1
        return losses

    def resume(self) -> dict[str, Any] | None:
        extra = self.state.maybe_resume_from_ckpt()
        if extra is not None:
            self.iteration = extra["iteration"]
        return extra


def in_one_folder(folder: str, *, sync: bool, kind: str, **more: Any) -> tuple[list[float], list[float], Any]:
    """Saves after 3 steps, goes on for 4; what another job that resumes trains; and what it got as extra state."""
    job = Job(Path(folder), kind, **more)
    assert job.resume() is None
    job.train(3)
    job.state.save(sync=sync)
    undisturbed = job.train(4)
    job.state.wait()
    again = Job(Path(folder), kind, seed=7, **more)
    extra = again.resume()
    assert extra is not None
    assert extra["digest"] == again.digest(), "not what was saved"
    resumed = again.train(4)
    for one in (job, again):
        one.state.close()
    return undisturbed, resumed, [extra["iteration"], extra["rank"], extra["next"].tolist()]


def saved_by(folder: str, kind: str) -> list[list[float]]:
    """Saves after 2 steps; returns the whole parameters."""
    job = Job(Path(folder), kind)
    job.train(2)
    job.state.save()
    job.state.close()
    values = job.model.state_dict().values()
    whole = [value.full_tensor() if isinstance(value, DTensor) else value for value in values]
    return [value.flatten().tolist() for value in whole]


def resumed_by(folder: str, kind: str) -> tuple[list[list[float]], Any, bool, list[str]]:
    """What a job resumes: the whole parameters, the extra state, whether random numbers were left alone, warnings."""
    job = Job(Path(folder), kind, seed=5)
    before = torch.get_rng_state()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        extra = job.resume()
    assert extra is not None
    kept = torch.equal(before, torch.get_rng_state())
    losses = job.train(1)
    assert all(loss == loss for loss in losses)
    job = Job(Path(folder), kind, seed=6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job.resume()
    values = [v.full_tensor() if isinstance(v, DTensor) else v for v in job.model.state_dict().values()]
    words = [str(one.message) for one in caught if issubclass(one.category, RuntimeWarning)]
    return [value.flatten().tolist() for value in values], [extra["iteration"], extra["rank"]], kept, words


def own_buffers(folder: str) -> tuple[bool, list[float]]:
    """DDP that lets the buffers of ranks differ: whether each rank gets its own."""
    job = Job(Path(folder), "ddp", ddp={"broadcast_buffers": False})
    job.train(2)
    job.state.save()
    again = Job(Path(folder), "ddp", seed=3, ddp={"broadcast_buffers": False})
    again.resume()
    buffers = dict(job.model.named_buffers())
    same = all(torch.equal(buffers[name], value) for name, value in again.model.named_buffers())
    return same, buffers["module.1.running_mean"].tolist()


def attempt(work: Callable[[], Any]) -> tuple[str, str]:
    """What an action raises."""
    try:
        work()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def different_ranks(folder: str) -> tuple[str, str]:
    """Models that no DDP keeps equal, and which differ."""
    job = Job(Path(folder), "plain", seed=dist.get_rank())
    return attempt(job.state.save)


def full_on_rank_1(folder: str, *, sync: bool) -> tuple[tuple[str, str], tuple[str, str], Any]:
    """The disk of rank 1 is full in the second save; what is raised, then what is resumed."""
    disk = FaultyDisk(*([full_at(9)] if dist.get_rank() == 1 else []))  # rank 1 makes 7 calls per save
    job = Job(Path(folder), "ddp", disk=disk)
    job.train(1)
    job.state.save()
    job.train(1)
    at_save = attempt(lambda: job.state.save(sync=sync))
    at_wait = attempt(job.state.wait)
    job.train(1)
    job.state.close()
    again = Job(Path(folder), "ddp", seed=4)
    extra = again.resume()
    disk.require_struck()
    assert extra is not None
    assert extra["digest"] == again.digest()
    again.state.save()  # the folder is as good as before
    return at_save, at_wait, extra["iteration"]


def after_a_host_is_lost(folder: str) -> tuple[int, int, bool]:
    """Each rank saves on a host of its own, into memory, with a copy on the other; then the host of rank 1 is lost."""
    rank = dist.get_rank()

    def places(life: int) -> dict[str, Any]:
        memory = Path(folder) / (f"host{rank}" if rank == 0 else f"host{rank}-{life}")
        return {"tiers": [MemoryTier(memory)], "replicas": 1, "host": memory.name}

    job = Job(Path(folder), "fsdp2", **places(0))
    for sync in (True, False):
        job.train(1)
        job.state.save(sync=sync)
    job.state.wait()
    job.state.close()
    again = Job(Path(folder), "fsdp2", seed=5, **places(1))
    extra = again.resume()
    assert extra is not None
    assert extra["digest"] == again.digest() == job.digest()
    again.train(1)
    again.state.save()
    again.state.close()
    return extra["iteration"], extra["rank"], (Path(folder) / "host1-1").exists()


def received_by_each_rank(folder: str) -> tuple[bool, int, int]:
    """Each rank saves its part on a host of its own, and resumes there: what comes from the other, and the parts."""
    tiers: dict[str, Any] = {"tiers": [MemoryTier(Path(folder) / f"host{dist.get_rank()}")], "wide": 40_000}
    job = Job(Path(folder), "fsdp2", **tiers)
    job.train(1)
    job.state.save()
    job.state.close()
    again = Job(Path(folder), "fsdp2", seed=5, **tiers)
    with counting_pulls() as came:
        extra = again.resume()
    again.state.close()
    parts = [value.to_local().nbytes for value in again.model.state_dict().values()]
    return extra is not None and extra["digest"] == again.digest() == job.digest(), sum(came), sum(parts)


def damaged_for_rank_1(folder: str) -> tuple[int, int, bool, list[str]]:
    """Of the newest of two checkpoints a byte is changed that only rank 1 reads."""
    job = Job(Path(folder), "ddp")
    for _ in range(2):
        job.train(1)
        job.state.save()
    shard = max(Path(folder).glob("step*")) / "shard-00001-of-00002.shard"
    with ShardReader(shard) as reader:
        last = reader.header.entries[-1]
    dist.barrier()
    if job.rank == 1:
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    dist.barrier()
    again = Job(Path(folder), "ddp", seed=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        extra = again.resume()
    assert extra is not None
    assert last.name.startswith("own/rank1/")
    words = [str(one.message) for one in caught if issubclass(one.category, RuntimeWarning)]
    return extra["iteration"], extra["rank"], extra["digest"] == again.digest(), words


def refused(folder: str) -> list[tuple[str, str]]:
    """Models and values that cannot be saved."""
    first = FullyShardedDataParallel(net(0), device_id=torch.device("cpu"))
    sharded = net(0, buffers=False)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    partly = net(0, buffers=False)
    fully_shard(partly[0], mesh=init_device_mesh("cpu", (2,)))
    from torch.distributed.optim import ZeroRedundancyOptimizer  # takes a second

    plain = net(0)
    zero = ZeroRedundancyOptimizer(plain.parameters(), torch.optim.SGD, lr=0.1)
    in_extra = BCPState(sharded, None, "fsdp", lambda: {"w": sharded[0].weight}, folder, timeout_s=TIMEOUT_S)
    return [
        attempt(lambda: BCPState(first, None, "fsdp")),
        attempt(lambda: BCPState(sharded, None, "ddp")),
        attempt(lambda: BCPState(partly, None, "fsdp2")),
        attempt(lambda: BCPState(plain, zero)),
        attempt(in_extra.save),
    ]


def another_model_on_rank_1(folder: str) -> tuple[tuple[str, str], bool]:
    Job(Path(folder), "plain").state.save()
    job = Job(Path(folder), "plain", wide=12 + dist.get_rank(), seed=2)
    before = job.digest()
    return attempt(job.state.load), job.digest() == before
