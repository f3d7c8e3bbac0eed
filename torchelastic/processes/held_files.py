"""Open files whose lock (flock) is that of one process: a fork closes its own descriptors of them.

A lock belongs to the open file, which a fork shares. Without this the workers of a data loader would hold what their
trainer has locked, also when that is dead and they live on.
"""

from __future__ import annotations

import os
import weakref
from contextlib import suppress


class HeldFile:
    """An open file; in a child of a fork it is closed from the start, whatever the parent does with it.

    Args:
        descriptor: of it, which is closed by this object alone.

    Attributes:
        descriptor: as given; -1: it is closed.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        _held.add(self)

    def close(self) -> None:
        """Closes it, and so lets its lock go; again, or in a fork, this does nothing."""
        descriptor, self.descriptor = self.descriptor, -1  # in this order: a fork in between closes nobody else's
        if descriptor >= 0:
            os.close(descriptor)


_held: weakref.WeakSet[HeldFile] = weakref.WeakSet()


def _close_in_child() -> None:
    for held in list(_held):
        with suppress(OSError):
            held.close()


os.register_at_fork(after_in_child=_close_in_child)
