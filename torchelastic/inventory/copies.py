"""Copies of tensors in memory that is used again, once nobody holds the copies that are in it any more."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from torchelastic.torch_internals.tensors import copy_each


class TensorCopies:
    """Copies of some tensors, in their order; valid as long as this object is kept."""

    __slots__ = ("__weakref__", "tensors")

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors


class _Memory:
    """Where copies of certain tensors have been, and who holds them."""

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        self.tensors = [source.clone() for source in sources]
        self._kinds = _kinds(sources)
        self._holder: weakref.ref[TensorCopies] | None = None

    @property
    def is_free(self) -> bool:
        return self._holder is None or self._holder() is None

    def take(self, sources: Sequence[torch.Tensor]) -> bool:
        """Copy these into it; False: they are others, or cannot be copied so."""
        if self._kinds is None or _kinds(sources) != self._kinds:
            return False
        try:
            if copy_each(self.tensors, sources):
                return True
        except (RuntimeError, NotImplementedError):  # a type without such a kernel is among them, or a DTensor
            pass
        try:
            for place, source in zip(self.tensors, sources, strict=True):
                place.copy_(source)
        except (RuntimeError, NotImplementedError):
            return False
        return True

    def hold(self) -> TensorCopies:
        copies = TensorCopies(self.tensors)
        self._holder = weakref.ref(copies)
        return copies


class CopyMemory:
    """Makes copies, in the memory of those that nobody holds any more. On one thread."""

    def __init__(self) -> None:
        self._all: list[_Memory] = []

    @torch.no_grad()
    def of(self, sources: Sequence[torch.Tensor]) -> TensorCopies:
        """Copies of these, with their shapes and types."""
        if not sources:
            return TensorCopies([])
        free = next((memory for memory in self._all if memory.is_free), None)
        if free is None or not free.take(sources):
            if free is not None:
                self._all.remove(free)
            free = _Memory(sources)
            self._all.append(free)
        return free.hold()


def _kinds(
    tensors: Sequence[torch.Tensor],
) -> tuple[list[torch.Size], list[torch.dtype], list[torch.device]] | None:
    """A memory fits tensors of the same shapes and types alone: a copy would be converted without a word.

    None: there are nested tensors among them, which have no shape.
    """
    try:
        return [one.shape for one in tensors], [one.dtype for one in tensors], [one.device for one in tensors]
    except RuntimeError:
        return None
