"""The ranks of the present group, for saving and restoring checkpoints together: see `checkpoint.tiered.peers`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from torchelastic.checkpoint.tiered.peers import Alone, Mailbox, Peers
from torchelastic.group.naming import listed

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
        wait_for_key: waits for a key of the store, given who is waited for; raises RuntimeError if the round breaks.
        address: at which the other hosts reach this one; empty: there are none.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        store: Store,
        rank: int,
        world_size: int,
        round_number: int,
        wait_for_key: Callable[[str, Callable[[], str]], None],
        address: str = "",
    ) -> None:
        self.address = address or "127.0.0.1"
        self.rank = rank
        self.world_size = world_size
        self.round_number = round_number
        self._group = group
        self._store = store
        self._wait_for_key = wait_for_key
        self._meetings = 0

    def gather(self, words: bytes) -> Sequence[bytes]:
        """What each rank says, by rank."""
        length = torch.tensor([len(words)])
        lengths = [torch.zeros_like(length) for _ in range(self.world_size)]
        dist.all_gather(lengths, length, group=self._group)
        longest = max(int(one) for one in lengths)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(words)] = _as_tensor(memoryview(bytearray(words)))
        gathered = [torch.empty_like(mine) for _ in range(self.world_size)]
        if longest:
            dist.all_gather(gathered, mine, group=self._group)
        return [one[: int(size)].numpy().tobytes() for one, size in zip(gathered, lengths, strict=True)]

    def tell(self, words: bytes) -> bytes:
        """What rank 0 says."""
        length = torch.tensor([len(words)])
        dist.broadcast(length, src=0, group=self._group)
        said = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == 0:
            said[:] = _as_tensor(memoryview(bytearray(words)))
        if said.numel():
            dist.broadcast(said, src=0, group=self._group)
        return said.numpy().tobytes()

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

    def meet(self) -> None:
        """Wait for all on a key of the store, not in a collective, whose time-out a slow disk would exceed."""
        self._meetings += 1
        key = f"met/{self._meetings}"
        self._store.set(f"{key}/{self.rank}", "1")
        if self._store.add(f"{key}/count", 1) == self.world_size:
            self._store.set(key, "1")

        def missing() -> str:
            ranks = [rank for rank in range(self.world_size) if not self._store.check([f"{key}/{rank}"])]
            return f"{listed(ranks)} to reach the same point of saving or restoring a checkpoint"

        self._wait_for_key(key, missing)

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


def peers_of(
    group: dist.ProcessGroup | None,
    store: Store,
    rank: int,
    world_size: int,
    round_number: int,
    wait_for_key: Callable[[str, Callable[[], str]], None],
    address: str,
) -> Peers:
    """The peers of a group; where there is none (None), this worker is alone. Arguments as for `GroupPeers`."""
    if group is None:
        return Alone(round_number)
    return GroupPeers(group, store, rank, world_size, round_number, wait_for_key, address)


def _as_tensor(data: memoryview) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8) if data.nbytes else torch.empty(0, dtype=torch.uint8)
