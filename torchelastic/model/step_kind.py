"""What of a state is to be the same on all ranks: how its steps are computed, as numbers for a message. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchelastic.data.shares import MODES
from torchelastic.model.ddp_options import as_numbers, from_numbers


def kind_of(shards: int, salvage: str, check: int, ddp: Mapping[str, Any]) -> tuple[int, ...]:
    """The numbers.

    Args:
        shards: logical ones of a global batch; 0: without.
        salvage: see `ModelState`.
        check: a number for the `ComputeCheck`; 0: none.
        ddp: options of DDP.
    """
    return (shards, MODES.index(salvage), check, *as_numbers(ddp))


def kind_text(kind: Sequence[int]) -> str:
    """A `kind_of`, as it was given.

    >>> kind_text((4, 2, 0, 0, 0)), kind_text((0, 0, 0, 8, 0))
    ("logical_shards=4, salvage='recompute'", "logical_shards=None, salvage='discard', ddp={'static_graph': True}")
    """
    shards, mode, check, *options = kind
    ddp = from_numbers(*options)
    more = (f", ddp={ddp}" if ddp else "") + (f", a ComputeCheck (number {check % 1000})" if check else "")
    return f"logical_shards={shards or None}, salvage={MODES[mode]!r}{more}"
