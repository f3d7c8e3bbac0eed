"""How the ranks of a group come to save in the same epoch, and to take the shared places of a new job together."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.kinds import ForeignCheckpointsError
from torchelastic.checkpoint.store.tier import Tier, agree_epoch
from torchelastic.group.peers import Peers


def agree_on_epoch(
    tiers: Sequence[Tier], peers: Peers, run_id: str, epoch: int | None, generation: int
) -> tuple[int, int]:
    """Agrees on the epoch of a group, and takes shared places for a new job. Every rank calls it when a group begins.

    Args:
        tiers: the same on all ranks.
        peers: the group.
        run_id: of the run.
        epoch: what this rank has agreed on before; None: it is new.
        generation: how many saves this rank has counted.

    Returns:
        The epoch, and the highest generation.

    Raises:
        ForeignCheckpointsError: a place holds only what something else has saved; on every rank.
        CheckpointError: a place cannot be taken, or another run that is alive has it; on every rank.
        RuntimeError: a peer is lost.
    """
    known: list[int] = []
    failure: CheckpointError | None = None
    if epoch is None:
        try:
            for tier in tiers:
                tier.require_own()
            known = [tier.known_epoch(run_id) for tier in tiers]
        except CheckpointError as error:
            failure = error
    peers.barrier()  # a place may be slow to answer
    said = peers.all_gather({"epoch": epoch, "known": known, "generation": generation, "failure": _told(failure)})
    _raise_on_all([one["failure"] for one in said], failure)
    generation = max(one["generation"] for one in said)
    current = max((one["epoch"] for one in said if one["epoch"] is not None), default=None)
    epoch = agree_epoch(current, [number for one in said for number in one["known"]])
    if current is not None:
        return epoch, generation
    try:
        for tier in tiers if peers.rank == 0 else ():
            if tier.is_shared:
                epoch = max(epoch, tier.claim(run_id, f"{tier.kind.value} on {socket.gethostname()}", epoch))
    except CheckpointError as error:
        failure = error
    peers.barrier()
    claimed = peers.all_gather([epoch, _told(failure)])
    _raise_on_all([told for _, told in claimed], failure)
    return int(claimed[0][0]), generation


def _told(failure: CheckpointError | None) -> tuple[str, bool] | None:
    return None if failure is None else (str(failure), isinstance(failure, ForeignCheckpointsError))


def _raise_on_all(told: Sequence[tuple[str, bool] | None], own: CheckpointError | None) -> None:
    """The own failure, or that of the first rank that has one."""
    first = next(((rank, one) for rank, one in enumerate(told) if one is not None), None)
    if first is None:
        return
    rank, (text, is_foreign) = first
    raise own or (ForeignCheckpointsError(text) if is_foreign else CheckpointError(f"rank {rank}: {text}"))
