"""A copy of a state that is made at the call, in one pass, and written later: by a thread, or by another process.

The copy is a dict like the state itself, so that any planner plans it; its tensors are places in a slot, which becomes
the shard where this process writes it. To another process it goes as the name of the slot's file and the structure
around it, without a file descriptor for each tensor; that process copies what it writes.
"""

from __future__ import annotations

import copy
import json
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchelastic.checkpoint.compat.flashpoint.container import HeldSlot
from torchelastic.checkpoint.compat.flashpoint.items import PLAIN_TYPES, tensor_with_data
from torchelastic.checkpoint.errors import explained
from torchelastic.checkpoint.format.header import Entry
from torchelastic.checkpoint.format.stage import Stage, tensor_at
from torchelastic.checkpoint.format.tensor_parts import memory_identity
from torchelastic.checkpoint.store.host_memory.room import NotSaved
from torchelastic.torch_internals.sharding import described_by, description_of, local_part

_UNCHANGEABLE = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device, type(Ellipsis)}
)
#: How long the pickle of a small value is.
_PICKLE_BYTES = 2048

#: How a key begins that is put into a state for which there was no memory: the rest says why, and so does the plan.
_SKIPPED = "torchelastic.not_copied:"


@dataclass(frozen=True)
class _At:
    """Placeholder of a tensor in the slot, by number."""

    index: int


@dataclass(frozen=True)
class _Spread:
    """Placeholder of a DTensor."""

    local: _At | torch.Tensor
    description: Any


