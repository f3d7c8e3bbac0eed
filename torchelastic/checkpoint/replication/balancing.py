"""Which ranks receive the copies that are missing, so that the one that receives most receives least. Pure.

How many bytes travel in all is settled before (each shard's copies are chosen independently); this is only about the
peak. That is scheduling on parallel machines with eligibility, which is NP-hard: largest first for a start, then moves
away from the peak, then a bounded branch and bound, which says whether it came to an end.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: With more copies than this, largest first has to do: the search would hardly get anywhere.
MOST_SEARCHED_COPIES = 64


@dataclass(frozen=True)
class Need:
    """A shard that lacks copies.

    Attributes:
        size_bytes: its size.
        copies: how many it lacks.
        domains: where it is already; each new copy goes to a domain of its own that is not among these.
    """

    size_bytes: int
    copies: int
    domains: frozenset[str]


@dataclass(frozen=True)
class Assignment:
    """Who receives what.

    Attributes:
        receivers: for each need, the ranks that receive it.
        is_least: whether no assignment has a lower peak; False if the search was cut off before it was sure.
    """

    receivers: tuple[tuple[int, ...], ...]
    is_least: bool


def assign(needs: Sequence[Need], domain_of: Mapping[int, str], *, most_nodes: int) -> Assignment:
    """Chooses receivers; deterministic.

    Args:
        needs: what lacks copies. There must be enough domains for each.
        domain_of: the domain of each rank that may receive.
        most_nodes: how many steps the search for a lower peak may take; 0 for largest first alone.
    """
    largest_first = sorted(range(len(needs)), key=lambda index: (-needs[index].size_bytes, index))
    ordered = [needs[index] for index in largest_first]
    chosen = _Relief(_largest_first(ordered, domain_of), ordered, domain_of).run()
    search = _Search(ordered, domain_of, chosen, most_nodes)
    search.run()
    receivers: list[tuple[int, ...]] = [()] * len(needs)
    for index, ranks in zip(largest_first, search.best, strict=True):
        receivers[index] = ranks
    return Assignment(tuple(receivers), is_least=search.is_finished)


def _largest_first(needs: Sequence[Need], domain_of: Mapping[int, str]) -> list[tuple[int, ...]]:
    """Each need in turn goes to those that have least so far, of equals to the lowest rank."""
    heap = [(0, rank) for rank in sorted(domain_of)]
    chosen = []
    for need in needs:
        taken = set(need.domains)
        ranks: list[int] = []
        seen = []
        while len(ranks) < need.copies:
            load, rank = heapq.heappop(heap)
            fits = domain_of[rank] not in taken
            seen.append((load + need.size_bytes * fits, rank))
            if fits:
                taken.add(domain_of[rank])
                ranks.append(rank)
        for entry in seen:
            heapq.heappush(heap, entry)
        chosen.append(tuple(ranks))
    return chosen


class _Relief:
    """Moves copies away from whoever receives most, as long as that helps: the last ones may have had little choice."""

    def __init__(self, chosen: list[tuple[int, ...]], needs: Sequence[Need], domain_of: Mapping[int, str]) -> None:
        self._needs, self._domain_of = needs, domain_of
        self._ranks = [list(ranks) for ranks in chosen]
        self._received: dict[int, list[int]] = {rank: [] for rank in sorted(domain_of)}
        for index, ranks in enumerate(self._ranks):
            for rank in ranks:
                self._received[rank].append(index)
        self._load = {rank: sum(map(self._size, indices)) for rank, indices in self._received.items()}

    def run(self) -> list[tuple[int, ...]]:
        """The assignment when no move, and no move that makes room for another one, lowers the peak any more."""
        for _ in range(sum(map(len, self._ranks))):
            busiest = max(self._load, key=lambda rank: (self._load[rank], -rank))
            by_load = sorted(self._load, key=lambda rank: (self._load[rank], rank))
            if not self._move_away(busiest, by_load) and not self._make_room(busiest, by_load[0]):
                break
        return [tuple(ranks) for ranks in self._ranks]

    def _move_away(self, busiest: int, by_load: Sequence[int]) -> bool:
        for index in sorted(self._received[busiest], key=self._size):
            free = next((rank for rank in by_load if self._may_go(index, busiest, rank)), busiest)
            if self._load[free] + self._size(index) < self._load[busiest]:
                self._move(index, busiest, free)
                return True
        return False

    def _make_room(self, busiest: int, idle: int) -> bool:
        """What cannot go to the idlest rank goes to another one, which gives something else to the idlest."""
        peak = self._load[busiest]
        for index in self._received[busiest]:
            for between, others in self._received.items():
                if between == busiest or not self._may_go(index, busiest, between):
                    continue
                for other in others:
                    fits = self._load[idle] + self._size(other) < peak and self._may_go(other, between, idle)
                    if fits and self._load[between] - self._size(other) + self._size(index) < peak:
                        self._move(other, between, idle)
                        self._move(index, busiest, between)
                        return True
        return False

    def _may_go(self, index: int, source: int, target: int) -> bool:
        if self._domain_of[target] in self._needs[index].domains:
            return False
        return all(self._domain_of[rank] != self._domain_of[target] for rank in self._ranks[index] if rank != source)

    def _move(self, index: int, source: int, target: int) -> None:
        self._ranks[index][self._ranks[index].index(source)] = target
        self._received[source].remove(index)
        self._received[target].append(index)
        self._load[source] -= self._size(index)
        self._load[target] += self._size(index)

    def _size(self, index: int) -> int:
        return self._needs[index].size_bytes


class _Search:
    """Depth first over all assignments, cut where the peak cannot fall below the best one known."""

    def __init__(
        self, needs: Sequence[Need], domain_of: Mapping[int, str], start: list[tuple[int, ...]], most_nodes: int
    ) -> None:
        self.best = start
        self.is_finished = False
        self._domain_of = domain_of
        self._nodes_left = most_nodes
        # one item for each copy; the copies of one need stand next to each other
        self._items = [(index, need) for index, need in enumerate(needs) for _ in range(need.copies)]
        self._load = dict.fromkeys(sorted(domain_of), 0)
        for ranks, need in zip(start, needs, strict=True):
            for rank in ranks:
                self._load[rank] += need.size_bytes
        self._peak = max(self._load.values(), default=0)
        self._load = dict.fromkeys(self._load, 0)
        total = sum(need.size_bytes for _, need in self._items)
        largest = max((need.size_bytes for _, need in self._items), default=0)
        self._least_conceivable = max(largest, -(-total // max(1, len(self._load))))
        self._path: list[int] = []

    def run(self) -> None:
        """Improves `best` until nothing better is left, or until the steps are used up."""
        if len(self._items) > MOST_SEARCHED_COPIES:
            self._nodes_left = 0
        try:
            self._descend()
        except _OutOfStepsError:
            return
        self.is_finished = True

    def _descend(self) -> None:
        if self._peak <= self._least_conceivable:
            return
        position = len(self._path)
        if position == len(self._items):
            self._peak = max(self._load.values())
            self._keep()
            return
        index, need = self._items[position]
        for rank in self._choices(position, index, need):
            if self._load[rank] + need.size_bytes >= self._peak:
                continue  # no better than what we have (asked anew: the peak may have fallen meanwhile)
            if self._nodes_left <= 0:
                raise _OutOfStepsError
            self._nodes_left -= 1
            self._load[rank] += need.size_bytes
            self._path.append(rank)
            self._descend()
            self._path.pop()
            self._load[rank] -= need.size_bytes

    def _choices(self, position: int, index: int, need: Need) -> list[int]:
        """Ranks worth trying. Ranks of one domain with equal load, and orders of equal copies, are tried once."""
        follows_its_twin = position > 0 and self._items[position - 1][0] == index
        after = self._domain_of[self._path[-1]] if follows_its_twin else ""
        by_kind: dict[tuple[int, str], int] = {}
        for rank, load in self._load.items():
            domain = self._domain_of[rank]
            if domain not in need.domains and domain > after:
                by_kind.setdefault((load, domain), rank)
        return [by_kind[kind] for kind in sorted(by_kind)]

    def _keep(self) -> None:
        ranks: list[list[int]] = [[] for _ in self.best]
        for (index, _), rank in zip(self._items, self._path, strict=True):
            ranks[index].append(rank)
        self.best = [tuple(one) for one in ranks]


class _OutOfStepsError(Exception):
    """The search has taken as many steps as it may."""
