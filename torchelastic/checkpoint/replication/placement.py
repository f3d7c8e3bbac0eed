"""Where the members are, and cliques across failure domains. Pure: the same roster gives the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torchelastic.group.naming import listed

Level = Literal["host", "rack", "slice"]
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True, order=True)
class Member:
    """One rank and the domains that it fails with.

    Attributes:
        rank: its rank in the roster.
        host: the machine it runs on.
        rack: what shares power or a switch with that machine; empty if nobody said so.
        slice: what is taken away together with it (a TPU slice, an NVLink domain, a spot pool); empty if unknown.
    """

    rank: int
    host: str
    rack: str = ""
    slice: str = ""


@dataclass(frozen=True)
class FailureDomains:
    """Which members fail together. Make one with `from_roster`; `members` are sorted by rank."""

    members: tuple[Member, ...]

    @classmethod
    def from_roster(
        cls,
        roster: Iterable[tuple[int, str]],
        *,
        racks: Mapping[str, str] | None = None,
        slices: Mapping[str, str] | None = None,
    ) -> FailureDomains:
        """Builds the domains of a roster.

        Args:
            roster: pairs (rank, host).
            racks: the rack of each host, if known.
            slices: the slice of each host, if known.

        Raises:
            ValueError: the roster is empty, or a rank is named twice.
        """
        racks, slices = racks or {}, slices or {}
        members = sorted(Member(rank, host, racks.get(host, ""), slices.get(host, "")) for rank, host in roster)
        ranks = [member.rank for member in members]
        if not ranks:
            raise ValueError("the roster is empty; give at least one (rank, host)")
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1}) if len(set(ranks)) < len(ranks) else []
        if twice:
            raise ValueError(f"in the roster twice: {listed(twice)}; each rank runs on one host")
        return cls(tuple(members))

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, sorted."""
        return tuple(member.rank for member in self.members)

    def groups(self, level: Level = "host") -> dict[str, tuple[int, ...]]:
        """The ranks of each domain of a level; both sorted.

        Raises:
            ValueError: the level is unknown, or members have no label of it.
        """
        if level not in LEVELS:
            raise ValueError(f"{level!r} is no level of failure domains; choose one of {', '.join(LEVELS)}")
        unlabelled = [member.rank for member in self.members if not getattr(member, level)]
        if unlabelled:
            raise ValueError(
                f"no {level} is known of {listed(unlabelled)}: label their hosts (FailureDomains.from_roster(.., "
                f'{level}s=..)) or place across level "host"'
            )
        found: dict[str, list[int]] = {}
        for member in self.members:
            found.setdefault(getattr(member, level), []).append(member.rank)
        return {name: tuple(found[name]) for name in sorted(found)}

    def domain_of(self, level: Level = "host") -> dict[int, str]:
        """The domain of each rank at a level; raises as `groups` does."""
        return {rank: name for name, ranks in self.groups(level).items() for rank in ranks}

    def pairs(self, level: Level = "host") -> list[list[int]]:
        """Cliques of two across a level (one of three if the number of ranks is odd); see `cliques_across`.

        Of N members in pairs any two losses leave a copy of everything but for (N/2) of C(N, 2) choices; in a ring of
        neighbours, with as many copies, but for N of them.
        """
        return self.cliques_across(2, level)

    def cliques_across(self, factor: int, level: Level = "host") -> list[list[int]]:
        """Cliques of at least `factor` ranks, no two of one clique in the same domain.

        Ranks are laid out domain by domain and cut into `factor` equal runs; the i-th of each run make a clique. So
        hosts of equal size are partners as a whole, which leaves few sets of hosts whose loss hurts. If the number of
        ranks is no multiple of the factor, some cliques have more members than asked for.

        Args:
            factor: how many ranks hold each shard.
            level: what no two members of a clique may share.

        Returns:
            The cliques, sorted by their lowest rank, each sorted; each rank is in exactly one.

        Raises:
            ValueError: there are too few ranks, one domain holds too many of them, or labels are missing.
        """
        groups = self.groups(level)
        if factor < 1:
            raise ValueError(f"the replication factor is {factor}; it must be at least 1")
        number = len(self.members) // factor
        if number < 1:
            raise ValueError(f"{len(self.members)} rank(s) cannot hold {factor} copies; lower the replication factor")
        largest = max(groups, key=lambda name: (len(groups[name]), name))
        if len(groups[largest]) > number:
            raise ValueError(
                f"{level} {largest!r} has {len(groups[largest])} of {len(self.members)} ranks, and {number} cliques of "
                f"{factor} with at most one rank of each {level} take {number} of them at most; spread the ranks over "
                f"more {level}s, lower the factor, or place across a narrower level"
            )
        laid_out = [rank for ranks in groups.values() for rank in ranks]
        return sorted(sorted(laid_out[first::number]) for first in range(number))


def partners(hosts: Sequence[str], rank: int, copies: int) -> list[int]:
    """The ranks on other hosts that receive a rank's shard. Pure; every rank computes the same plan.

    Where the ranks can be cut into cliques across hosts, its clique (see `FailureDomains.cliques_across`); else, with
    hosts of very different sizes, one rank on each of the next hosts by name.

    Args:
        hosts: the host of each rank.
        rank: whose shard it is.
        copies: how many are wanted; fewer are made if there are fewer other hosts.
    """
    factor = min(copies + 1, len(set(hosts)))
    domains = FailureDomains.from_roster(enumerate(hosts))
    try:
        cliques = domains.cliques_across(factor)
        return [other for clique in cliques if rank in clique for other in clique if other != rank]
    except ValueError:
        groups = domains.groups()
        names = list(groups)
        own = names.index(hosts[rank])
        following = (names[own + 1 :] + names[:own])[: factor - 1]
        place = groups[hosts[rank]].index(rank)
        return [groups[name][place % len(groups[name])] for name in following]
