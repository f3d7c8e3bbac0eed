"""How a group finds the newest checkpoint that it can put together, and how each rank gets the shards that it wants.

All ranks say what they can read and compute the same plan. Each reads what it wants where that is nearest: in its own
tiers, else it fetches the bytes from a rank that has them in its. What proves damaged there is read elsewhere; if there
is no other copy, all agree on an older checkpoint.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torchelastic.checkpoint.engine.group_folders import give_manifest
from torchelastic.checkpoint.engine.read_rules import ReadRule
from torchelastic.checkpoint.engine.replicas import Replicas
from torchelastic.checkpoint.engine.restorer import Restorer, open_remote, read_good_copies, shards_of
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.format.shard_reader import ShardReader
from torchelastic.checkpoint.replicas.receive import Destination
from torchelastic.checkpoint.replicas.replica_client import ReplicaClient, Transferred
from torchelastic.checkpoint.replicas.replica_server import ReplicaServer
from torchelastic.checkpoint.replicas.replication_errors import CorruptReplicaError, NoReplicasAvailableError
from torchelastic.checkpoint.store.folder_tier import FolderTier
from torchelastic.checkpoint.store.restore_plan import Candidate, ShardSource, candidates, lacks, plan_reads
from torchelastic.checkpoint.store.rewinds import Rewind, counts, how_to_undo
from torchelastic.checkpoint.store.save_id import SaveId, ShardId
from torchelastic.checkpoint.store.tier import Tier, TierEntry
from torchelastic.group.peers import Peers
from torchelastic.group.rank_group import run_with_peers

log = logging.getLogger(__name__)

#: So many ranks may fetch from one at once, or all others if there are more.
_LEAST_TRANSFERS = 16
#: For how long a rank is tried again to which the connection broke.
_RETRY_S = 1.0


@dataclass(frozen=True)
class Restored:
    """What was found.

    Attributes:
        name: which checkpoint it is.
        tiers: where its shards were read.
        kind: what the writer said that it is.
        content: what `ReadRule.take` made of the shards that this rank wanted; None if it wanted none.
    """

    name: SaveId
    tiers: tuple[str, ...]
    kind: str | None
    content: Any


class TieredRestore:
    """One restore, and a `ShardAccess`; every rank of a group has one and calls `run`, on the training thread.

    Args:
        tiers: freshest first, the same on all ranks.
        peers: the group.
        reading: who wants which shard, and what becomes of them.
        on_damage: called with each place that cannot be read and each checkpoint that is passed over, in words; on
            every rank alike. None: rank 0 logs it.
        replicas: of the tier in memory; None: there are none.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        peers: Peers,
        reading: ReadRule,
        on_damage: Callable[[str], None] | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        self._tiers = {tier.name: tier for tier in tiers}
        self._peers = peers
        self._reading = reading
        self._replicas = replicas
        self._on_damage = self._log_damage if on_damage is None else on_damage
        self._restorer = Restorer(peers.rank, partial(run_with_peers, peers))
        self._servers: Sequence[Sequence[Any] | None] = []  # of each rank: host, port and token, if it has one
        self._bad: dict[ShardId, CheckpointError] = {}  # copies that have replicas, as this rank has found in its tier

    def run(self) -> Restored | None:
        """Find the newest checkpoint that is intact.

        Returns:
            The same on all ranks, but for the content; None if there is no checkpoint at all.

        Raises:
            CorruptCheckpointError: there are checkpoints, and none is complete and intact; on every rank.
            CheckpointError: something cannot be read for another reason; on every rank.
            RuntimeError: a peer is lost.
        """
        with ExitStack() as serving:
            inventories, rewinds, unreadable = self._exchange(serving)
            for text in unreadable:
                self._on_damage(f"a newer checkpoint may lie where nothing can be read: {text}")
            found = candidates(inventories)
            restored = self._restorer.newest(self._counting(found, rewinds), self.restore_one, self._on_damage)
            if restored is not None:
                self._make_whole(restored[0], inventories[self._peers.rank])
        if restored is not None:
            return restored[1]
        if self._restorer.faults:
            undo = how_to_undo(rewinds, [one.save for one in found])
            raise CorruptCheckpointError(
                f"no checkpoint can be loaded, and nothing was changed: {self._restorer.because()}. "
                f"Restore one of them from a copy{f', or {undo}' if undo else ''}; to start from scratch, move away "
                f"what lies in {self._places()}"
            )
        if unreadable:
            raise CheckpointError(f"cannot list checkpoints: {'; '.join(unreadable)}")
        return None

    def _counting(self, found: Sequence[Candidate], rewinds: Sequence[Rewind]) -> list[Candidate]:
        """Those of which this restore may be. Raises: CheckpointError if there are some, and none counts any more."""
        counting = [one for one in found if counts(one.save, rewinds)]
        if undo := how_to_undo(rewinds, [one.save for one in found]):
            told = f"{len(found) - len(counting)} checkpoint(s) do not count: the run was rewound"
            if not any(one.is_committed for one in counting):
                raise CheckpointError(
                    f"{told}, and there is no older one in {self._places()}: {undo}; to start from scratch, move away "
                    "what lies there"
                )
            if self._peers.rank == 0:
                log.info("%s (%s)", told, rewinds[0].file_name)
        at_most = self._reading.at_most
        return [one for one in counting if at_most is None or one.save.step <= at_most]

    def _exchange(self, serving: ExitStack) -> tuple[list[list[TierEntry]], list[Rewind], list[str]]:
        """What each rank can read in which tier, what does not count, and what is unreadable; serves from now on."""

        def mine() -> tuple[list[TierEntry], list[Any]]:
            entries, names, unreadable = [], [], []
            for name, tier in self._tiers.items():
                if tier.is_shared and self._peers.rank != 0:
                    continue  # rank 0 reads it for all
                try:
                    entries += [replace(entry, place=name) for entry in tier.inventory()]
                    names += [rewind.file_name for rewind in tier.rewinds()]
                except CheckpointError as error:
                    unreadable.append(f"rank {self._peers.rank}, {name} tier: {error}")
            return entries, [unreadable, self._serve(serving), names]

        inventories, told = self._restorer.look("looking for checkpoints", mine)
        self._servers = [server for _, server, _ in told]
        if self._reading.is_on_every_rank:  # rank 0 has only looked for all: each reads what it wants
            shared = [entry for entry in inventories[0] if self._tiers[entry.place].is_shared]
            inventories[1:] = [[*inventory, *shared] for inventory in inventories[1:]]
        rewinds = Rewind.all_in({name for *_, names in told for name in names})
        for tier in self._tiers.values():
            tier.seen_rewinds = rewinds
        return inventories, rewinds, [text for texts, *_ in told for text in texts]

    def _serve(self, serving: ExitStack) -> list[Any] | None:
        """Gives away what lies in the tiers of this rank; None where nobody else needs that."""
        if self._peers.world_size == 1 or all(tier.is_shared for tier in self._tiers.values()):
            return None
        token, transfers = secrets.token_hex(32), max(_LEAST_TRANSFERS, self._peers.world_size)
        try:
            server = ReplicaServer(
                _TierShards(list(self._tiers.values())),
                token,
                host=self._peers.address,
                max_transfers=transfers,
                max_connections=2 * transfers,
            )
        except OSError as error:
            log.warning("what lies on this host cannot be given to others, at %s: %s", self._peers.address, error)
            return None
        server.start()
        serving.callback(server.close)
        return [*server.address, token]

    def _log_damage(self, text: str) -> None:
        if self._peers.rank == 0:
            log.warning("%s", text)

    def _make_whole(self, restored: Candidate, own: Sequence[TierEntry]) -> None:
        """What the places of the hosts have lost of a checkpoint they get again; what they do not get is named."""
        if self._replicas is not None:
            self._replicas.make_again(restored, self._peers, self._pull, self._bad)
        given = set()
        for tier in self._tiers.values():
            has_some = any(source.place == tier.name for each in restored.sources.values() for source in each)
            if isinstance(tier, FolderTier) and not tier.is_shared and has_some:
                share = partial(run_with_peers, self._peers, f"the manifest of {restored.save} in the {tier.name} tier")
                if give_manifest(tier, restored.save, self._peers.rank, share):
                    given.add(tier.name)
        own = [replace(entry, is_committed=entry.is_committed or entry.place in given) for entry in own]
        made_again = {self._replicas.tier.name} if self._replicas is not None else set()
        private = {tier.name for tier in self._tiers.values() if not tier.is_shared} - made_again
        for text in lacks(restored, own, private, self._peers.rank, self._peers.world_size):
            log.warning("%s", text)

    # --- one checkpoint -----------------------------------------------------------------------------------------------

    def restore_one(self, candidate: Candidate) -> Restored:
        """Read this checkpoint, from whatever copies are intact. Raises as `run`."""
        content: Any = None

        def read() -> list[Any]:
            nonlocal content
            content, *told = self._read_own(candidate, self._plan(candidate).get(self._peers.rank, {}))
            return told

        told = run_with_peers(self._peers, f"restoring {candidate.save}", read)
        kind = next((kind for kind, _ in told if kind is not None), None)
        tiers = sorted({tier for _, each in told for tier in each})
        return Restored(candidate.save, tuple(tiers), kind, content)

    def _plan(self, candidate: Candidate) -> Mapping[int, Mapping[int, Sequence[ShardSource]]]:
        """Where each rank reads what it wants, best first."""
        order = list(self._tiers)

        def distance(reader: int, source: ShardSource) -> tuple[int, bool]:
            return order.index(source.place), source.rank != reader

        plan_of = partial(plan_reads, candidate.sources, distance=distance)
        wanted = self._reading.wanted(list(candidate.sources), self._peers.world_size)
        if wanted is not None:
            return plan_of(wanted)
        # what stays with whoever reads it is best read by the rank of its own number
        nearest = plan_of({shard: [shard] for shard in candidate.sources})
        staying: dict[int, list[int]] = {}
        for shard, sources in nearest.items():
            staying.setdefault(sources[shard][0].rank, []).append(shard)
        return plan_of(staying)

    def _read_own(
        self, candidate: Candidate, wanted: Mapping[int, Sequence[ShardSource]]
    ) -> tuple[Any, str | None, list[str]]:
        """What this rank wants: what became of it, its kind if that was among what was read, and where it was read.

        Raises:
            CheckpointError: it cannot be had, or is nothing that could be loaded.
        """
        left = {shards_of(candidate)[shard]: list(wanted[shard]) for shard in sorted(wanted)}
        if not left:
            return None, None, []

        def take(shards: Mapping[ShardId, ShardReader]) -> tuple[Any, str | None]:
            stated = (shard for shard in shards.values() if shard.header.structure is not None)
            kind = next((str(shard.header.meta.get("kind", "")) for shard in stated), None)
            try:
                return self._reading.take(list(shards.values())), kind
            except CheckpointError as error:
                if any(shard.failure for shard in shards.values()):
                    raise
                raise CheckpointError(f"rank {self._peers.rank}: {error}") from error

        content, kind = read_good_copies(left, self, take)
        return content, kind, sorted({sources[0].place for sources in left.values()})

    def open_at(self, shard: ShardId, source: ShardSource) -> ShardReader:
        """See `ShardAccess`."""
        if source.rank == self._peers.rank:
            return self._tiers[source.place].open(shard.name, shard.rank)
        client, object_id = self._served(shard, source)
        return open_remote(shard, partial(client.read, object_id))

    def skip(self, shard: ShardId, sources: list[ShardSource], error: CheckpointError) -> tuple[str, bool]:
        """See `ShardAccess`; what is damaged in a shared place is so for whoever reads it."""
        bad, is_damage = sources.pop(0), isinstance(error, CorruptCheckpointError)
        if is_damage and self._tiers[bad.place].is_shared:
            sources[:] = [source for source in sources if source.place != bad.place]
        if self._replicas is not None and bad == ShardSource(self._peers.rank, self._replicas.tier.name):
            self._bad[shard] = error
        text = f"shard {shard.rank} in the {bad.place} tier of rank {bad.rank}: {error}"
        log.warning("%s: %s", shard.name, text)
        return text, is_damage

    def _pull(self, shard: ShardId, source: ShardSource, destination: Destination) -> Transferred:
        client, object_id = self._served(shard, source)
        return client.pull(object_id, destination)

    def _served(self, shard: ShardId, source: ShardSource) -> tuple[ReplicaClient, str]:
        """Whom to ask for a shard, and what it is called there."""
        server = self._servers[source.rank] if self._servers else None
        if server is None:
            raise NoReplicasAvailableError(f"rank {source.rank} cannot be reached from here")
        host, port, token = server
        # one that has died is not waited for: the group breaks, and restores anew
        client = ReplicaClient((str(host), int(port)), str(token), retry_s=_RETRY_S)
        number = list(self._tiers).index(source.place)
        return client, f"{number}/{shard}"

    def _places(self) -> str:
        return ", ".join(tier.where for tier in self._tiers.values())


