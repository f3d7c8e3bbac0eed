"""The ranks of the present group, for saving and restoring checkpoints together: see `group.peers`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from torchelastic.group.messages import all_gather_texts, receive_bytes, send_bytes
from torchelastic.group.naming import listed
from torchelastic.group.notes import Mailbox, StoreMailbox
from torchelastic.p2p.keys import wait_for_key


class GroupPeers:
    """Over a gloo group and the store of its round; for the training thread. Nothing is pickled.

    Args:
        group: for CPU tensors.
        store: of this round alone.
        rank: of this worker.
        world_size: of the group.
        round_number: of the rendezvous.
        raise_if_broken: raises RuntimeError if the round is no more.
        address: at which the other hosts reach this one; empty: there are none.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        store: Store,
        rank: int,
        world_size: int,
        round_number: int,
        raise_if_broken: Callable[[], None],
        address: str = "",
    ) -> None:
        self.address = address or "127.0.0.1"
        self.rank = rank
        self.world_size = world_size
        self.round_number = round_number
        self._group = group
        self._store = store
        self._raise_if_broken = raise_if_broken
        self._barriers = self._turns = 0

    def all_gather(self, value: Any) -> list[Any]:
        """What each rank says, by rank; JSON can hold it."""
        return [json.loads(each) for each in all_gather_texts(self._group, json.dumps(value).encode(), _waited)]

    def rank_0_says(self, value: bool) -> bool:
        """What rank 0 has given: one broadcast, which costs little beside a step."""
        flag = torch.tensor([int(value)])
        dist.broadcast(flag, src=0, group=self._group)
        return bool(flag[0])

    def send(self, data: memoryview, rank: int) -> None:
        """Give bytes to one rank."""
        send_bytes(self._group, data, rank)

    def receive(self, into: memoryview, rank: int) -> None:
        """Take as many bytes from one rank."""
        receive_bytes(self._group, into, rank)

    def barrier(self) -> None:
        """Wait for all on a key of the store, not in a collective, whose time-out a slow disk would exceed."""
        self._barriers += 1
        key = f"barrier/{self._barriers}"
        self._store.set(f"{key}/{self.rank}", "1")
        if self._store.add(f"{key}/count", 1) == self.world_size:
            self._store.set(key, "1")

        def missing() -> str:
            ranks = [rank for rank in range(self.world_size) if not self._store.check([f"{key}/{rank}"])]
            return f"{listed(ranks)} to reach the same point of saving or restoring a checkpoint"

        wait_for_key(self._store, key, self._raise_if_broken, missing)

    def wait_for_rank_0(self, purpose: str, bound_s: float | None) -> None:
        """As `barrier`, for rank 0 alone."""
        self._turns += 1
        key = f"rank_0_is_done/{self._turns}"
        if self.rank == 0:
            self._store.set(key, "1")
        else:
            wait_for_key(self._store, key, self._raise_if_broken, lambda: f"rank 0 {purpose}", bound_s)

    def mailbox(self) -> Mailbox:
        """Notes in the store of the round, on a connection of their own, so that no wait holds them up."""
        return StoreMailbox(self._store)


def _waited(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
