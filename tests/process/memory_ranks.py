"""Ranks that are hosts of their own: a failure domain and a container each, and checkpoints made without DCP."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from torchelastic.checkpoint.compat.flashpoint.commit import Commit, StoredItem
from torchelastic.checkpoint.compat.flashpoint.container import Container
from torchelastic.checkpoint.compat.flashpoint.ids import meta_of_shard, object_of, shard_of
from torchelastic.checkpoint.compat.flashpoint.loader import DefaultCheckpointLoader
from torchelastic.checkpoint.compat.flashpoint.object_manager import CheckpointObjectManager
from torchelastic.checkpoint.format.disk import REAL_DISK, Disk
from torchelastic.checkpoint.format.header import PREAMBLE_BYTES, decode_preamble, lay_out
from torchelastic.checkpoint.format.tree import flatten
from torchelastic.checkpoint.replication import ReplicationManager, ReplicationRetryConfig
from torchelastic.checkpoint.store.reading import record_in
from torchelastic.checkpoint.store.received_shards import sealed_bytes
from torchelastic.checkpoint.store.save_id import SaveId, ShardId

SIZE = 5000
JOB = "job7"


@dataclass
class Member:
    """One rank, as it takes part."""

    objects: CheckpointObjectManager
    replication: ReplicationManager
    loader: DefaultCheckpointLoader
    container: Container

    @property
    def rank(self) -> int:
        return self.replication.rank

    def meet(self) -> None:
        self.replication.all_gather("meet", None)


def base_of(root: str | Path, host: str) -> Path:
    return Path(root) / f"host-{host}" / JOB


def folder_of(root: str | Path, host: str, step: int) -> Path:
    """Where the attached files of a step lie."""
    return base_of(root, host) / f"step-{step}_ckpt"


def files_of(root: str | Path, host: str, step: int) -> dict[str, Path]:
    """The files of the newest save of a step, by name."""
    *_, newest = sorted(base_of(root, host).glob(f"step-{step:09d}.*"))
    return {path.name: path for path in newest.iterdir()}


@contextmanager
def member(
    root: str,
    hosts: str,
    rank: int,
    *,
    port: int = 0,
    timeout_s: float = 10.0,
    disk: Disk = REAL_DISK,
) -> Iterator[Member]:
    """A rank of a job; `hosts` has a letter per rank."""
    os.environ["TORCHELASTIC_FAILURE_DOMAIN"] = f"host-{hosts[rank]}"
    objects, replication = CheckpointObjectManager(disk=disk), ReplicationManager()
    retry = ReplicationRetryConfig(max_retries=1, timeout_seconds=5.0)
    replication.initialize(objects, port, retry, timeout_s=timeout_s)
    try:
        loader = DefaultCheckpointLoader(objects, replication)
        made = Member(objects, replication, loader, objects.container(base_of(root, hosts[rank])))
        made.meet()  # who pushes before its partner has opened the container is refused
        yield made
    finally:
        replication.shutdown()
        objects.teardown_pool()


def value_of(rank: int, step: int) -> torch.Tensor:
    return torch.arange(SIZE, dtype=torch.float32) + 1000 * step + rank


def save_of(step: int, generation: int) -> SaveId:
    return SaveId(1, 0, generation, step, "00000007")


def shard(rank: int, world_size: int, step: int, generation: int) -> ShardId:
    """The shard of a rank; with the rank behind the last one, the commit."""
    return shard_of(save_of(step, generation), rank, world_size)


def publish(each: Member, step: int, generation: int) -> Path:
    """The own shard of a step, without replicas."""
    flat = flatten({"w": value_of(each.rank, step)})
    mine = shard(each.rank, each.replication.world_size, step, generation)
    header = lay_out(flat, meta_of_shard(mine))
    stage = each.container.pool.take(header)
    checksums = stage.copy_and_hash([named.tensor for named in flat.tensors])
    return each.container.publish(stage, header.with_checksums(checksums), each.container.path_of(mine))


def object_at(path: Path) -> str:
    """What other hosts call the shard at a path."""
    return object_of(JOB, ShardId.parse(f"{path.parent.name}/{path.name}"))


def push(each: Member, path: Path) -> int:
    content = sealed_bytes(path)
    assert content is not None
    return each.replication.push(object_at(path), content)


def commit_of(paths: Sequence[Path], step: int, generation: int) -> Commit:
    """The commit of shards at these paths, by rank."""
    records = tuple(record_in(path, rank) for rank, path in enumerate(paths))
    shards = [shard(rank, len(paths), step, generation) for rank in range(len(paths))]
    storage = {MetadataIndex(f"w{rank}"): StoredItem(str(one), "w") for rank, one in enumerate(shards)}
    return Commit(save_of(step, generation), records, Metadata({}, storage_data=storage), {"common.pt": b"common"})


def save(each: Member, step: int, generation: int, *, replicate: bool = True, spread: bool = True) -> None:
    """A whole checkpoint; with `spread` false its commit is on the host of rank 0 only."""
    path = publish(each, step, generation)
    if replicate:
        push(each, path)
    paths = [Path(one) for one in each.replication.all_gather("saved", str(path))]
    if each.rank == 0:
        written = each.container.write_commit(commit_of(paths, step, generation))
        if spread:
            content = sealed_bytes(written)
            assert content is not None
            assert each.replication.spread(object_at(written), content) == []
    each.meet()


def read_back(each: Member, step: int) -> list[bool]:
    """Whether each shard of a checkpoint, wherever it lies, has the values that were saved."""
    checkpoint = each.container.folder_of(step)
    found = []
    for index, item in (each.loader.read_metadata(checkpoint).storage_data or {}).items():
        with each.loader.open(checkpoint, item.file) as shard:
            found.append(torch.equal(shard.read_one(item.entry), value_of(int(index.fqn[1:]), step)))
    return found


def damage(path: Path, part: str = "data") -> None:
    """Flips a bit of a shard: of the "preamble", of the "header", or in the middle of the "data", if there are any."""
    with path.open("r+b") as file:
        preamble = decode_preamble(file.read(PREAMBLE_BYTES))
        header, data = (
            PREAMBLE_BYTES + preamble.header_bytes // 2,
            preamble.data_offset_bytes + preamble.data_bytes // 2,
        )
        at = {"preamble": 3, "header": header, "data": data if preamble.data_bytes else header}[part]
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
