"""The shards of a session, as one rank reaches them: in its host's folder, on other hosts, in durable storage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from torchelastic.checkpoint.compat.nvrx.local.host_folder import HostFolder
from torchelastic.checkpoint.compat.nvrx.local.names import described
from torchelastic.checkpoint.engine.durable_copies import DurableCopies
from torchelastic.checkpoint.engine.group_folders import GroupFolders
from torchelastic.checkpoint.engine.restorer import open_remote, read_good_copies
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.format.shard_reader import ShardReader
from torchelastic.checkpoint.replicas.receive import Destination
from torchelastic.checkpoint.replicas.replica_client import ReplicaClient, Transferred
from torchelastic.checkpoint.replicas.replication_errors import ReplicationError
from torchelastic.checkpoint.replicas.topology import PeerTopology
from torchelastic.checkpoint.store.restore_plan import Candidate, ShardSource
from torchelastic.checkpoint.store.save_id import ShardId

log = logging.getLogger(__name__)

Used = TypeVar("Used")


class LocalShards:
    """A `ShardAccess`. On the thread that trains.

    Args:
        files: of this host.
        peers: the group.
        roots: of each rank, what identifies the folder that it uses.
        copies: in durable storage; None: there are none.

    Attributes:
        folders: of the group.
    """

    def __init__(
        self, files: HostFolder, peers: PeerTopology, roots: Sequence[str], copies: DurableCopies | None
    ) -> None:
        def client(rank: int) -> ReplicaClient:
            return peers.client(rank, peers.retry.timeout_seconds)

        def pull(shard: ShardId, source: ShardSource, destination: Destination) -> Transferred:
            if copies is not None and source.place:
                return copies.pull(shard, destination)
            return client(source.rank).pull(str(shard), destination)

        self.folders = GroupFolders(files, peers.rank, roots, peers.hosts, peers.partners_of, pull)
        self._own, self._client, self._copies = ShardSource(peers.rank), client, copies
        self._kept: set[ShardId] = set()  # what is to be fetched into the folder if it is of no use there

    def sources(self, found: Candidate, shard: ShardId) -> list[ShardSource]:
        """Where a shard of a checkpoint is, nearest first."""
        others = self.folders.elsewhere(found.sources, shard.rank)
        is_here = len(others) < len(found.sources[shard.rank])
        return [*([self._own] if is_here else []), *others]

    def read(self, found: Candidate, shard: ShardId, use: Callable[[ShardReader], Used], *, keep: bool) -> Used:
        """What `use` returns for the first copy of a shard that it can read and check.

        Args:
            found: the checkpoint.
            shard: of it.
            use: reads and checks.
            keep: a copy that is missing here or damaged is replaced by one from another host, if there is room.

        Raises:
            CorruptCheckpointError: no good copy is left.
            CheckpointError: durable storage does not answer; or `use` raised it, and no copy is to blame.
        """
        sources = self.sources(found, shard)
        self._kept = {shard} if keep else set()
        if self._own not in sources:
            self._keep(shard, sources, None)
        return read_good_copies({shard: sources}, self, lambda readers: use(readers[shard]))

    def open_at(self, shard: ShardId, source: ShardSource) -> ShardReader:
        """See `ShardAccess`; from another host or durable storage only the parts that are read are fetched."""
        if self._copies is not None and source.place:
            return self._copies.open(shard)
        if source != self._own:
            return open_remote(shard, partial(self._client(source.rank).read, str(shard)))
        return self.folders.tier.open(shard.name, shard.rank)

    def skip(self, shard: ShardId, sources: list[ShardSource], error: CheckpointError) -> tuple[str, bool]:
        """See `ShardAccess`; what this host cannot read, or no other host gives, is as good as damaged.

        Raises:
            CorruptCheckpointError: it is to be replaced, and nobody has a good copy.
        """
        bad = sources.pop(0)
        text = f"{described(shard)} is of no use at {bad}: {error}"
        log.warning("%s", text)
        self._keep(shard, sources, error)
        return text, bad == self._own or isinstance(error, (CorruptCheckpointError, ReplicationError))

    def _keep(self, shard: ShardId, sources: list[ShardSource], why: CheckpointError | None) -> None:
        """Has the shard here, if it is to be kept, and was not fetched before."""
        if shard not in self._kept:
            return
        self._kept.remove(shard)
        try:
            self.folders.fetch(shard, sources, instead_of=why)
            sources.insert(0, self._own)
        except CorruptCheckpointError:
            raise  # nobody has a good one
        except CheckpointError as error:
            log.warning("%s cannot be kept on this host, and is read where it is: %s", described(shard), error)
