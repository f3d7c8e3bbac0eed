"""What one rank writes of a plan: its tensors and its pickles, with their names, and where they go in a shard."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pickle import UnpicklingError
from typing import Any

import torch
import xxhash
from msgspec import structs
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from torchelastic.checkpoint.compat.flashpoint.pickles import load_safely
from torchelastic.checkpoint.errors import torch_reason
from torchelastic.checkpoint.format.header import ALIGNMENT_BYTES, Entry, Header, align, place
from torchelastic.checkpoint.format.regions import Region
from torchelastic.checkpoint.format.tensor_parts import dtype_name, encode_leaf
from torchelastic.checkpoint.format.tree import NamedTensor

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
#: The place behind the tensors where the pickles go: their sizes change from save to save, and nothing moves for it.
BYTES_ENTRY = "~bytes"
#: How much a header grows by an entry for a pickle, beside its name; and by any entry with an unknown name.
_ENTRY_BYTES, _NAMED_ENTRY_BYTES = 160, 256
_MAX_KNOWN_PICKLES = 100_000


@dataclass(frozen=True)
class Resolved:
    """The items of a plan with what they hold now.

    Attributes:
        tensors: items and what they hold; not copied.
        pickles: items and the bytes that the planner made.
        names: of their entries, by position: first the tensors, then the pickles.
    """

    tensors: list[tuple[WriteItem, torch.Tensor]]
    pickles: list[tuple[WriteItem, memoryview]]
    names: list[str]

    @property
    def items(self) -> list[WriteItem]:
        """All of them, in the order of the names."""
        return [item for item, _ in self.tensors] + [item for item, _ in self.pickles]

    @property
    def pickled_bytes(self) -> int:
        """How long the pickles are, with the gaps between them."""
        return sum(align(content.nbytes, ALIGNMENT_BYTES) for _, content in self.pickles)


def resolve(plan: SavePlan, planner: SavePlanner, *, allow_pickles: bool = False) -> Resolved:
    """Asks the planner for what is to be written; copies no tensor.

    Args:
        plan: the final one of this rank.
        planner: of this save.
        allow_pickles: do not ask whether the pickles can be read without running code.

    Raises:
        TypeError: a tensor is of a kind that is not stored, or a pickle holds more than plain values; names it.
        ValueError: the planner gives a tensor of another shape than it has planned.
    """
    tensors, pickles = [], []
    for item in plan.items:
        if item.type == WriteItemType.BYTE_IO:
            content = planner.resolve_data(item)
            pickles.append((item, _checked(content, item.index.fqn, allow_pickles)))
        else:
            tensors.append((item, _planned(planner.resolve_data(item), item)))
    names = unique_names([item for item, _ in tensors] + [item for item, _ in pickles])
    return Resolved(tensors, pickles, names)


def unique_names(items: Sequence[WriteItem]) -> list[str]:
    """A name for the entry of each item: its fqn, with where it begins if there are several parts of one; pure."""
    fqns = [item.index.fqn for item in items]
    if len(set(fqns)) == len(fqns):
        return fqns
    often, taken, names = Counter(fqns), set(fqns), []
    for item, fqn in zip(items, fqns, strict=True):
        name = fqn
        if often[fqn] > 1:
            name = base = f"{fqn}@{','.join(map(str, item.index.offset or ()))}"
            number = 2
            while name in taken:
                name, number = f"{base}~{number}", number + 1
            taken.add(name)
        names.append(name)
    return names


def tensor_with_data(value: torch.Tensor, name: str) -> torch.Tensor:
    """The plain tensor in which the data of a strided one lie, or of a part of one.

    Raises:
        TypeError: there are none, or it is of a kind that is not stored; names it.
    """
    is_plain = type(value) in PLAIN_TYPES and value.layout is torch.strided and not value.is_quantized
    if is_plain and not (value.is_meta or value.is_nested) and (value.data_ptr() or not value.numel()):
        return value
    leaf = encode_leaf(value, name)  # says what is wrong with it
    if len(leaf.parts) != 1 or leaf.recipe["kind"] not in ("strided", "shard"):
        raise TypeError(f"the tensor {name!r} is quantised or sparse: save it dequantised, or with to_dense()")
    return leaf.parts[0].tensor


def _planned(value: Any, item: WriteItem) -> torch.Tensor:
    fqn = item.index.fqn
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"the planner gives a {type(value).__name__} for the tensor {fqn!r}")
    tensor, sizes = tensor_with_data(value, fqn), _chunk(item).sizes
    if tensor.shape != sizes:
        raise ValueError(f"{fqn!r} was planned with {tuple(sizes)} elements, and is {tuple(tensor.shape)} now")
    return tensor.detach()


def _chunk(item: WriteItem) -> Region:
    data = item.tensor_data
    if data is None:
        raise ValueError(f"the planner says nothing of the shape of {item.index.fqn!r}")
    return (
        Region.whole(data.size) if data.chunk is None else _region(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    )


@lru_cache(maxsize=65536)
def _region(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Region:
    return Region(offsets, sizes)


# --- pickles ----------------------------------------------------------------------------------------------------------

#: Digests of pickles that were found to hold plain values only: most do not change from save to save.
_plain_pickles: set[bytes] = set()


def _checked(content: Any, fqn: str, allow_pickles: bool) -> memoryview:
    if not isinstance(content, io.BytesIO):
        raise TypeError(f"the planner gives a {type(content).__name__} for {fqn!r}: it must be an io.BytesIO")
    # not getbuffer(): where the error of a failed save keeps both in a cycle, Python 3.12.1's garbage collector crashes
    view = memoryview(content.getvalue())
    if allow_pickles:
        return view
    digest = xxhash.xxh3_128_digest(view)
    if digest not in _plain_pickles:
        try:
            load_safely(io.BytesIO(view))
        except (UnpicklingError, RuntimeError, ValueError, EOFError, TypeError, AttributeError) as error:
            raise TypeError(
                f"{fqn!r} is an object whose pickle may run code when it is read: save plain values and tensors, such "
                "as a state_dict(), or give allow_pickles=True to the MemoryStorageWriter and to the "
                f"MemoryStorageReader ({torch_reason(error)})"
            ) from error
        if len(_plain_pickles) >= _MAX_KNOWN_PICKLES:
            _plain_pickles.clear()
        _plain_pickles.add(digest)
    return view


# --- layout -----------------------------------------------------------------------------------------------------------


class CachedLayout:
    """Lays out what one rank saves again and again: what is as last time is not worked out anew. For any threads.

    The tensors stand in front, as they are every time, and behind them is room for the pickles.
    """

    def __init__(self) -> None:
        self._last: tuple[list[Any], Header] | None = None
        self._pickled_bytes = 0

    def of_items(self, resolved: Resolved) -> Header:
        """The layout for the items of a plan: an entry per tensor, and `BYTES_ENTRY`."""
        chunks = [_chunk(item) for item, _ in resolved.tensors]
        forms = [
            (name, tensor.dtype, item.tensor_data.size if item.tensor_data else None, chunk)
            for (item, tensor), name, chunk in zip(resolved.tensors, resolved.names, chunks, strict=False)
        ]
        reserve_bytes = sum(_ENTRY_BYTES + 6 * len(name) for name in resolved.names[len(forms) :])

        def tensors() -> Iterator[NamedTensor]:
            for (item, tensor), (name, _, size, chunk) in zip(resolved.tensors, forms, strict=True):
                yield NamedTensor(name, tensor, tuple(size or ()), chunk, item.type == WriteItemType.SHARD)

        return self._lay_out(forms, tensors, resolved.pickled_bytes, reserve_bytes)

    def of_copy(self, sources: Sequence[torch.Tensor], values: int, value_bytes: int) -> Header:
        """The layout for a copy of a state: an entry per tensor, by number, and `BYTES_ENTRY`.

        Args:
            sources: the tensors, none of them empty.
            values: how many other values there are in the state.
            value_bytes: how long their pickles will be, about.
        """
        forms = [(tensor.shape, tensor.dtype) for tensor in sources]

        def tensors() -> Iterator[NamedTensor]:
            for index, tensor in enumerate(sources):
                yield NamedTensor(str(index), tensor, tuple(tensor.shape), Region.whole(tensor.shape))

        reserve_bytes = _NAMED_ENTRY_BYTES * (len(sources) + values)
        return self._lay_out(forms, tensors, max(value_bytes, self._pickled_bytes), reserve_bytes)

    def needed(self, pickled_bytes: int) -> None:
        """So long were the pickles of a copy really: next time there is room for them."""
        self._pickled_bytes = max(self._pickled_bytes, pickled_bytes)

    def _lay_out(
        self, forms: list[Any], tensors: Callable[[], Iterable[NamedTensor]], pickled_bytes: int, reserve_bytes: int
    ) -> Header:
        """The layout of last time, unless the tensors have other forms now, or the room behind or before them is wrong.

        Args:
            forms: what has to be equal for that.
            tensors: what is laid out if it is not.
            pickled_bytes: how long the pickles are.
            reserve_bytes: how much longer the header becomes by their entries: the slot keeps that free for it.
        """
        last = self._last
        if last is not None and forms == last[0]:
            capacity, reserved = last[1].entries[-1].size_bytes, len(last[1].meta["reserved"])
            is_wasteful = capacity > 4 * pickled_bytes + 2**20
            if pickled_bytes <= capacity and not is_wasteful and reserve_bytes <= reserved:
                return last[1]
        entries = place(tensors())
        capacity = align(pickled_bytes * 5 // 4, 4096) if pickled_bytes else 0
        end = max((entry.offset_bytes + entry.size_bytes for entry in entries), default=0)
        room = Entry.of_bytes(BYTES_ENTRY, capacity, align(end, ALIGNMENT_BYTES))
        header = Header(None, (*entries, room), {"reserved": " " * (reserve_bytes * 5 // 4)})
        self._last = forms, header
        return header


def entries_of_pickles(resolved: Resolved, room: Entry) -> list[Entry]:
    """The entries of the pickles, one behind the other, beginning where `BYTES_ENTRY` does."""
    entries, offset = [], room.offset_bytes
    for (_, content), name in zip(resolved.pickles, resolved.names[len(resolved.tensors) :], strict=True):
        entries.append(Entry.of_bytes(name, content.nbytes, offset))
        offset = align(offset + content.nbytes, ALIGNMENT_BYTES)
    return entries


def entries_in_place(resolved: Resolved, layout: Header, data_begin: int) -> tuple[list[Entry], list[str]] | None:
    """The entries of a plan whose tensors lie in a copy of the state already, if they are exactly what is in it.

    Args:
        resolved: the items.
        layout: of the copy: its tensors that are not empty, and `BYTES_ENTRY`.
        data_begin: the address of its data.

    Returns:
        The entries without those of pickles, in the order of their bytes, what is empty at the end; and the name of
        the entry of each tensor's item. None if the plan wants less, more or other things than what lies there.
    """
    at = {entry.offset_bytes: index for index, entry in enumerate(layout.entries[:-1])}
    found: list[Entry | None] = [None] * len(at)
    empty, entry_names = [], []
    for (item, tensor), name in zip(resolved.tensors, resolved.names, strict=False):
        chunk, shape = _chunk(item), tuple(item.tensor_data.size) if item.tensor_data else ()
        entry = Entry(name, dtype_name(tensor.dtype), shape, chunk, 0, 0, is_shard=item.type == WriteItemType.SHARD)
        entry_names.append(name)
        if not tensor.numel():
            empty.append(entry)
            continue
        index = at.get(tensor.data_ptr() - data_begin)
        if index is None or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
        there, first = layout.entries[index], found[index]
        entry = structs.replace(entry, offset_bytes=there.offset_bytes, size_bytes=there.size_bytes)
        if there.size_bytes != tensor.numel() * tensor.element_size():
            return None
        if first is None:
            found[index] = entry
        elif structs.replace(entry, name=first.name) == first:
            entry_names[-1] = first.name  # one tensor under two names
        else:
            return None
    complete = [entry for entry in found if entry is not None]
    if len(complete) < len(found):
        return None
    return [*complete, *empty], entry_names
