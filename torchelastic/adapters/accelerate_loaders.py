"""Where Accelerate's prepared dataloaders are, and how they get there again.

A plain one goes on at the beginning of an epoch, and `skip_first_batches` brings it further. A stateful one
(`use_stateful_dataloader=True`) goes on by itself in the middle of the epoch, in the first iteration after it was
loaded. A loop that calls `skip_first_batches` all the same trains the rest of the epoch with another dataloader, and
would leave out as many batches of the next epoch once more. So the position is given when the iteration begins, and
only if no optimizer has stepped before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accelerate.data_loader import SeedableRandomSampler  # type: ignore[import-untyped, unused-ignore]

log = logging.getLogger(__name__)


def is_stateful(dataloader: Any) -> bool:
    """Whether it goes on by itself in the middle of an epoch."""
    return bool(getattr(dataloader, "use_stateful_dataloader", False))


def position_of(dataloader: Any) -> dict[str, Any]:
    """In which epoch a prepared dataloader is, and the seed that its order comes from."""
    position: dict[str, Any] = {"iteration": getattr(dataloader, "iteration", None)}
    sampler = dataloader.get_sampler() if hasattr(dataloader, "get_sampler") else None
    if isinstance(sampler, SeedableRandomSampler):
        position |= {"epoch": sampler.epoch, "initial_seed": sampler.initial_seed}
    return position


def set_position(dataloader: Any, position: Mapping[str, Any]) -> None:
    """The inverse."""
    if position["iteration"] is not None:
        dataloader.iteration = position["iteration"]
    sampler = dataloader.get_sampler() if hasattr(dataloader, "get_sampler") else None
    if isinstance(sampler, SeedableRandomSampler) and "initial_seed" in position:
        sampler.epoch, sampler.initial_seed = position["epoch"], position["initial_seed"]


def go_on(dataloader: Any, state: Any, optimizers: Sequence[Any]) -> None:
    """Have a stateful dataloader go on where it was, in its next iteration.

    Args:
        dataloader: as Accelerate has prepared it.
        state: what its `state_dict` gave.
        optimizers: torch's own; if one of them steps before that iteration, it begins at the beginning of an epoch.
    """
    vars(dataloader).pop("begin", None)  # of a load before
    begin: Callable[[], Any] | None = getattr(dataloader, "begin", None)
    if begin is None:
        dataloader.load_state_dict(state)
        return
    stepped: list[bool] = []
    handles = [one.register_step_post_hook(lambda *_: stepped.append(True)) for one in optimizers]

    def begins() -> Any:
        vars(dataloader).pop("begin", None)
        for handle in handles:
            handle.remove()
        if not stepped:
            dataloader.load_state_dict(state)
        elif _is_in_an_epoch(state):
            log.warning(
                "a dataloader with use_stateful_dataloader=True was to go on in the middle of an epoch by itself, and "
                "the script has trained the rest of that epoch with another one: it begins at the beginning of an "
                "epoch now. Leave accelerate.skip_first_batches out (docs/transformers.md)"
            )
        return begin()

    dataloader.begin = begins
    dataloader.dl_state_dict = state  # what it says of itself until then


def _is_in_an_epoch(state: Any) -> bool:
    return not isinstance(state, Mapping) or not state.get("_iterator_finished", False)
