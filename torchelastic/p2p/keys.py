"""Waiting for a key of a round's store, for as long as the round stands."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

#: While another rank works (rank 0 writes a checkpoint), those who wait look this often whether they are still members.
LOOK_S = 10.0


def wait_for_key(store: Store, key: str, raise_if_broken: Callable[[], None]) -> None:
    """Return when somebody has set the key, however long that takes.

    Args:
        store: of the round.
        key: to wait for.
        raise_if_broken: raises RuntimeError if the round is no more.

    Raises:
        RuntimeError: the round broke, or the store is gone.
    """
    while True:
        began_s = time.monotonic()
        try:
            store.wait([key], timedelta(seconds=LOOK_S))
        except dist.DistStoreError:
            raise_if_broken()
            if time.monotonic() - began_s < LOOK_S / 2:
                raise  # no time-out: the connection is gone
        else:
            return
