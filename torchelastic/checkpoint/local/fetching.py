"""Opens a copy of a shard: here, in a folder beside, or with another rank."""

from __future__ import annotations

import logging
import mmap
import os
from functools import partial

import torch

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.local.names import Shard
from torchelastic.checkpoint.local.shard_folder import ShardFolder
from torchelastic.checkpoint.replication.client import ReplicaClient, pull_into
from torchelastic.checkpoint.shards import ShardReader
from torchelastic.checkpoint.shards.image import tensors_of
from torchelastic.checkpoint.shards.writing import hidden_path

log = logging.getLogger(__name__)


def open_copy(
    shard: Shard, files: ShardFolder, *, folder: int, client: ReplicaClient | None, keep: bool
) -> ShardReader:
    """Opens one copy of a shard.

    Args:
        shard: which.
        files: of this rank.
        folder: the rank folder of this host in which it lies.
        client: of the rank that has it, if that is on another host.
        keep: what is fetched from another host is kept here, in place of a damaged copy.

    Raises:
        CorruptCheckpointError: this copy cannot be had; another one may.
    """
    try:
        if client is None:
            return ShardReader(files.path_of(shard, folder))
        return (_fetch if keep else _fetch_unnamed)(shard, client, files)
    except CheckpointError as error:
        raise CorruptCheckpointError(str(error)) from error


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
