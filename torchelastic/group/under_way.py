"""Which operations that nobody waits for may still be under way? Each is held here until it has ended.

Else a thread of gloo's has the last reference to the operation's tensors, and needs the interpreter to release them.
With torch 2.6 whoever releases the group keeps the interpreter and waits for that thread: for ever.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

import torch.distributed as dist

_held: list[dist.Work] = []
# never released, also not at the end of the process: then no thread can have the interpreter any more
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_held))


def hold(work: dist.Work | None) -> None:
    """Hold an operation until it has ended.

    Args:
        work: what a collective has returned; None, for ranks outside the group, is nothing to hold.
    """
    release_ended()
    if work is not None:
        _held.append(work)


def release_ended() -> None:
    """Let go of the operations that have ended. From any thread, as `hold`."""
    for ended in [one for one in list(_held) if one.is_completed()]:
        with suppress(ValueError):  # another thread was quicker
            _held.remove(ended)
