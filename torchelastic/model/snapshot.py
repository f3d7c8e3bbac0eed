"""What `ModelState` keeps of the time before a train step."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch

from torchelastic.model.random_state import RandomState
from torchelastic.model.registered import Copied
from torchelastic.model.transfer import Packed

#: Of values that nobody can change.
_PLAIN = frozenset({int, float, bool, str, type(None)})


class Snapshot(NamedTuple):
    """What undoes a step. Its size does not grow with the weights, except for `full`."""

    step: int
    epoch: int
    buffers: tuple[torch.Tensor, ...]
    random: RandomState
    groups: tuple[tuple[dict[str, Any], ...], ...]
    scheduler: Any
    sampler: Any
    extra: Copied
    full: Packed | None
    replaced: int


def copied(state: Any) -> Any:
    """A deep copy. Quick for a dict of plain values, as samplers' states are: it is made before every step."""
    if type(state) is dict and _PLAIN.issuperset(map(type, state.values())):
        return dict(state)
    return copy.deepcopy(state)
