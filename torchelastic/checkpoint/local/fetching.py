"""Finds a good copy of a shard: here, in a folder beside, or with another rank."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.local.choice import Holding
from torchelastic.checkpoint.local.names import Shard
from torchelastic.checkpoint.local.shard_folder import ShardFolder
from torchelastic.checkpoint.replication.client import ReplicaClient, pull_into
from torchelastic.checkpoint.replication.topology import PeerTopology
from torchelastic.checkpoint.shards import ShardReader
from torchelastic.checkpoint.shards.image import tensors_of
from torchelastic.checkpoint.shards.writing import hidden_path

log = logging.getLogger(__name__)

Used = TypeVar("Used")


def from_any(
    shard: Shard,
    places: Sequence[Holding],
    use: Callable[[ShardReader], Used],
    *,
    files: ShardFolder,
    peers: PeerTopology,
    roots: Sequence[str],
    keep: bool,
) -> Used:
    """Opens a shard at the first of several places where it can be used; the bad ones are named in warnings.

    Args:
        shard: which.
        places: where it lies, best first.
        use: reads and checks it; the reader stays open. A `CorruptCheckpointError` means: try the next place.
        files: of this rank.
        peers: how the others are reached.
        roots: see `Survey.places`.
        keep: what is fetched from another host is kept here, in place of a damaged copy.

    Returns:
        What `use` returned.

    Raises:
        CorruptCheckpointError: no place has a good copy; tells why of each.
    """
    failures = []
    for place in places:
        reader: ShardReader | None = None
        try:
            if roots[place.rank] == roots[files.rank]:
                reader = ShardReader(files.path_of(shard, place.folder))
            else:
                client = peers.client(place.rank, peers.retry.timeout_seconds)
                reader = (_fetch if keep else _fetch_unnamed)(shard, client, files)
            return use(reader)
        except CorruptCheckpointError as error:
            reason = str(error)
        except CheckpointError as error:
            if reader is not None:
                raise  # it is not damaged: no other copy would do better
            reason = str(error)
        if reader is not None:
            reader.close()
        failures.append(f"rank {place.rank}: {reason}")
        log.warning("%s is of no use at rank %d: %s", shard, place.rank, reason)
    raise CorruptCheckpointError(f"no good copy of {shard} is left ({'; '.join(failures) or 'nobody holds one'})")


def _fetch(shard: Shard, client: ReplicaClient, files: ShardFolder) -> ShardReader:
    """Gets a shard into the own folder; it takes its name only when all of it is good."""
    name = shard.file_name

    def check(view: memoryview) -> None:
        tensors_of(torch.frombuffer(view, dtype=torch.uint8), f"the copy of {name} at {client.peer}")

    pull_into(files, name, partial(client.pull, name), check)
    log.info("fetched %s from %s", shard, client.peer)
    return ShardReader(files.path_of(shard, files.rank))


def _fetch_unnamed(shard: Shard, client: ReplicaClient, files: ShardFolder) -> ShardReader:
    """Gets a shard into a file without a name, which goes with its reader."""
    path = hidden_path(files.path)

    def destination(size_bytes: int) -> memoryview:
        descriptor = files.disk.create(path)
        try:
            files.disk.allocate(descriptor, size_bytes, path)
            return memoryview(mmap.mmap(descriptor, size_bytes))
        finally:
            os.close(descriptor)  # and with it the lock that would keep the reader out

    try:
        client.pull(shard.file_name, destination)
        return ShardReader(path)
    finally:
        files.disk.remove(path)
