"""Process groups that can be given up at once: torch's default group and the one for control collectives.

All methods but `abort` are called on the training thread; `abort` from any.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import Store

from torchelastic.processes.sockets import SocketSet

log = logging.getLogger(__name__)


class ProcessGroups:
    """The groups of one worker, one generation after the other.

    Args:
        backend: of the default group; a backend that is not for CPU tensors gets a gloo group beside it.
        timeout: of collectives.
        is_foreign: see `SocketSet`.
    """

    def __init__(
        self, backend: str, timeout: timedelta, is_foreign: Callable[[int], bool] = lambda _port: False
    ) -> None:
        self.backend = backend
        self.timeout = timeout
        self.control: dist.ProcessGroup | None = None
        self._sockets = SocketSet(is_foreign)
        self._watch_for_new_groups()

    def form(self, store: Store, rank: int, world_size: int) -> None:
        """Make the default group and the one for control collectives. Raises RuntimeError if a peer does not come."""
        self._sockets.clear()
        # by default torch ends the process whose NCCL collective was aborted or timed out; 2: it only cleans up
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        excepthook = sys.excepthook
        try:
            dist.init_process_group(self.backend, store=store, rank=rank, world_size=world_size, timeout=self.timeout)
        finally:
            # torch puts one more layer around it each time, and each prints its "[rankN]: " before every line
            sys.excepthook = excepthook
        if self.backend == "gloo":
            self.control = dist.group.WORLD
        else:
            self.control = dist.new_group(backend="gloo", timeout=self.timeout)

    def abort(self) -> int:
        """Make every collective of the present groups fail, here and, through the closed connections, at the peers.

        Returns how many connections were cut. Idempotent.
        """
        cut = self._sockets.cut()
        if dist.is_initialized():
            _abort_communicators()
        return cut

    def destroy(self) -> None:
        """Give the groups up. Whoever still holds one (an old DDP wrapper, a traceback) holds an aborted one."""
        # torch names groups by a counter, part of every key in the store, and counts failed formations too: a rank that
        # had one more of them would wait for keys that nobody ever writes
        c10d._world.group_count = 0
        if not dist.is_initialized():
            return
        self.abort()
        self.control = None
        try:
            dist.destroy_process_group()
        except (RuntimeError, ValueError, AssertionError) as error:
            log.debug("destroying an aborted group: %s", error)
        self._sockets.clear()

    def _watch_for_new_groups(self) -> None:
        """Record the connections of every group, those that the user makes with `new_group` too.

        There is no public hook; all ways of making a group go through this one function, by name since torch 1.8.
        """
        original = c10d._new_process_group_helper
        recorders: list[SocketSet] = getattr(original, "torchelastic_recorders", [])
        recorders.append(self._sockets)
        if not hasattr(original, "torchelastic_recorders"):
            c10d._new_process_group_helper = _recording(original, recorders)


def _recording(original: Callable[..., Any], recorders: list[SocketSet]) -> Callable[..., Any]:
    def recorded(*args: Any, **kwargs: Any) -> Any:
        with _all_recording(recorders):
            return original(*args, **kwargs)

    recorded.torchelastic_recorders = recorders  # type: ignore[attr-defined]  # so that it is wrapped once
    return recorded


@contextmanager
def _all_recording(recorders: list[SocketSet]) -> Iterator[None]:
    from contextlib import ExitStack

    with ExitStack() as stack:
        for recorder in recorders:
            stack.enter_context(recorder.recording())
        yield


def _abort_communicators() -> None:
    """Abort every group that has more than sockets: those of NCCL, the user's own too.

    Not by torch's `_abort_process_group`, which also forgets all groups: the training thread, in the middle of a step,
    would be told that there has never been a group, which reads like a mistake of the user's.
    """
    groups = [group for group, (backend, _) in list(c10d._world.pg_map.items()) if backend != "gloo"]
    # as torch does it: newest first, and NCCL's as one group, or their aborts may wait for each other
    groups.sort(key=lambda group: c10d._world.pg_names.get(group, ""), reverse=True)
    with _as_one(groups):
        for group in groups:
            try:
                group.abort()
            except Exception as error:  # noqa: BLE001 - the others must be aborted all the same
                log.warning("a communicator could not be aborted: %s: %s", type(error).__name__, error)


@contextmanager
def _as_one(groups: list[dist.ProcessGroup]) -> Iterator[None]:
    try:
        backend = groups[-1]._get_backend(torch.device("cuda")) if groups else None
    except RuntimeError:
        backend = None
    if not dist.is_nccl_available() or not isinstance(backend, dist.ProcessGroupNCCL):
        yield
        return
    backend._group_start()
    try:
        yield
    finally:
        backend._group_end()
