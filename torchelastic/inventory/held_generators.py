"""Generators of random numbers that an object holds beside the process's own: a dataset's transforms, say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torchelastic.inventory.held import held_by

#: Transforms lie in lists of transforms of a dataset that a subset is of.
_DEPTH = 12
_KINDS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


class HeldGenerators:
    """Those in some objects; which ones there are is seen when this is made.

    Args:
        *roots: the objects.
    """

    def __init__(self, *roots: Any) -> None:
        found = held_by(roots, _KINDS, depth=_DEPTH, closed=(torch.Tensor, np.ndarray))
        self._all = [one for one in found if not isinstance(one, random.SystemRandom)]

    def __bool__(self) -> bool:
        return bool(self._all)

    def state(self) -> Sequence[Any]:
        """As they are now, for `put`."""
        return [_state(one) for one in self._all]

    def put(self, state: Sequence[Any]) -> None:
        """They draw the same numbers again."""
        for one, own in zip(self._all, state, strict=True):
            _put(one, own)

    def seed(self, seed: int) -> None:
        """Draw from this seed, 0 to 2**64 - 1, and from the place of each among them, from all of them."""
        for place, one in enumerate(self._all):
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
