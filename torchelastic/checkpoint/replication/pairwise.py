"""Pairs of hosts that keep each other's objects: ML Flashpoint's strategy, for any number of hosts. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class PairwiseReplicationStrategy:
    """The partner of a rank is the rank of the same place on the other host of its pair.

    Hosts 0 and 1 are a pair, 2 and 3, and so on. If their number is odd, each of the last three gives to the next of
    the three. A single host has no partner.

    Args:
        addresses: of the replica servers ("host:port"), by rank; the ranks of a host are neighbours.
        processes_per_node: how many ranks a host has.

    Raises:
        ValueError: there are no addresses, or their number is no multiple of `processes_per_node`.
    """

    def __init__(self, addresses: Sequence[str], processes_per_node: int) -> None:
        if not addresses:
            raise ValueError("addresses is empty: give the address of each rank's server")
        if processes_per_node < 1 or len(addresses) % processes_per_node:
            raise ValueError(
                f"{len(addresses)} addresses are no multiple of processes_per_node={processes_per_node}: every host "
                "has to have as many ranks as the others; without repl_strategy that is not needed"
            )
        self._addresses = list(addresses)
        self._per_host = processes_per_node

    def get_replication_service_addresses(self) -> list[str]:
        """The addresses, by rank."""
        return list(self._addresses)

    def get_destination_ranks(self, global_rank: int) -> list[int]:
        """Who receives the objects of a rank.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= global_rank < len(self._addresses):
            raise ValueError(f"there is no rank {global_rank} among {len(self._addresses)}")
        hosts = len(self._addresses) // self._per_host
        host, place = divmod(global_rank, self._per_host)
        if hosts == 1:
            return []
        ring = hosts - 3 if hosts % 2 else hosts  # where the last three begin
        partner = host ^ 1 if host < ring else ring + (host - ring + 1) % 3
        return [partner * self._per_host + place]

    def get_destination_addresses(self, global_rank: int) -> list[str]:
        """The addresses of `get_destination_ranks`."""
        return [self._addresses[rank] for rank in self.get_destination_ranks(global_rank)]
