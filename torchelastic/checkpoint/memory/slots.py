"""Who holds which slot of a container, and what becomes of it when its save is over, however it ended.

A slot that was taken for a save belongs to something: a copy of a state, the items of a plan, or the save itself. When
that is gone the save is over, and the slot is free again, or published, or published without ever having been part of a
checkpoint. That is looked at when the next slot is needed: what a finaliser calls must not take locks.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchelastic.checkpoint.errors import CheckpointError, explained
from torchelastic.checkpoint.memory.items import CachedLayout
from torchelastic.checkpoint.memory.plans import NotSavedError
from torchelastic.checkpoint.memory.room import NotSaved, measure, refused_for
from torchelastic.checkpoint.shards.header import Header
from torchelastic.checkpoint.shards.stage import Stage, capacity_for
from torchelastic.checkpoint.store.save_id import SaveId
from torchelastic.processes.dropped import when_dropped

if TYPE_CHECKING:
    from torchelastic.checkpoint.memory.container import Container

log = logging.getLogger(__name__)


@dataclass(eq=False)
class HeldSlot:
    """A slot that was taken for a save.

    Attributes:
        container: whose slot it is.
        stage: None once there is nothing left to do about it.
        published: its shard, as far as this process knows.
        is_used: whether a shard is made of the copy of a state in it, so that it is nobody's copy any more.
    """

    container: Container
    stage: Stage | None
    published: Path | None = None
    is_used: bool = False

    def publish(self, path: Path) -> None:
        """Gives the stage, which is sealed, its name. Raises: CheckpointError; then it is given back."""
        stage, self.stage = self.stage, None
        if stage is None:
            raise CheckpointError(f"{path} was given back")
        self.published = self.container.publish(stage, None, path)
        self.stage = stage

    def give_back(self) -> None:
        """What is in it is of no worth."""
        stage, self.stage = self.stage, None
        if stage is None:
            return
        if self.published is not None:
            self.container.remove_object(self.published)
        elif stage.slot.path is not None and stage.slot.path.exists():
            self.container.pool.give_back(stage)
        else:
            stage.slot.close()  # another process has removed it


class Slots:
    """The slots of one container in this process; may be used by several threads.

    Args:
        container: theirs.

    Attributes:
        items: layouts of what is written of plans.
        copies: layouts of copies of states.
        finishing: held by the one save that makes its checkpoint complete and removes others.
        generation: the highest that this process has given to a save; see `next_generation`.
    """

    def __init__(self, container: Container) -> None:
        self.container = container
        self.generation = -1
        self.items = CachedLayout()
        self.copies = CachedLayout()
        self._over: deque[HeldSlot] = deque()
        self.finishing = threading.Lock()
        self._lock = threading.Lock()

    def next_generation(self, newest: int) -> int:
        """A generation above all that are known here and elsewhere; no two saves get the same.

        Args:
            newest: the highest that any rank knows.
        """
        with self._lock:
            self.generation = max(self.generation, newest) + 1
            return self.generation

    def take(self, header: Header, owner: Any) -> HeldSlot:
        """A slot for tensors of this layout; a warm one where there is one.

        Args:
            header: the layout.
            owner: when it is gone the save is over; None: see `hold`.

        Raises:
            NotSavedError: there is no room for a new one.
        """
        self.reclaim()
        if not self.container.pool.is_warm(header):
            self.container.tidy()
        if not self.container.pool.is_warm(header):
            self._require_room(header)
        try:
            held = HeldSlot(self.container, self.container.pool.take(header))
        except CheckpointError as error:
            because = f"there is no room for a slot of {capacity_for(header)} bytes: {error}"
            raise NotSavedError(NotSaved("tmpfs", because)) from error
        if owner is not None:
            self.hold(held, owner)
        return held

    def hold(self, held: HeldSlot, owner: Any) -> None:
        """Names the owner of a slot."""
        when_dropped(owner, self._over.append, held)

    def warm_bytes(self, needed_bytes: int) -> int:
        """How large the largest free slot is; what newer checkpoints have replaced is removed if that is needed."""
        if self.container.pool.largest_free_bytes() < needed_bytes:
            self.container.tidy()
        return self.container.pool.largest_free_bytes()

    def reclaim(self) -> None:
        """Sees to the slots whose saves are over."""
        while self._over:
            try:
                held = self._over.popleft()
            except IndexError:
                break  # another thread was quicker
            try:
                self._reclaim(held)
            except CheckpointError as error:
                log.warning("a slot of %s cannot be used again: %s", self.container.root, error)

    def _reclaim(self, held: HeldSlot) -> None:
        save = SaveId.parse(held.published.parent.name) if held.published is not None else None
        if save is None or not held.container.has_committed(save):
            held.give_back()

    def _require_room(self, header: Header) -> None:
        why = refused_for(capacity_for(header), measure(self.container.root))
        if why is not None:
            raise NotSavedError(why)


def mapped(path: Path) -> torch.Tensor:
    """The file of a slot, also of another process; mapped as long as the tensor lives. Raises: CheckpointError."""
    with explained("map memory for the checkpoint", path):
        return torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
