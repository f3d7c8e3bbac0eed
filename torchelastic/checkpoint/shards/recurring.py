"""Laying out the same state again and again: what has not changed since the last save is not worked out anew.

Between two saves of a training run the values of tensors change, a few numbers too, and nothing else. So names, places
and layout are those of the save before, and only the numbers are encoded again; see `recall`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from torchelastic.checkpoint.shards.header import Entry, Header, lay_out
from torchelastic.checkpoint.shards.recall import Outline, outline_of, recall
from torchelastic.checkpoint.shards.tree import flatten


class RecurringLayout:
    """Lays out a state for saving; used by one thread, one object per state that is saved repeatedly.

    It keeps no tensor alive.
    """

    def __init__(self) -> None:
        self._outline: Outline | None = None
        self._entries: tuple[Entry, ...] = ()

    def lay_out(
        self, tree: Any, meta: Mapping[str, Any], *, allow_pickles: bool = False
    ) -> tuple[Header, list[torch.Tensor]]:
        """Returns the layout of a state and the tensors to copy, in the order of its entries.

        While the state keeps its form, the entries are the same object each time, so that `Stage.fits` is quick.

        Args:
            tree: the state; nothing in it is changed or copied.
            meta: see `Header`.
            allow_pickles: see `flatten`.

        Raises:
            TypeError, ValueError: as `flatten`.
        """
        if self._outline is not None:
            recalled = recall(tree, self._outline, allow_pickles=allow_pickles)
            if recalled is not None:
                structure, tensors = recalled
                return Header(structure, self._entries, MappingProxyType(dict(meta))), list(tensors)
        flat = flatten(tree, allow_pickles=allow_pickles)
        header = lay_out(flat, meta)
        self._entries, self._outline = header.entries, outline_of(flat)
        return header, [named.tensor for named in flat.tensors]
