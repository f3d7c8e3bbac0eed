"""How the ranks of a group come to save in the same epoch, and to take the shared places of a new job together."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.store.tier import Tier, agree_epoch
from torchelastic.errors import RetryableException
from torchelastic.group.peers import Peers
from torchelastic.group.rank_group import run_with_peers


def agree_on_epoch(
    tiers: Sequence[Tier], peers: Peers, run_id: str, epoch: int | None, generation: int
) -> tuple[int, int, str]:
    """Agrees on the epoch of a group, and takes shared places for a new job. Every rank calls it when a group begins.

    Args:
        tiers: the same on all ranks.
        peers: the group.
        run_id: of the run.
        epoch: what this rank has agreed on before; None: it is new.
        generation: how many saves this rank has counted.

    Returns:
        The epoch, the highest generation, and the nonce for names. It is empty where a shared place counts the epochs
        of all jobs; else two jobs of the run may count alike, each on hosts of its own.

    Raises:
        ForeignCheckpointsError: a place holds only what something else has saved; on the ranks that see it.
        FencedError: the run was rewound after this job had resumed; on every rank.
        CheckpointError: another rank sees such a place, or a place cannot be taken, or another run that is alive has
            it; on every rank. In a group that saves already, only a rank that has joined and cannot use a place raises
            it.
        RuntimeError: a peer is lost, or cannot use its places.
    """
    epochs, generations, nonces = zip(*peers.all_gather([epoch, generation, secrets.token_hex(4)]), strict=True)
    current = max((one for one in epochs if one is not None), default=None)
    # of a shared place its own group knows already, and goes on while that does not answer
    unknown = [tier for tier in tiers if epoch is None and not (tier.is_shared and current is not None)]

    is_usable = True

    def look() -> list[int]:
        nonlocal is_usable
        is_usable = False
        for tier in unknown:
            tier.require_own()
        epochs = [tier.known_epoch(run_id) for tier in unknown]
        is_usable = True
        return epochs

    try:
        known = run_with_peers(peers, "looking at the tiers", look) if None in epochs else []
    except CheckpointError as error:
        if current is None or not is_usable or isinstance(error, RuntimeError):
            raise
        # whose places are unusable ends by it; the others go on without that worker
        raise RetryableException(f"a worker that joins cannot use its tiers: {error}") from error
    is_counted = any(tier.is_shared for tier in tiers)  # each job has claimed another epoch, so an equal one is ours
    agreed = agree_epoch(current, [one for each in known for one in each if not (is_counted and one == current)])

    def claim() -> int:
        claimed = agreed
        for tier in tiers if peers.rank == 0 else ():
            if tier.is_shared:
                claimed = max(claimed, tier.claim(run_id, f"{tier.kind.value} on {socket.gethostname()}", claimed))
        for tier in tiers:
            if peers.rank == 0 or not tier.is_shared:
                tier.require_not_rewound()
        return claimed

    if current is None:
        agreed = run_with_peers(peers, "claiming the tiers", claim)[0]
    return agreed, max(generations), "" if is_counted else str(nonces[0])
