"""The ranks of the present group, for saving and restoring checkpoints together: see `group.peers`."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from torchelastic.group.messages import all_gather_texts
from torchelastic.group.notes import Mailbox
from torchelastic.group.store_mailbox import StoreMailbox
from torchelastic.p2p.heartbeat import Heartbeat
from torchelastic.text import listed

log = logging.getLogger(__name__)


#: While another rank works (rank 0 writes a checkpoint), a waiting rank checks this often whether it still is a member.
CHECK_S = 10.0


class GroupPeers:
    """Over a gloo group and the store of its round; for the training thread. Nothing is pickled.

    Args:
        group: for CPU tensors.
        store: of this round alone.
        rank: of this worker.
        world_size: of the group.
        round_number: of the rendezvous.
        raise_if_broken: raises RuntimeError if the round has ended.
        address: at which the other hosts reach this one; empty: there are none.
        heartbeat: of the group; None: nobody gives signs of life.
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
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self._heartbeat = heartbeat
        self.address = address or "127.0.0.1"
        self.rank = rank
        self.world_size = world_size
        self.round_number = round_number
        self._group = group
        self._store = store
        self._raise_if_broken = raise_if_broken
        self._barriers = self._turns = 0

    def all_gather(self, value: Any) -> list[Any]:
        """The value of each rank, by rank; as JSON."""
        return [json.loads(each) for each in all_gather_texts(self._group, json.dumps(value).encode(), _waited)]

    def rank_0_says(self, value: int) -> int:
        """The value of rank 0: one broadcast, which costs little compared to a step."""
        flag = torch.tensor([int(value)])
        dist.broadcast(flag, src=0, group=self._group)
        return int(flag[0])

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
        """Messages in the store of the round, on a connection of their own, so that no wait blocks them."""
        return StoreMailbox(self._store)

    def silent_s(self) -> dict[int, float]:
        """See `Peers`."""
        return {} if self._heartbeat is None else self._heartbeat.silent_s()

    def close(self) -> None:
        """See `Peers`."""
        if self._heartbeat is not None:
            self._heartbeat.end()


def wait_for_key(
    store: Store,
    key: str,
    raise_if_broken: Callable[[], None],
    waited_for: Callable[[], str],
    bound_s: float | None = None,
) -> None:
    """Wait for a key of a round's store; the missing ranks are logged after 10 s, 20 s, 40 s and so on.

    Args:
        store: of the round.
        key: to wait for.
        raise_if_broken: raises RuntimeError if the round has ended.
        waited_for: describes the missing ranks.
        bound_s: how long to wait at most; None: as long as the round lasts.

    Raises:
        RuntimeError: the round broke, the store is gone, or the bound is over.
    """
    first_s, next_log_s = time.monotonic(), CHECK_S
    while True:
        began_s = time.monotonic()
        try:
            store.wait([key], timedelta(seconds=CHECK_S))
        except dist.DistStoreError:
            raise_if_broken()
            if time.monotonic() - began_s < CHECK_S / 2:
                raise  # no time-out: the connection is gone
        else:
            return
        waited_s = time.monotonic() - first_s
        if bound_s is not None and waited_s >= bound_s:
            raise RuntimeError(f"time-out: waited {waited_s:.0f} s for {waited_for()}")
        if waited_s >= next_log_s:
            log.warning("waiting for %s, for %.0f s so far", waited_for(), waited_s)
            next_log_s *= 2


def _waited(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
