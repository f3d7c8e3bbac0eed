"""The random states of torch that a train step draws from, so that a repeated step sees the same numbers.

Those of Python's `random` and of numpy's global generator are not among them: copying either takes longer than all the
rest of a step's bookkeeping. Make augmentation a function of (seed, epoch, index), or draw from a generator of your own
and keep its state in `ModelState.extra`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class RandomState(NamedTuple):
    """Generators of the CPU and, if used, of each GPU."""

    cpu: torch.Tensor
    cuda: tuple[torch.Tensor, ...]


def capture() -> RandomState:
    """As they are now; a microsecond."""
    cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]  # torch has no types here
    return RandomState(torch.get_rng_state(), cuda)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within it torch draws from this seed; after it, as if nothing had been drawn."""
    before = capture()
    torch.manual_seed(seed)
    try:
        yield
    finally:
        restore(before)


def restore(state: RandomState) -> None:
    """Back to what `capture` returned."""
    torch.set_rng_state(state.cpu)
    if state.cuda:
        torch.cuda.set_rng_state_all(state.cuda)
