"""What Accelerate and Transformers are told of the group: one process until it is formed, then rank and size of now.

Both form a process group when they are set up, and keep its size and the rank in it. A worker that joins later would
make the others wait for that group while it loads its model, and numbers that are kept become wrong with each change.
So they are told of one process while they are set up, in which all their barriers and gathers do nothing, and of the
present group after each sync.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

#: By these Accelerate finds out that there is to be a group.
_OF_A_GROUP = ("LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def stay_alone() -> None:
    """From now on no state of Accelerate in this process forms a group. Doing it again does nothing."""
    if not hasattr(PartialState.__init__, "__wrapped__"):
        PartialState.__init__ = _alone(PartialState.__init__)


def _alone(init: Any) -> Any:
    @functools.wraps(init)
    def set_up(self: Any, cpu: bool = False, **options: Any) -> None:
        was_set_up = PartialState._shared_state != {}
        with _hidden(() if dist.is_initialized() else _OF_A_GROUP):
            init(self, cpu, **options)
        if not was_set_up and not dist.is_initialized():
            # who is to print and to log while there is no group; several hosts have one each
            self.process_index = self.local_process_index = int(os.environ.get("LOCAL_RANK", "0"))
            if self.device.type == "cuda":
                self.device = torch.device("cuda", self.local_process_index % torch.cuda.device_count())

    return set_up


@contextmanager
def _hidden(names: tuple[str, ...]) -> Iterator[None]:
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def report_group(rank: int, world_size: int) -> None:
    """The group has been formed: on each rank, on the training thread.

    Args:
        rank: of this worker in it; -1: there is none for it.
        world_size: its size. A group of one is a group, too, if there is one.
    """
    if rank >= 0 and not dist.is_initialized():
        return  # without a launcher this worker trains alone
    if rank < 0:  # it came when the others had finished, and is in no group
        world_size = 1
    kinds = {"cpu": DistributedType.MULTI_CPU, "cuda": DistributedType.MULTI_GPU}
    kind = DistributedType.NO if rank < 0 else kinds[PartialState().device.type]
    of_group = {
        "num_processes": world_size,
        "process_index": rank,
        "distributed_type": kind,
        "backend": dist.get_backend() if dist.is_initialized() else None,
    }
    for shared in _states():
        shared.update(of_group)


@contextmanager
def said_to_be_of(world_size: int) -> Iterator[None]:
    """Within, so many processes are told, and no collective of Accelerate asks the others. On the training thread."""
    kept = [{name: shared[name] for name in ("num_processes", "distributed_type")} for shared in _states()]
    try:
        for shared in _states():
            shared.update(num_processes=world_size, distributed_type=DistributedType.NO)
        yield
    finally:
        for shared, known in zip(_states(), kept, strict=True):
            shared.update(known)


def _states() -> list[dict[str, Any]]:
    """What Accelerate knows; the second is a copy of the first."""
    return [shared for shared in (PartialState._shared_state, AcceleratorState._shared_state) if shared]
