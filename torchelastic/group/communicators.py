"""Groups that are not of gloo (NCCL's communicators): connecting them, giving them up, and trusting what they compute.

An operation of gloo raises when its group is given up. A kernel of NCCL only ends, with anything in its tensors, and
what is queued behind it on the stream goes on with that. So whoever makes a result count waits for it here first.

NCCL connects a group at its first collective, and then waits for a peer that has died meanwhile for ever, on the thread
that has called it, also when the group is aborted. So groups are connected here, on a thread that can be left behind.
The engine that is torch's default from 2.15 on (`ProcessGroupNCCL2`) would connect in its constructor, or by splitting
the default group's communicator: it is made so that it does neither (`made_lazily`).

To give a communicator up takes NCCL half a second: kernels end within milliseconds, then it frees memory of the GPU,
which waits for all kernels there. Those of a new group may wait for a peer that is still at it, and that peer for them.
So a group is connected when the former one is gone; nobody else waits for that.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import BackendConfig

from torchelastic.errors import RetryableException
from torchelastic.group.backends import GLOO, capabilities, engines, has_failed
from torchelastic.torch_internals import process_groups
from torchelastic.torch_internals.nccl import connects_when_made

log = logging.getLogger(__name__)

ABORTED = "a collective of NCCL was aborted: another worker is lost or hangs"
#: The longest that the end of the process waits for communicators that are being given up.
MAX_EXIT_S = 5.0

_lock = threading.Lock()
_aborted = threading.Event()
_threads: list[threading.Thread] = []


def begin() -> None:
    """Before a new generation of groups is formed; the former one was given up."""
    _aborted.clear()


def connecting(group: dist.ProcessGroup) -> Callable[[], None] | None:
    """What has NCCL connect the ranks of a group; None where nothing is to do: gloo alone, or one rank.

    Called on the training thread of every rank, and its result on a thread that can be left behind: that raises
    RuntimeError if NCCL cannot connect, and may wait for ever for a peer that is lost.
    """
    able = [backend for name, backend in engines(group) if capabilities(name, backend).connects_ahead]
    if not able or group.size() == 1:
        return None
    device = torch.device("cuda", torch.cuda.current_device())  # of this thread: another one has the first

    def connect() -> None:
        for thread in tuple(_threads):
            thread.join()
        for backend in able:
            if getattr(backend.options, "lazy_init", False):  # else the call has no effect
                backend.options.lazy_init = False
            backend.eager_connect_single_device(device)

    return connect


def made_lazily(backend: str, options: Any) -> dict[str, Any]:
    """What torch's function that makes a group has to be given beside, for NCCL to connect in `connecting` only.

    Args:
        backend: as the group's maker has named it; such as "nccl", or "cpu:gloo,cuda:nccl2".
        options: the options for the backend that torch would be given; None: there are none.
    """
    names = BackendConfig(dist.Backend(backend)).get_device_backend_map().values()
    if not any(connects_when_made(name) for name in names):
        return {}
    options = dist.ProcessGroupNCCL.Options() if options is None else options
    options.lazy_init = True
    # torch goes by LOCAL_RANK, whatever device the script has chosen
    return {"backend_options": options, "device_id": torch.device("cuda", torch.cuda.current_device())}


def abort() -> None:
    """Give up every group that has more than gloo's sockets, the user's own too. From any thread; idempotent.

    Kernels that wait for a lost peer end, and `wait_for_collectives` raises. Does not wait for NCCL.

    Not by torch's `_abort_process_group`, which also forgets all groups: the training thread, in the middle of a step,
    would read that there has never been a group, like after a mistake of the user.
    """
    with _lock:  # who comes second may forget the groups right after this
        if _aborted.is_set():
            return
        _aborted.set()  # before the first kernel ends by it
        _threads[:] = [thread for thread in _threads if thread.is_alive()]
        # each on a thread of its own: to free memory waits for the kernels of the others, which their abort ends
        for group in _communicators():
            # asked for here: soon torch knows nothing of the group any more
            parts = [backend for _, backend in engines(group)]
            thread = threading.Thread(
                target=_release_parts, args=(parts, [group]), name="torchelastic-nccl-abort", daemon=True
            )
            _threads.append(thread)
            thread.start()


def forget() -> None:
    """Take what was given up out of the groups that torch shuts down with the default group: it would wait for that."""
    for group in _communicators():
        process_groups.forget(group)


def wait_for_collectives() -> None:
    """Wait until the GPU has done what this thread has given to its stream; at once where all groups are gloo's.

    Raises:
        RetryableException: a communicator was given up, or has failed, so that tensors may hold anything.
    """
    groups = _communicators() if dist.is_available() and dist.is_initialized() else []
    if not groups:
        return
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no types here
        torch.cuda.current_stream().synchronize()
    if _aborted.is_set() or any(has_failed(backend) for group in groups for _, backend in engines(group)):
        raise RetryableException(ABORTED)


def _communicators() -> list[dist.ProcessGroup]:
    return [group for group, backend, _ in process_groups.all_groups() if backend != GLOO]


def _release_parts(parts: list[Any], its: list[dist.ProcessGroup]) -> None:
    while parts:
        backend = parts.pop()
        try:
            backend.abort()
        except Exception as error:  # noqa: BLE001 - training goes on in the next group
            log.warning("a communicator could not be aborted: %s: %s", type(error).__name__, error)
        del backend
    its.clear()  # here, if nobody else has it: the end of a group waits for its threads


def _end() -> None:
    """At the end of the process: a thread that is inside NCCL while its library is taken down would crash."""
    for thread in _threads:
        thread.join(MAX_EXIT_S)


atexit.register(_end)