class TakenApart:
    """A state as a skeleton and the tensors that were in it; nothing is copied but what is no tensor.

    Args:
        state: dicts, lists and tuples; tensors of this rank, DTensors, and values.

    Attributes:
        skeleton: the state, with numbers for the tensors; those without elements are in it themselves.
        sources: the tensors, each once.
        values: how many leaves are no tensors.
        value_bytes: how long their pickles will be, about.

    Raises:
        TypeError: a tensor is of a kind that is not stored; names it.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.sources: list[torch.Tensor] = []
        self.values = self.value_bytes = 0
        self._known: dict[Any, _At] = {}
        self.skeleton = self._take(state, "")

    def _take(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in PLAIN_TYPES:
            return self._tensor(value, path)
        if kind in (dict, OrderedDict) or isinstance(value, Mapping):
            return {key: self._take(item, f"{path}.{key}" if path else str(key)) for key, item in value.items()}
        if kind is list:
            return [self._take(item, f"{path}.{index}") for index, item in enumerate(value)]
        if isinstance(value, tuple) and kind is not torch.Size:
            items = [self._take(item, f"{path}.{index}") for index, item in enumerate(value)]
            return kind(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, torch.Tensor):
            return self._special(value, path)
        return self._value(value)

    def _value(self, value: Any) -> Any:
        self.values += 1
        self.value_bytes += _PICKLE_BYTES
        if isinstance(value, (str, bytes)) or hasattr(value, "nbytes"):
            self.value_bytes += sys.getsizeof(value) + int(getattr(value, "nbytes", 0))
        return value if type(value) in _UNCHANGEABLE else copy.deepcopy(value)

    def _special(self, value: torch.Tensor, path: str) -> Any:
        if isinstance(value, DTensor):
            local = local_part(value)
            part = self._tensor(local if type(local) in PLAIN_TYPES else value.to_local(), path)
            return _Spread(part, description_of(value))
        return self._tensor(value, path)

    def _tensor(self, value: torch.Tensor, path: str) -> _At | torch.Tensor:
        value = tensor_with_data(value, path)
        if not value.numel():
            return torch.empty(value.shape, dtype=value.dtype)
        identity = memory_identity(value, value, path)
        known = self._known.get(identity)
        if known is None:
            known = self._known[identity] = _At(len(self.sources))
            self.sources.append(value.detach() if value.requires_grad else value)
        return known


def fill(skeleton: Any, tensor_of: Callable[[int], torch.Tensor]) -> Any:
    """A state again: containers of its own, with tensors for the numbers."""
    kind = type(skeleton)
    if kind is _At:
        return tensor_of(skeleton.index)
    if kind is dict:
        return {key: fill(item, tensor_of) for key, item in skeleton.items()}
    if kind is list:
        return [fill(item, tensor_of) for item in skeleton]
    if kind is _Spread:
        return described_by(skeleton.description, fill(skeleton.local, tensor_of))
    if isinstance(skeleton, tuple) and kind is not torch.Size:
        items = [fill(item, tensor_of) for item in skeleton]
        return kind(*items) if hasattr(skeleton, "_fields") else tuple(items)
    return skeleton


class StagedState(dict[str, Any]):
    """A copy of a state; see the module. While it lives its slot is not used for anything else.

    Attributes:
        stage: its tensors that are not empty, and `items.BYTES_ENTRY`; None if there was no memory for it, or in
            another process.
        skeleton: see `TakenApart`.
    """

    def __init__(
        self, skeleton: Any, stage: Stage | None, content: dict[str, Any], held: HeldSlot | None = None
    ) -> None:
        super().__init__(content)
        self.skeleton, self.stage, self._held = skeleton, stage, held
        self._made_on = threading.current_thread()
        self._written_on: threading.Thread | None = None

    def is_written_here(self) -> bool:
        """Whether this thread writes it, or has another process write it; DCP has a thread of its own for each save."""
        thread = threading.current_thread()
        if self._written_on is None and thread is not self._made_on:
            self._written_on = thread
        return thread is self._written_on

    @property
    def is_over(self) -> bool:
        """Whether its save has ended, although somebody still has it: the error of a save, say."""
        return self._written_on is not None and not self._written_on.is_alive()

    def end(self) -> None:
        """Frees its slot for the next save, if no checkpoint was made of it: call it once `is_over`."""
        if self._held is not None:
            self._held.container.end(self._held)

    def __reduce__(self) -> tuple[Any, ...]:
        self.is_written_here()
        stage = self.stage
        if stage is None:
            return StagedState, (None, None, dict(self))
        return _elsewhere, (stage.slot.path, stage.data_offset, stage.header.entries, self.skeleton)


def staged_in(held: HeldSlot, taken: TakenApart) -> StagedState:
    """Copies a state into a slot; when this returns, the state may change.

    Args:
        held: a slot that was taken with the layout of `items.CachedLayout.of_copy`.
        taken: the state.

    Raises:
        ValueError: the slot is not for this layout.
    """
    stage = held.stage
    if stage is None:
        raise ValueError("the slot was released already")
    tensors_only(stage).copy(taken.sources)
    with _lock:
        _copies.add(held)
    return StagedState(taken.skeleton, stage, fill(taken.skeleton, stage.places.__getitem__), held)


def not_staged(taken: TakenApart, why: NotSaved) -> StagedState:
    """A state without data, which every rank plans, and nobody writes; see `skip_mark_in`."""

    def shape(index: int) -> torch.Tensor:
        return torch.empty(taken.sources[index].shape, dtype=taken.sources[index].dtype, device="meta")

    skip_mark = _SKIPPED + json.dumps([why.reason, why.because, why.rank])
    return StagedState(None, None, {**fill(taken.skeleton, shape), skip_mark: None})


def skip_mark_in(names: Iterable[str]) -> tuple[str, NotSaved] | None:
    """The name among those of a plan that says that there was no memory for a copy, and what it says."""
    for name in names:
        if name.startswith(_SKIPPED):
            return name, NotSaved(*json.loads(name.removeprefix(_SKIPPED)))
    return None


def tensors_only(stage: Stage) -> Stage:
    """The same without the place for pickles behind the tensors."""
    return replace(stage, header=replace(stage.header, entries=stage.header.entries[:-1]), places=stage.places[:-1])


def find_copy(tensors: Sequence[torch.Tensor]) -> HeldSlot | None:
    """The slot with the copy of a state in which the first of these tensors lies, in this process."""
    address = next((tensor.data_ptr() for tensor in tensors if tensor.numel() and not tensor.is_cuda), None)
    if address is None:
        return None
    for held, stage in _waiting():
        memory = stage.slot.memory
        if 0 <= address - memory.data_ptr() < memory.numel():
            return held
    return None


def copied_bytes() -> int:
    """How large the largest copy is that waits in this process to be written."""
    sizes = (sum(entry.size_bytes for entry in stage.header.entries[:-1]) for _, stage in _waiting())
    return max(sizes, default=0)


_lock = threading.Lock()
_copies: weakref.WeakSet[HeldSlot] = weakref.WeakSet()


def _waiting() -> list[tuple[HeldSlot, Stage]]:
    """The copies of which no shard was made yet."""
    with _lock:
        return [(held, held.stage) for held in _copies if held.stage is not None and not held.is_used]


def mapped(path: Path) -> torch.Tensor:
    """The file of a slot, also of another process; mapped as long as the tensor lives. Raises: CheckpointError."""
    with explained("map memory for the checkpoint", path):
        return torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)


def _elsewhere(path: Path, data_offset: int, entries: Sequence[Entry], skeleton: Any) -> StagedState:
    """The copy, in the process that it was sent to."""
    memory = mapped(path)
    return StagedState(skeleton, None, fill(skeleton, lambda at: tensor_at(memory, data_offset, entries[at])))
