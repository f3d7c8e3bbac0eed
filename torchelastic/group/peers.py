"""The ranks of one group of a train loop, as one of them sees them: small messages and notes.

`p2p.group_peers` has the real ones, over the groups of a round; `Alone` is a group of one. Imports no torch.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

from torchelastic.group.notes import Drawer, Mailbox


class Peers(Protocol):
    """The ranks of one group. Used on the training thread; every rank makes the same calls.

    Whatever waits raises RuntimeError as soon as the group is broken.

    Attributes:
        rank: of this worker.
        world_size: how many there are.
        round_number: of the rendezvous; grows from group to group.
        address: at which the other hosts reach this one.
    """

    rank: int
    world_size: int
    round_number: int
    address: str

    def all_gather(self, value: Any) -> list[Any]:
        """What each rank says, by rank; JSON can hold it."""

    def rank_0_says(self, value: int) -> int:
        """What rank 0 has given: a small number, or a bool as one."""

    def barrier(self) -> None:
        """Return when every rank has called it, however long one of them works before it does."""

    def wait_for_rank_0(self, purpose: str, bound_s: float | None) -> None:
        """Return when rank 0 has called it, however long it works before it does.

        Args:
            purpose: what rank 0 works at, for a warning: "to save a checkpoint".
            bound_s: RuntimeError after so long; None: wait for as long as the group exists.
        """

    def mailbox(self) -> Mailbox:
        """The notes of this group; called once."""

    def silent_s(self) -> dict[int, float]:
        """For how long other ranks have given no sign of life, counted from the first call; empty: nobody gives any.

        A rank that has closed this is silent as well.
        """

    def close(self) -> None:
        """No other rank waits for this one any more: it gives no signs of life. Idempotent."""


class Alone:
    """A group of one.

    Args:
        round_number: of the rendezvous.
    """

    rank = 0
    world_size = 1
    address = "127.0.0.1"

    def __init__(self, round_number: int = 0) -> None:
        self.round_number = round_number

    def all_gather(self, value: Any) -> list[Any]:
        """See `Peers`."""
        return [json.loads(json.dumps(value))]

    def rank_0_says(self, value: int) -> int:
        """See `Peers`."""
        return value

    def barrier(self) -> None:
        """See `Peers`."""

    def wait_for_rank_0(self, purpose: str, bound_s: float | None) -> None:
        """See `Peers`."""

    def mailbox(self) -> Mailbox:
        """See `Peers`."""
        return Drawer()

    def silent_s(self) -> dict[int, float]:
        """See `Peers`."""
        return {}

    def close(self) -> None:
        """See `Peers`."""
