"""Copies of tensors in memory that is used again, once nobody holds the copies that are in it any more.

Most tensors stay where they are from step to step, as weights do: these are copied as bytes, one behind the other, all
at once, which takes a third of a microsecond for each. Those that are others in each step, or are not dense, or of a
class of their own, are copied one by one, into memory of their kind. Of one that is made of others (the state of an
8-bit optimizer) those are copied, byte by byte: what its class does with a copy may be something else.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch

from torchelastic.inventory.attributes import put_tensor
from torchelastic.torch_internals.tensors import copy_all, tensors_within, with_inner_tensors

#: Classes of tensors whose memory can be exchanged, and copied as bytes.
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_KNOWN = frozenset(_PLAIN)


class TensorCopies:
    """Copies of some tensors; valid as long as this object is kept. On the thread that has made them."""

    __slots__ = ("__weakref__", "_insides", "_loose", "_made", "_of_loose", "_settled")

    def __init__(
        self,
        settled: _Settled | None,
        loose: Sequence[torch.Tensor],
        of_loose: Sequence[torch.Tensor],
        insides: Sequence[torch.Tensor | None],
        made: Sequence[MadeOfTensors],
    ) -> None:
        self._settled, self._loose, self._of_loose, self._insides = settled, loose, of_loose, insides
        self._made = made

    @torch.no_grad()
    def put(self) -> None:
        """The tensors have the memory, the shapes and the bytes that they had. Does not raise for what a step can do.

        Memory is exchanged first (`p.data = other`): what is put back must not be written into another tensor's.
        """
        for one in self._made:
            one.put()
        if self._settled is not None:
            self._settled.put()
        for tensor, inside, before in zip(self._loose, self._insides, self._of_loose, strict=True):
            if inside is not None:
                _exchange(tensor, inside, inside.data_ptr())
            put_tensor(tensor, before)

    @property
    def bytes(self) -> int:
        """How much memory they take."""
        settled = () if self._settled is None else self._settled.copies.values()
        return sum(one.nbytes for one in (*settled, *self._of_loose))

    @property
    def settled(self) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Tensors whose bytes lie one behind the other, in this order, and the memory that they lie in, by device.

        The first is the same object as long as the tensors stay where they are.
        """
        return ((), ()) if self._settled is None else (self._settled.in_order, list(self._settled.copies.values()))

    @property
    def loose(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Those that were copied one by one, each with its copy."""
        return list(zip(self._loose, self._of_loose, strict=True))

    def by_tensor(self) -> dict[int, torch.Tensor]:
        """What each tensor was, by its id, in memory of its own."""
        found = {id(one): before.clone() for one, before in zip(self._loose, self._of_loose, strict=True)}
        if self._settled is not None:
            found |= self._settled.by_tensor()
        for made in reversed(self._made):  # what one is made of comes behind it
            found[id(made.tensor)] = made.of(found)
        return found


@dataclass(frozen=True)
class MadeOfTensors:
    """A tensor that is made of others.

    Attributes:
        tensor: it.
        inner: those, by the names of its attributes.
        context: what else it gives of itself.
    """

    tensor: torch.Tensor
    inner: Mapping[str, torch.Tensor]
    context: Any

    def put(self) -> None:
        """It is made of the same ones."""
        for name, one in self.inner.items():
            if getattr(self.tensor, name, None) is not one:
                with suppress(AttributeError):  # it is computed, and cannot be set
                    setattr(self.tensor, name, one)

    def of(self, copies: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The same of copies of those, by the ids of those."""
        inner = {name: copies[id(one)] for name, one in self.inner.items()}
        return with_inner_tensors(self.tensor, inner, self.context)


def taken_apart(tensors: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Sequence[MadeOfTensors]]:
    """Tensors with those that some are made of in the place of these; and these, each before what it is made of."""
    if _KNOWN.issuperset(map(type, tensors)):
        return tensors, ()
    plain: list[torch.Tensor] = []
    made: list[MadeOfTensors] = []
    for tensor in tensors:
        within = tensors_within(tensor) if hasattr(tensor, "__tensor_unflatten__") else None
        if within is None:
            plain.append(tensor)
            continue
        made.append(MadeOfTensors(tensor, *within))
        inner, deeper = taken_apart(list(within[0].values()))
        plain += inner
        made += deeper
    return plain, made


class CopyMemory:
    """Makes copies, in the memory of those that nobody holds any more. On one thread.

    Args:
        are_new: the tensors are others each time, and nobody exchanges their memory, as with gradients.
    """

    def __init__(self, *, are_new: bool = False) -> None:
        self._are_new = are_new
        self._settled: list[_Settled] = []
        self._loose: list[_Loose] = []
        self._count = 0
        #: positions of tensors that are others from one copy to the next, and of those that were at the last one
        self._restless: set[int] = set()
        self._moved: set[int] = set()

    @torch.no_grad()
    def of(self, tensors: Sequence[torch.Tensor]) -> TensorCopies:
        """Copies of these, in memory that nobody holds any more."""
        tensors, made = taken_apart(tensors)
        settled, loose = (None, tensors) if self._are_new or not tensors else self._copy_settled(tensors)
        memory = self._loose_memory(loose) if loose else None
        insides: Sequence[torch.Tensor | None] = ()
        if loose:
            insides = [one.detach() if not self._are_new and _has_memory(one) else None for one in loose]
        copies = TensorCopies(settled, loose, () if memory is None else memory.tensors, insides, made)
        holder = weakref.ref(copies)
        for held in (settled, memory):
            if held is not None:
                held.holder = holder
        return copies

    def _copy_settled(self, tensors: Sequence[torch.Tensor]) -> tuple[_Settled, list[torch.Tensor]]:
        """Copies those that stay where they are, and returns the others, too."""
        free = next((one for one in self._settled if one.is_free), None)
        if len(tensors) != self._count:
            self._count, self._restless, self._moved = len(tensors), set(), set()
        staying, others = self._parted(tensors)
        if free is not None and free.fits(staying):
            self._moved = set()
            free.fill()
            return free, [*free.odd, *others]
        if free is not None:
            self._settled.remove(free)
            if len(free.given) == len(staying):
                positions = [number for number in range(len(tensors)) if number not in self._restless]
                moved = {positions[number] for number in free.moved(staying)}
                self._restless |= moved & self._moved  # for the second time
                self._moved = moved
                staying, others = self._parted(tensors)
        settled = _Settled(staying)
        self._settled.append(settled)
        return settled, [*settled.odd, *others]

    def _parted(self, tensors: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        if not self._restless:
            return tensors, ()
        staying = [one for number, one in enumerate(tensors) if number not in self._restless]
        return staying, [tensors[number] for number in sorted(self._restless)]

    def _loose_memory(self, tensors: Sequence[torch.Tensor]) -> _Loose:
        free = next((one for one in self._loose if one.is_free), None)
        if free is None or not free.take(tensors):
            if free is not None:
                self._loose.remove(free)
            free = _Loose(tensors)
            self._loose.append(free)
        return free


class _Held:
    """Memory that somebody may hold.

    Attributes:
        holder: of the copies in it; None: there was none.
    """

    holder: weakref.ref[TensorCopies] | None = None

    @property
    def is_free(self) -> bool:
        """Whether nobody holds the copies any more."""
        return self.holder is None or self.holder() is None


class _Settled(_Held):
    """Copies of tensors that stay where they are, one behind the other.

    Attributes:
        given: the tensors.
        odd: those of them that cannot be copied as bytes.
        copies: the bytes of all others, by device.
        in_order: those others, as their bytes lie there.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.given = list(tensors)
        self.odd = [one for one in tensors if not is_dense(one)]
        self._tensors = [one for one in tensors if _has_memory(one)]
        self._insides = [one.detach() for one in self._tensors]
        self._addresses = [one.data_ptr() for one in self._tensors]
        self._dense = [number for number, one in enumerate(self._insides) if one.numel() and is_dense(one)]
        self._parts: dict[torch.device, list[torch.Tensor]] = {}
        on_devices: dict[torch.device, list[torch.Tensor]] = {}
        for number in self._dense:
            inside = self._insides[number]
            self._parts.setdefault(inside.device, []).append(bytes_of(inside))
            on_devices.setdefault(inside.device, []).append(self._tensors[number])
        self.in_order = [one for each in on_devices.values() for one in each]
        self.copies = {device: torch.cat(parts) for device, parts in self._parts.items()}

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether it is for these, and they are still where they were."""
        return (
            len(tensors) == len(self.given)
            and all(map(is_, tensors, self.given))
            and [one.data_ptr() for one in self._tensors] == self._addresses
        )

    def moved(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """The positions of those that are others, or have other memory."""
        addresses = {id(one): address for one, address in zip(self._tensors, self._addresses, strict=True)}
        return [
            number
            for number, (one, before) in enumerate(zip(tensors, self.given, strict=True))
            if one is not before or (id(one) in addresses and one.data_ptr() != addresses[id(one)])
        ]

    def fill(self) -> None:
        """Copy what the tensors have now."""
        for device, parts in self._parts.items():
            torch.cat(parts, out=self.copies[device])

    def put(self) -> None:
        """See `TensorCopies.put`."""
        for tensor, inside, address in zip(self._tensors, self._insides, self._addresses, strict=True):
            _exchange(tensor, inside, address)
        for device, parts in self._parts.items():
            copy_all(parts, torch.split(self.copies[device], [one.numel() for one in parts]))

    def by_tensor(self) -> dict[int, torch.Tensor]:
        """See `TensorCopies.by_tensor`; those that have no elements are as they are."""
        found = {id(one): inside for one, inside in zip(self._tensors, self._insides, strict=True)}
        places = dict.fromkeys(self.copies, 0)
        for number in self._dense:
            tensor, inside = self._tensors[number], self._insides[number]
            begin = places[inside.device]
            places[inside.device] = end = begin + inside.nbytes
            copied = torch.empty_like(inside)
            bytes_of(copied).copy_(self.copies[inside.device][begin:end])
            found[id(tensor)] = copied
        return found


class _Loose(_Held):
    """Copies of tensors of certain shapes and types, one by one."""

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        self.tensors = [source.detach().clone() for source in sources]
        self._kinds = _kinds(sources)

    def take(self, sources: Sequence[torch.Tensor]) -> bool:
        """Copy these into it; False: they are others, or cannot be copied so."""
        if self._kinds is None or _kinds(sources) != self._kinds:
            return False
        try:
            copy_all(self.tensors, sources)
        except (RuntimeError, NotImplementedError):
            return False
        return True


def _kinds(tensors: Sequence[torch.Tensor]) -> tuple[Collection[object], ...] | None:
    """A memory fits tensors of the same shapes and types alone: a copy would be converted without a word.

    None: there are nested tensors among them, which have no shape.
    """
    try:
        return (
            [one.shape for one in tensors],
            [one.dtype for one in tensors],
            [one.device for one in tensors],
            [type(one) for one in tensors],
            [one.layout for one in tensors],
        )
    except RuntimeError:
        return None


def _exchange(tensor: torch.Tensor, inside: torch.Tensor, address: int) -> None:
    """Have a tensor the memory that it had, which was at this address, and the shape."""
    if tensor.data_ptr() != address or tensor.shape != inside.shape or tensor.dtype != inside.dtype:
        tensor.data = inside


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether it has one piece of memory, which can be exchanged for another."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements are all that is in its piece of memory, each once, and can be copied as bytes."""
    if not _has_memory(tensor) or tensor.is_conj() or tensor.is_neg() or tensor.is_meta or tensor.is_inference():
        return False
    return _in_order(tensor).is_contiguous()


def _in_order(tensor: torch.Tensor) -> torch.Tensor:
    """With its dimensions in the order in which they lie in memory (channels_last and the like)."""
    return tensor.detach().permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor in the order in which they lie in memory, which they share."""
    return _in_order(tensor).view(-1).view(torch.uint8)
