"""All generators of random numbers that some code may draw from: the process's, and those that objects of it hold."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from torchelastic.inventory.generators import Generators, generators, seed_generators
from torchelastic.inventory.held import held_by

#: Transforms lie in lists of transforms of a dataset that a subset is of.
_DEPTH = 12
_KINDS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


class Reached(NamedTuple):
    """All of them, as they were."""

    of_process: Generators
    held: Sequence[Any]


class ReachableGenerators:
    """The process's, and those in some objects; which ones there are is seen when this is made.

    Args:
        *roots: the objects.

    Attributes:
        holds_own: whether there are any in the objects.
    """

    def __init__(self, *roots: Any) -> None:
        found = held_by(roots, _KINDS, depth=_DEPTH, closed=(torch.Tensor, np.ndarray))
        self._held = [one for one in found if not isinstance(one, random.SystemRandom)]
        self.holds_own = bool(self._held)

    def state(self) -> Reached:
        """As they are now."""
        return Reached(generators(), [_state(one) for one in self._held])

    def put(self, state: Reached) -> None:
        """They draw the same numbers again."""
        state.of_process.put()
        for one, own in zip(self._held, state.held, strict=True):
            _put(one, own)

    def seed(self, seed: int) -> None:
        """Draw from this seed, 0 to 2**64 - 1, and those in the objects also from their place among them."""
        seed_generators(seed)
        for place, one in enumerate(self._held):
            _seed(one, (seed + place) % 2**64)


def _state(one: Any) -> Any:
    if isinstance(one, random.Random):
        return one.getstate()
    if isinstance(one, np.random.Generator):
        return one.bit_generator.state
    return one.get_state()


def _put(one: Any, state: Any) -> None:
    if isinstance(one, random.Random):
        one.setstate(state)
    elif isinstance(one, np.random.Generator):
        one.bit_generator.state = state
    else:
        one.set_state(state)


def _seed(one: Any, seed: int) -> None:
    if isinstance(one, torch.Generator):
        one.manual_seed(seed)
    elif isinstance(one, np.random.Generator):
        one.bit_generator.state = type(one.bit_generator)(seed).state
    elif isinstance(one, np.random.RandomState):
        one.seed(seed % 2**32)
    else:
        one.seed(seed)
