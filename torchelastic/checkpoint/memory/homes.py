"""In which container a copy of a state is made: DCP asks for the copy before it tells which checkpoint it is for."""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import TYPE_CHECKING

from torchelastic.checkpoint.memory.container import Container
from torchelastic.checkpoint.memory.ids import CheckpointContainerId
from torchelastic.checkpoint.memory.job import job_container
from torchelastic.checkpoint.memory.slots import Slots, slots_of

if TYPE_CHECKING:
    from torchelastic.checkpoint.memory.objects import CheckpointObjectManager


class Homes:
    """The containers that one saver saves into: one, as a rule. May be used by several threads.

    Args:
        manager: opens them.
    """

    def __init__(self, manager: CheckpointObjectManager) -> None:
        self._manager = manager
        self._last: Path | None = None
        self._elsewhere: Container | None = None

    def at(self, base: CheckpointContainerId) -> Slots:
        """The slots of a container. Raises: CheckpointError, ValueError if it cannot be used."""
        container = self._manager.container(base)
        self._last = container.root
        return slots_of(container)

    def for_a_copy(self) -> Slots:
        """The slots of the container that was used last, or of the only one that is known.

        If none is known it may be any place in memory: on the same file system, a new name makes a shard of a copy.

        Raises:
            CheckpointError: there is no place for one.
        """
        if self._last is None:
            only = self._manager.only_container()
            self._last = only.root if only is not None else None
        if self._last is None:
            return self._slots_elsewhere()
        if self._elsewhere is not None:
            self._elsewhere.close()  # what it takes back from now on goes to the system
            self._slots_elsewhere().reclaim()
        return slots_of(self._manager.container(self._last))

    def _slots_elsewhere(self) -> Slots:
        if self._elsewhere is None:
            self._elsewhere = Container(job_container(f"copies-{os.getpid()}"))
            atexit.register(self._elsewhere.remove_all)
        return slots_of(self._elsewhere)
