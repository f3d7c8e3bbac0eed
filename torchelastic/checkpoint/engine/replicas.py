"""Copies of each shard in the memory of other hosts, so that a checkpoint in memory outlives one of them."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torchelastic.checkpoint.engine.group_folders import Bad, GroupFolders, Pull, folder_id
from torchelastic.checkpoint.engine.restorer import shards_of
from torchelastic.checkpoint.replicas.placement import partners
from torchelastic.checkpoint.replicas.receive import Destination
from torchelastic.checkpoint.replicas.replica_client import ReplicaClient, Transferred
from torchelastic.checkpoint.replicas.replica_server import ReplicaServer
from torchelastic.checkpoint.store.memory_tier import MemoryTier
from torchelastic.checkpoint.store.restore_plan import Candidate, ShardSource
from torchelastic.checkpoint.store.save_id import ShardId
from torchelastic.checkpoint.store.tier import SealedShard, Tier
from torchelastic.group.peers import Peers
from torchelastic.group.rank_group import run_with_peers

log = logging.getLogger(__name__)


class Replicas:
    """Receives the shards of others into this host's memory tier, and gives its own away.

    Args:
        tier: whose shelf it fills.
        copies: on how many other hosts each shard is to be.
        host: names this host; ranks that give the same name are lost together.
        timeout_s: how long a peer may be silent.
    """

    def __init__(self, tier: MemoryTier, copies: int, host: str | None = None, timeout_s: float = 10.0) -> None:
        self.tier = tier
        self._copies = copies
        self._host = host or socket.gethostname()
        self._timeout_s = timeout_s
        self._token = ""
        self._server: ReplicaServer | None = None
        self._partners: dict[int, ReplicaClient] = {}

    def enter_group(self, peers: Peers, grace_s: float) -> None:
        """Agree with all ranks on who receives what; on the training thread of every rank.

        Args:
            peers: the new group.
            grace_s: how long what is given to partners of the group before may still take.
        """
        offered = peers.all_gather([self._token, secrets.token_hex(32)])
        token = next((known for known, _ in offered if known), offered[0][1])
        self._serve(token, peers.address)
        assert self._server is not None
        said = peers.all_gather([self._host, *self._server.address])
        for client in self._partners.values():
            client.end(grace_s)
        chosen = partners([host for host, _, _ in said], peers.rank, self._copies)
        if len(chosen) < self._copies:
            log.warning("each shard gets %d replica(s) and not %d: there are too few hosts", len(chosen), self._copies)
        self._partners = {
            rank: ReplicaClient((said[rank][1], said[rank][2]), token, timeout_s=self._timeout_s) for rank in chosen
        }

    def fence(self, round_number: int) -> None:
        """Take nothing any more that older groups push; in the background."""
        if self._server is not None:
            self._server.fence(round_number)

    def make_again(self, restored: Candidate, peers: Peers, pull: Pull, bad: Bad) -> None:
        """A checkpoint was restored: what it has lost with a host in memory is fetched. On the thread that trains.

        Shards that are in no host's memory any more stay where they are, in another tier. What cannot be made costs a
        warning; the next save makes its own.

        Args:
            restored: where its shards are.
            peers: all of them call it.
            pull: fetches a shard from a tier of another rank.
            bad: what this rank has found to be of no use in its tier, and why.

        Raises:
            RuntimeError: a peer is lost.
        """
        tier, rank, shards = self.tier, peers.rank, shards_of(restored)
        damaged = [shard.rank for shard in shards if shard in bad]
        said = peers.all_gather([self._host, folder_id(tier, rank), damaged])
        hosts, roots = [host for host, *_ in said], [root for _, root, _ in said]
        found_bad = {(root, shard) for _, root, each in said for shard in each}
        sources = {
            shard: good
            for shard, each in _sources_in(restored, tier.name).items()
            if (good := [source for source in each if (roots[source.rank], shard) not in found_bad])
        }
        partners_of = [partners(hosts, other, self._copies) for other in range(peers.world_size)]

        def pull_there(shard: ShardId, source: ShardSource, into: Destination) -> Transferred:
            return pull(shard, replace(source, place=tier.name), into)

        folders = GroupFolders(tier, rank, roots, hosts, partners_of, pull_there)
        lost = folders.lost(sources, own_too=True)
        if not lost:
            return
        again = partial(folders.make_again, shards, sources, lost.get(rank, ()), bad=bad)
        run_with_peers(peers, f"making lost replicas of {restored.save} again", again)
        peers.barrier()  # nobody trains, and may be lost, before all have what they should

    def push(self, shard: SealedShard) -> None:
        """Give the shard to each partner. Raises: ReplicationError (the first), after all have been tried."""
        failed: list[Exception] = []
        object_id = str(ShardId(shard.name, shard.rank, shard.world_size))
        for rank, client in self._partners.items():
            try:
                client.push(object_id, shard.data, token_round=shard.name.round)
            except Exception as error:  # noqa: BLE001 - another partner may be better off
                because = str(error) or type(error).__name__
                log.warning("rank %d has not taken its replica of %s: %s", rank, object_id, because)
                failed.append(error)
        if failed:
            raise failed[0]

    def close(self) -> None:
        """Stop serving; what was received stays."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _serve(self, token: str, address: str) -> None:
        if self._server is not None and token == self._token:
            return
        self.close()
        self._token = token
        self._server = ReplicaServer(self.tier.shelf, token, host=address, timeout_s=self._timeout_s)
        self._server.start()


def _sources_in(restored: Candidate, tier: str) -> dict[int, list[ShardSource]]:
    """Where the shards are that lie in a tier in memory, as `lost_copies` takes it: without the place."""
    there = {
        shard: [ShardSource(one.rank) for one in each if one.place == tier] for shard, each in restored.sources.items()
    }
    return {shard: each for shard, each in there.items() if each}


def replicas_of(tiers: Sequence[Tier], copies: int, host: str | None) -> Replicas | None:
    """The copies of the first memory tier; None where there are to be none.

    Args:
        tiers: of one manager.
        copies: on how many other hosts.
        host: see `Replicas`.

    Raises:
        ValueError: copies of a memory tier that is not there.
    """
    memory = next((tier for tier in tiers if isinstance(tier, MemoryTier)), None)
    if copies < 0 or (copies and memory is None):
        raise ValueError(
            f"replicas is {copies}: give 0, or how many copies there are to be of a MemoryTier among tiers"
        )
    return Replicas(memory, copies, host) if copies and memory is not None else None
