"""What is large in a training state, as it was: weights, their gradients, and what optimizers have beside them.

All of it is copied at once into memory that is kept from step to step. What comes back is first which memory a tensor
has (a step may have exchanged it, `p.data = other`), then which values are where in an optimizer's state, then bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from torchelastic.inventory.attributes import CHANGEABLE, Restore, kept_value, put_mapping, put_tensor
from torchelastic.inventory.copies import CopyMemory, TensorCopies
from torchelastic.torch_internals.tensors import copy_each, version_of

#: Classes of tensors whose memory can be exchanged, and copied all at once.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class _Memory:
    """Copies of certain tensors, one behind the other, and where these have what was copied.

    Attributes:
        holder: of the copies; None: there was none.
        odd: those of the tensors that are not copied like this: of classes of their own, or not dense.
        copies: the bytes of all others, by device.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.holder: weakref.ref[KeptWeights] | None = None
        self._given = list(tensors)
        self.odd = [one for one in tensors if not _is_dense(one)]
        self._tensors = [one for one in tensors if _has_memory(one)]
        self._insides = [one.detach() for one in self._tensors]
        self._addresses = [one.data_ptr() for one in self._tensors]
        self._parts: dict[torch.device, list[torch.Tensor]] = {}
        for one in self._insides:
            if one.numel() and _is_dense(one):
                self._parts.setdefault(one.device, []).append(_bytes_of(one))
        self.copies = {device: torch.cat(parts) for device, parts in self._parts.items()}

    @property
    def is_free(self) -> bool:
        """Whether nobody holds the copies any more."""
        return self.holder is None or self.holder() is None

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether it is for these, and they are still where they were."""
        return (
            len(tensors) == len(self._given)
            and all(map(is_, tensors, self._given))
            and [one.data_ptr() for one in self._tensors] == self._addresses
        )

    def fill(self) -> None:
        """Copy what the tensors have now."""
        for device, parts in self._parts.items():
            torch.cat(parts, out=self.copies[device])

    def put(self) -> None:
        """The tensors have the memory that they had, and what was in it."""
        for tensor, inside, address in zip(self._tensors, self._insides, self._addresses, strict=True):
            if tensor.data_ptr() != address or tensor.shape != inside.shape:
                tensor.data = inside
        for device, parts in self._parts.items():
            copied = list(torch.split(self.copies[device], [one.numel() for one in parts]))
            if not copy_each(parts, copied):
                for part, before in zip(parts, copied, strict=True):
                    part.copy_(before)


@dataclass
class KeptWeights:
    """Weights and optimizers as they were; valid as long as this object is kept.

    Attributes:
        memory: what most tensors held.
        odd: what the others held.
        parameters: each parameter.
        gradients: of each parameter, as an object; empty: gradients are left alone.
        versions: of those gradients: what is another where one was changed in place.
        copies: of those gradients that are there; None: they were not copied.
        contents: mappings, such as an optimizer's state, each with what was in it.
        others: what puts back the rest.
    """

    memory: _Memory
    odd: TensorCopies
    parameters: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor | None]
    versions: Sequence[int]
    copies: TensorCopies | None
    contents: Sequence[tuple[Any, Mapping[Any, Any]]]
    others: Sequence[Restore]

    @property
    def bytes(self) -> int:
        """How much memory it takes."""
        copies = () if self.copies is None else self.copies.tensors
        return sum(one.nbytes for one in (*self.memory.copies.values(), *self.odd.tensors, *copies))

    @property
    def have_changed_gradients(self) -> bool:
        """Whether those that were there are other ones now: something adds to them from one step to the next."""
        return self.versions != _versions(self.gradients)

    @torch.no_grad()
    def put(self) -> bool:
        """All of it is as it was. Does not raise for anything that a step can do.

        Returns:
            False: there were gradients, which were not copied and were changed in place; there are none now.
        """
        for mapping, content in self.contents:
            put_mapping(mapping, content)
        self.memory.put()
        for tensor, before in zip(self.memory.odd, self.odd.tensors, strict=True):
            put_tensor(tensor, before)
        for restore in self.others:
            restore()
        copies = iter(() if self.copies is None else self.copies.tensors)
        are_whole = self.copies is not None or not self.have_changed_gradients
        for parameter, gradient in zip(self.parameters, self.gradients, strict=False):
            if gradient is not None and self.copies is not None:
                put_tensor(gradient, next(copies))
            parameter.grad = gradient if are_whole else None
        return are_whole


class WeightCopier:
    """Copies weights and optimizers before a step. On the training thread.

    Attributes:
        with_gradients: copy gradients, too; else they are kept as they are, which is enough where a step begins with
            dropping them.
    """

    def __init__(self) -> None:
        self.with_gradients = True
        self._given: list[torch.Tensor] = []
        self._own: list[torch.Tensor] = []
        self._memories: list[_Memory] = []
        self._odd_memory, self._gradient_memory = CopyMemory(), CopyMemory()

    @torch.no_grad()
    def copy(
        self,
        parameters: Iterable[torch.Tensor],
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        leaves_gradients: bool = False,
    ) -> KeptWeights:
        """As they are now.

        Args:
            parameters: of the model, of the optimizers or both; those that have no size yet are left alone.
            optimizers: with their state.
            leaves_gradients: gradients are not put back.
        """
        own = self._that_change(list(parameters))
        tensors, contents, others = list(own), list[tuple[Any, Mapping[Any, Any]]](), list[Restore]()
        for optimizer in optimizers:
            mappings = _mappings_of(optimizer)
            contents += [(mapping, dict(mapping)) for mapping in mappings]
            for value in _values_in(mappings):
                if isinstance(value, torch.Tensor):
                    tensors.append(value)
                elif type(value) in CHANGEABLE:
                    others += kept_value(value, is_limited=False)
        memory = self._copied(tensors)
        odd = self._odd_memory.of(memory.odd)
        gradients = [] if leaves_gradients else [one.grad for one in own]
        copies = None
        if gradients and self.with_gradients:
            copies = self._gradient_memory.of([one for one in gradients if one is not None])
        kept = KeptWeights(memory, odd, own, gradients, _versions(gradients), copies, contents, others)
        memory.holder = weakref.ref(kept)
        return kept

    def needed_bytes(self, parameters: Iterable[torch.Tensor], optimizers: Iterable[torch.optim.Optimizer]) -> int:
        """How much memory a copy takes, but for lists and the like in an optimizer's state."""
        own = self._that_change(list(parameters))
        values = [value for optimizer in optimizers for value in _values_in(_mappings_of(optimizer))]
        gradients = [one.grad for one in own] if self.with_gradients else []
        return sum(one.nbytes for one in (*own, *values, *gradients) if isinstance(one, torch.Tensor))

    def _that_change(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Each once, without those that no step can change, and those that are made by the first forward pass."""
        if len(parameters) != len(self._given) or not all(map(is_, parameters, self._given)):
            self._given = parameters
            each = {id(one): one for one in parameters}.values()
            self._own = [one for one in each if not (is_lazy(one) or one.is_inference())]
            if any(map(is_lazy, each)):
                self._given = []
        return self._own

    def _copied(self, tensors: list[torch.Tensor]) -> _Memory:
        """Copy these, into memory that nobody holds any more."""
        free = next((one for one in self._memories if one.is_free), None)
        if free is None or not free.fits(tensors):
            if free is not None:
                self._memories.remove(free)
            free = _Memory(tensors)
            self._memories.append(free)
        free.fill()
        return free

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, _: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]  # the memory of another process means nothing here


def _mappings_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Its state: by parameter, and then each parameter's by name."""
    return [optimizer.state, *(values for values in optimizer.state.values() if type(values) is dict)]


def _values_in(mappings: Sequence[Any]) -> Iterator[Any]:
    """What is in these, but for these themselves."""
    by_parameter, *inner = mappings
    return chain((one for one in by_parameter.values() if type(one) is not dict), *(one.values() for one in inner))


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether it has one piece of memory, which can be exchanged for another."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements are all that is in its piece of memory, each once, and can be copied as bytes."""
    if not _has_memory(tensor) or tensor.is_conj() or tensor.is_neg() or tensor.is_meta:
        return False
    return _in_order(tensor).is_contiguous()


def _in_order(tensor: torch.Tensor) -> torch.Tensor:
    """With its dimensions in the order in which they lie in memory (channels_last and the like)."""
    return tensor.detach().permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return _in_order(tensor).view(-1).view(torch.uint8)


def _versions(gradients: Iterable[torch.Tensor | None]) -> list[int]:
    return [version_of(one) for one in gradients if one is not None and not one.is_inference()]
