"""What Lightning is told of the group: one process until it is formed, then rank and size of now.

Lightning forms its group when `fit` sets up. A worker that joins later would make the others wait for that group while
it loads its model. So it is told of one process while it is set up, in which its barriers and gathers do nothing, and
of the present group after each sync.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from torchelastic.processes.local_rank import local_rank_of


class ElasticEnvironment:
    """Of the workers that `torchelastic run` has started; a part of a `ClusterEnvironment` of Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self._world: tuple[int, int] | None = None
        self._is_first = False

    @property
    def creates_processes_externally(self) -> bool:
        """The launcher has started all workers."""
        return True

    @property
    def main_address(self) -> str:
        """Of no use: torchelastic forms the groups."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Of no use, either."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Never by itself."""
        return False

    def enter_group(self, rank: int, world_size: int) -> None:
        """A group has been formed; rank -1: this worker is in none."""
        self._world = (rank, world_size) if rank >= 0 else (self._number() + 1, 1)

    @contextmanager
    def said_to_be_first(self) -> Iterator[None]:
        """Within, this worker is told that it is the first one of all."""
        self._is_first = True
        try:
            yield
        finally:
            self._is_first = False

    def world_size(self) -> int:
        """Of the present group; 1 before there is one."""
        return 1 if self._world is None else self._world[1]

    def global_rank(self) -> int:
        """In the present group. Before it the first worker of a host is 0, unless it takes a lost one's place."""
        if self._is_first:
            return 0
        if self._world is not None:
            return self._world[0]
        return self._number() + (os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0")

    def set_world_size(self, size: int) -> None:
        """Lightning's count of devices says nothing."""

    def set_global_rank(self, rank: int) -> None:
        """The same."""

    def local_rank(self) -> int:
        """Which worker of its host this is."""
        return 0 if self._is_first else self._number()

    def node_rank(self) -> int:
        """Hosts have no order."""
        return 0

    @staticmethod
    def _number() -> int:
        return local_rank_of(os.environ) or 0
