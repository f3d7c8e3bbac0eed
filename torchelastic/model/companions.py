"""After a step that stands though it failed: make level what goes with the weights.

The weights of those whose optimizers had all stepped are equal. But their steps failed at different places after that,
so one may have stepped its scheduler, or updated its EMA, where another had not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchelastic.model.optimizers import Optimizers
from torchelastic.model.registered import Registered
from torchelastic.model.several import Several
from torchelastic.model.transfer import bring_level


def level_companions(
    optimizers: Optimizers,
    schedulers: Several,
    registered: Registered,
    *,
    source: int,
    equals: Sequence[int],
    rank: int,
    world_size: int,
    device: torch.device,
) -> None:
    """Send hyperparameters, schedulers and registered objects; called on every rank of the default group.

    Args:
        optimizers: whose hyperparameters are sent; their tensors are level.
        schedulers: all of them.
        registered: whose objects are sent; plain values stay each rank's own.
        source: rank from which they are taken.
        equals: ranks that take them; equal on all ranks; may be empty.
        rank: of this process.
        world_size: of the group.
        device: where messages must lie for the group's backend.

    Raises:
        RuntimeError: a peer is lost; nothing has changed here.
    """
    if not equals:
        return
    tree = {
        "settings": optimizers.settings(),
        "scheduler": schedulers.state_dict(),
        "objects": registered.states(),
    }
    received = bring_level(tree, source=source, stale=equals, rank=rank, world_size=world_size, device=device)
    if received is not None:
        optimizers.load_settings(received["settings"])
        schedulers.load_state_dict(received["scheduler"])
        registered.load_states(received["objects"])
