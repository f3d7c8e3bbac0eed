"""torch's groups of processes: those that there are, how each is made, and one around another.

On the training thread, but for `all_groups` and `backend_of`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torchelastic.torch_internals.c10d_types import Store
from torchelastic.torch_internals.canary import check_torch, found, installed_version

check_torch()

#: Operations that torch calls by these names; a group has those of them that this torch's groups have.
ALL_GATHER_OF_TENSOR, REDUCE_SCATTER_OF_TENSOR = "_allgather_base", "_reduce_scatter_base"


def all_groups() -> list[tuple[dist.ProcessGroup, str, Store]]:
    """The groups of this process, the user's own too: each with its backend, such as "gloo", and its store."""
    return [(group, backend, store) for group, (backend, store) in list(c10d._world.pg_map.items())]


def store_of(group: dist.ProcessGroup) -> Store:
    """The store that is a group's alone. Raises KeyError for one that was destroyed."""
    return c10d._world.pg_map[group][1]


def default_store() -> Store:
    """The store of the default group. Raises ValueError where there is none."""
    return c10d._get_default_store()


def forget_group_names() -> None:
    """Have torch name the next groups as a process does that has made none; it counts failed ones, too."""
    c10d._world.group_count = 0


def forget(group: dist.ProcessGroup) -> None:
    """Have torch not shut this group down when it destroys the default one."""
    if found("torch.distributed.distributed_c10d._world.pg_names") is not None:
        c10d._world.pg_names.pop(group, None)


def replace_maker_of_groups(mark: str, replaced: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have every group of this process made by another function; there is no public hook.

    Args:
        mark: attribute of that function, by which it is recognized: it is not replaced again.
        replaced: makes it of torch's, which all ways of making a group go through, by this name since torch 1.8.
    """
    original = c10d._new_process_group_helper
    if not hasattr(original, mark):
        function = replaced(original)
        setattr(function, mark, True)
        c10d._new_process_group_helper = function


def replace_init(before: Callable[[], object]) -> None:
    """Have something done each time before a default group is made, by whichever of torch's two names; once for all."""
    original = c10d.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        before()
        original(*args, **kwargs)

    c10d.init_process_group = dist.init_process_group = init_process_group


def backend_of(group: dist.ProcessGroup, device_type: str) -> Any:
    """What carries out a group's operations on tensors of a kind of device; None where it has nothing for them.

    Raises:
        RuntimeError: this torch does not tell.
    """
    if found("torch.distributed.ProcessGroup._get_backend") is None:
        raise RuntimeError(
            f"torch {installed_version()} does not say which backend a group has for {device_type}: use "
            'CoordinatorP2P(c10d_backend="gloo"), or a torch that this release of torchelastic was tested with'
        )
    try:
        return group._get_backend(torch.device(device_type))
    except RuntimeError:
        return None


def unwrapped(backend: Any) -> Any:
    """A backend without the checks that TORCH_DISTRIBUTED_DEBUG=DETAIL puts around it."""
    while (inner := getattr(backend, "wrapped_pg", None)) is not None:
        backend = inner
    return backend


class GroupAround(dist.ProcessGroup):
    """A group around another one: what torch sets on it is set on both.

    Args:
        store: of the group alone.
        rank: of this process in the group.
        size: of the group.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's types lack the form for subclasses
        self._inner = dist.ProcessGroup(store, rank, size)

    def _register_backend(self, device: torch.device, backend_type: Any, backend: Any) -> None:
        # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around it, whose waits cannot be given up, and with which a DDP
        # over a group that is not torch's own ends the process (SIGSEGV)
        backend = unwrapped(backend)
        super()._register_backend(device, backend_type, backend)
        self._inner._register_backend(device, backend_type, backend)

    def _set_default_backend(self, backend_type: Any) -> None:
        super()._set_default_backend(backend_type)
        self._inner._set_default_backend(backend_type)

    # where torch does not have one of the next, it calls none of these

    def _set_group_name(self, name: Any) -> None:
        super()._set_group_name(name)
        self._inner._set_group_name(name)

    def _set_group_desc(self, desc: str) -> None:
        super()._set_group_desc(desc)
        self._inner._set_group_desc(desc)


class WorkAround(dist.Work):
    """An operation around another one, for what torch asks it for.

    Args:
        inner: the other one.
    """

    def __init__(self, inner: dist.Work) -> None:
        super().__init__()
        self._inner = inner

    def _source_rank(self) -> int:
        return self._inner._source_rank()
