"""The floor of a recovery: as many bytes between the same ranks, as plain messages of gloo."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
import torch.distributed as dist

from benchmarks.job.events import EventLog
from torchelastic.sharded import ShardedState
from torchelastic.sharded.transfers import all_gather


def move_plainly(state: ShardedState, moved: Mapping[int, int], note: EventLog, **where: int) -> None:
    """Send and receive what has moved, once into memory that is warm and once into fresh memory.

    Called by all members of a group in the same step, outside of what is timed.

    Args:
        state: whose copies are not to be under way meanwhile.
        moved: bytes that this rank received, by the rank that they came from.
        note: gets one event "floor" for each.
        **where: further fields of these.
    """
    wait_for_copies(state)
    world = dist.group.WORLD
    assert world is not None
    rank = dist.get_rank()
    told = all_gather(world, dict(moved), dict[int, int])
    asked = {receiver: said[rank] for receiver, said in enumerate(told) if rank in said}
    sent = {receiver: torch.ones(size, dtype=torch.uint8) for receiver, size in asked.items()}
    for kind, make in (("warm", torch.ones), ("fresh", torch.empty)):
        received = {source: make(size, dtype=torch.uint8) for source, size in moved.items()}
        dist.barrier()
        began_s = time.monotonic()
        operations = [dist.P2POp(dist.irecv, tensor, source) for source, tensor in sorted(received.items())]
        operations += [dist.P2POp(dist.isend, tensor, receiver) for receiver, tensor in sent.items()]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        note("floor", kind=kind, began=began_s, ended=time.monotonic(), bytes=sum(moved.values()), **where)


def wait_for_copies(state: ShardedState) -> None:
    """Return when nothing is being sent any more at any rank: it would share the cores with what is measured."""
    while state._copies.finished < state._copies.started:
        time.sleep(0.001)
    dist.barrier()
