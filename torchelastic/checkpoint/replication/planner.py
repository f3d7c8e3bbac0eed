"""Which copies are missing so that hosts may be lost, who makes them and who gets them. Pure.

In plain data parallelism every live rank already is a copy: nothing is planned. Sharded state is copied only as far as
no other host holds it.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic

from torchelastic.checkpoint.replication.exchange import Id
from torchelastic.checkpoint.replication.placement import FailureDomains


@dataclass(frozen=True)
class Copy(Generic[Id]):
    """One shard to be copied from a rank that holds it to one that does not."""

    sender: int
    receiver: int
    shard: Id
    size_bytes: int


def missing_copies(held: Mapping[int, Mapping[Id, int]], domains: FailureDomains, *, losses: int) -> list[Copy[Id]]:
    """Plans the fewest bytes after which any `losses` hosts may be lost and every shard is left somewhere.

    A shard survives every such loss exactly if `losses` + 1 hosts hold it, so each lacks a number of copies of its own
    and the sum is the least there is. The largest shards are placed first, each copy with the rank that receives least
    so far; senders take turns.

    Args:
        held: for each rank the shards that it holds, with their sizes in bytes.
        domains: where the ranks are. Those that hold nothing may receive.
        losses: how many hosts may be lost at once. With fewer hosts than that and one more, each gets a copy: a job
            that goes on with one host must not fail over this.

    Returns:
        The copies, sorted by receiver and shard.
    """
    host_of = domains.domain_of()
    hosts_wanted = min(losses + 1, len(set(host_of.values())))
    sizes = {shard: size_bytes for shards in held.values() for shard, size_bytes in shards.items()}
    holders = {shard: [rank for rank in sorted(held) if shard in held[rank]] for shard in sizes}
    received = [(0, rank) for rank in sorted(host_of)]  # a heap: who has received least is first
    receivers: dict[Id, list[int]] = {}
    for shard in sorted(sizes, key=lambda shard: (-sizes[shard], shard)):
        hosts = {host_of[rank] for rank in holders[shard]}
        receivers[shard] = []
        passed_over = []
        while len(hosts) < hosts_wanted:
            received_bytes, rank = heapq.heappop(received)
            if host_of[rank] not in hosts:
                hosts.add(host_of[rank])
                receivers[shard].append(rank)
                received_bytes += sizes[shard]
            passed_over.append((received_bytes, rank))
        for entry in passed_over:
            heapq.heappush(received, entry)
    return _with_senders(receivers, holders, sizes)


def _with_senders(
    receivers: Mapping[Id, list[int]], holders: Mapping[Id, list[int]], sizes: Mapping[Id, int]
) -> list[Copy[Id]]:
    """Those with the fewest holders first, then the largest; each from the holder that has sent least."""
    sent: dict[int, int] = {}
    copies: list[Copy[Id]] = []
    for shard in sorted(receivers, key=lambda shard: (len(holders[shard]), -sizes[shard], shard)):
        for receiver in receivers[shard]:
            sender = min(holders[shard], key=lambda rank: (sent.get(rank, 0), rank))
            sent[sender] = sent.get(sender, 0) + sizes[shard]
            copies.append(Copy(sender, receiver, shard, sizes[shard]))
    return sorted(copies, key=lambda copy: (copy.receiver, copy.shard))
