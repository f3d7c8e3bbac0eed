"""Waiting for a key of a round's store, for as long as the round stands."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

log = logging.getLogger(__name__)

#: While another rank works (rank 0 writes a checkpoint), who waits checks this often whether it still is a member.
LOOK_S = 10.0


def wait_for_key(
    store: Store,
    key: str,
    raise_if_broken: Callable[[], None],
    waited_for: Callable[[], str],
    bound_s: float | None = None,
) -> None:
    """Return when somebody has set the key; who is waited for is logged after 10 s, 20 s, 40 s and so on.

    Args:
        store: of the round.
        key: to wait for.
        raise_if_broken: raises RuntimeError if the round is no more.
        waited_for: says whom, and what for, in words.
        bound_s: how long to wait at most; None: for as long as the round stands.

    Raises:
        RuntimeError: the round broke, the store is gone, or the bound is over.
    """
    first_s, next_log_s = time.monotonic(), LOOK_S
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
        waited_s = time.monotonic() - first_s
        if bound_s is not None and waited_s >= bound_s:
            raise RuntimeError(f"waited {waited_s:.0f} s for {waited_for()}")
        if waited_s >= next_log_s:
            log.warning("waiting for %s, for %.0f s so far", waited_for(), waited_s)
            next_log_s *= 2
