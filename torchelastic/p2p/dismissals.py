"""Notes to workers that were new in a group, in the store of its round: the others go on without them, and why.

They are written before the group is given up, so that whoever fails by that finds them. The store is rank 0's, which
holds the best state and so is no newcomer; a connection of its own is used, as that of the group may be cut any time.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

from torchelastic.group.store_mailbox import StoreMailbox
from torchelastic.join_rules import Dismissal

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

log = logging.getLogger(__name__)

#: So long a worker that has failed by itself waits for the others, who may fail of the same a moment later.
WAIT_S = 1.0
LOOK_EVERY_S = 0.02
#: Rank 0's store answers within milliseconds; a host that is gone is not waited for.
ANSWER_S = 1.0


def dismiss(store: Store, ranks: Sequence[int], dismissal: Dismissal) -> None:
    """Leave a note for each of these ranks; without one, if rank 0 is lost, they come back and fail once more."""
    mailbox = StoreMailbox(store, ANSWER_S)
    words = json.dumps(asdict(dismissal)).encode()
    try:
        for rank in ranks:
            mailbox.post(_key(rank), words)
    except RuntimeError as error:
        log.info("the newcomers could not be notified: %s", error)


def find_dismissal(store: Store, rank: int, *, may_wait: bool) -> Dismissal | None:
    """The note for this rank; None: there is none.

    Args:
        store: of the round.
        rank: of this worker.
        may_wait: for up to `WAIT_S`.
    """
    mailbox, until_s = StoreMailbox(store, ANSWER_S), time.monotonic() + (WAIT_S if may_wait else 0.0)
    words = None
    with suppress(RuntimeError):  # rank 0 is gone
        while (words := mailbox.look(_key(rank))) is None and time.monotonic() < until_s:
            time.sleep(LOOK_EVERY_S)
    return None if words is None else Dismissal(**json.loads(words))


def _key(rank: int) -> str:
    return f"dismissal/{rank}"