class _TierShards:
    """A `ReplicaStore` of what lies in tiers, which takes nothing.

    Args:
        tiers: an object is named by the number of one and a shard.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tiers

    def destination(self, object_id: str, size_bytes: int) -> memoryview:
        """See `ReplicaStore`."""
        raise ValueError(f"{object_id} ({size_bytes} bytes) is not wanted: this host is restoring a checkpoint")

    def received(self, object_id: str, digest: str) -> None:
        """Never called."""

    def abort(self, object_id: str) -> None:
        """Never called."""

    def source(self, object_id: str) -> memoryview | None:
        """See `ReplicaStore`."""
        number, _, rest = object_id.partition("/")
        try:
            shard = ShardId.parse(rest)
            with self._tiers[int(number)].open(shard.name, shard.rank) as opened:
                return opened.view()  # keeps the file
        except (ValueError, IndexError):
            return None
        except CorruptCheckpointError as error:
            raise CorruptReplicaError(str(error)) from error
        except CheckpointError as error:
            raise NoReplicasAvailableError(str(error)) from error

    def digest(self, object_id: str) -> None:
        """See `ReplicaStore`: the shard has checksums of its own."""

    def ids(self) -> list[str]:
        """See `ReplicaStore`: all ranks have said already what they have."""
        return []
