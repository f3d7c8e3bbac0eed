"""Generators of random numbers as plain values, and back: those of torch, numpy and Python."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

#: What `content_of_generator` calls them.
GENERATOR_KINDS = frozenset({"generator", "numpy generator", "python generator"})
_BIT_GENERATORS: dict[str, type] = {
    kind.__name__: kind
    for kind in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
}


def content_of_generator(value: Any) -> tuple[Any, dict[str, Any]] | None:
    """What a generator holds, and what `made_generator` needs besides; None if it is none."""
    kind = type(value)
    if kind is torch.Generator:
        return value.get_state(), {"as": "generator", "device": str(value.device)}
    if kind is np.random.Generator and type(value.bit_generator).__name__ in _BIT_GENERATORS:
        return value.bit_generator.state, {"as": "numpy generator"}
    if kind is random.Random:
        return value.getstate(), {"as": "python generator"}
    return None


def made_generator(content: Any, about: Mapping[str, Any]) -> Any:
    """The inverse. Raises KeyError, TypeError, ValueError: this is nothing that `content_of_generator` gives."""
    if about["as"] == "generator":
        return torch.Generator(about["device"]).set_state(content.cpu())
    if about["as"] == "numpy generator":
        bits = _BIT_GENERATORS[content["bit_generator"]]()
        bits.state = content
        return np.random.Generator(bits)
    made = random.Random()
    made.setstate(content)
    return made
