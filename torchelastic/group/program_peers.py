"""The ranks of a program's own process group as `Peers`: for scripts that have a training loop of their own."""

from __future__ import annotations

import secrets
from typing import Any

from torch.distributed import distributed_c10d as c10d

from torchelastic.group.notes import Mailbox
from torchelastic.group.rank_group import RankGroup
from torchelastic.group.store_mailbox import StoreMailbox

_CALL = "the same point of saving or loading a checkpoint"


class ProgramPeers:
    """See `Peers`; over the gloo group of a `RankGroup`, whose waits are bounded and name who is missing. Collective.

    Args:
        ranks: of more than one rank.
        address: at which the other hosts reach this one.

    Raises:
        OutOfStepError: a rank does not come; as each method does.
    """

    round_number = 0

    def __init__(self, ranks: RankGroup, address: str) -> None:
        self.rank, self.world_size, self.address = ranks.rank, ranks.world_size, address
        self._ranks = ranks
        # of this object alone: the store may have keys of one before it
        self._name = str(ranks.all_gather(_CALL, secrets.token_hex(8))[0])

    def all_gather(self, value: Any) -> list[Any]:
        """See `Peers`."""
        return self._ranks.all_gather(_CALL, value)

    def rank_0_says(self, value: bool) -> bool:
        """See `Peers`."""
        return bool(self.all_gather(value)[0])

    def barrier(self) -> None:
        """See `Peers`."""
        self.all_gather(None)

    def wait_for_rank_0(self, purpose: str, bound_s: float | None) -> None:  # noqa: ARG002 - the group has a bound
        """See `Peers`."""
        self.barrier()

    def mailbox(self) -> Mailbox:
        """See `Peers`: keys of the store of the program."""
        return StoreMailbox(c10d.PrefixStore(f"torchelastic.peers/{self._name}", c10d._get_default_store()))
