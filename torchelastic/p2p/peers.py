"""The ranks of the present group, for saving and restoring checkpoints together: see `group.peers`."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from torchelastic.group.messages import all_gather_texts
from torchelastic.group.naming import listed
from torchelastic.group.notes import Mailbox
from torchelastic.p2p.keys import wait_for_key

#: How much one message carries: each has to arrive within the time-out of collectives.
CHUNK_BYTES = 64 * 2**20


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
        """Give bytes to one rank, in messages of at most `CHUNK_BYTES`."""
        for begin in range(0, data.nbytes, CHUNK_BYTES):
            # a copy: what is sent may be a read-only map of a file
            chunk = _as_tensor(memoryview(bytearray(data[begin : begin + CHUNK_BYTES])))
            dist.send(chunk, group=self._group, group_dst=rank)

    def receive(self, into: memoryview, rank: int) -> None:
        """Take as many bytes from one rank."""
        for begin in range(0, into.nbytes, CHUNK_BYTES):
            dist.recv(_as_tensor(into[begin : begin + CHUNK_BYTES]), group=self._group, group_src=rank)

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
        return _StoreMailbox(self._store)


class _StoreMailbox:
    """See `Mailbox`; keys of the store under `note/`.

    Connects at the first use: where the names of addresses are looked up slowly, torch takes seconds for that, and
    forming a group must not.
    """

    def __init__(self, store: Store) -> None:
        self._of_round = store

    @cached_property
    def _store(self) -> Store:
        clone = getattr(self._of_round, "clone", None)  # torch 2.7 and later
        return self._of_round if clone is None else clone()

    def post(self, key: str, words: bytes) -> None:
        self._store.set(f"note/{key}", words)  # type: ignore[arg-type]  # bytes are taken too

    def look(self, key: str) -> bytes | None:
        full = f"note/{key}"
        return self._store.get(full) if self._store.check([full]) else None

    def drop(self, key: str) -> None:
        self._store.delete_key(f"note/{key}")


def _waited(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def _as_tensor(data: memoryview) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8) if data.nbytes else torch.empty(0, dtype=torch.uint8)
