"""What is large in a training state, as it was: weights, their gradients, and what optimizers have beside them.

All of it is copied at once into memory that is kept from step to step. What comes back is first which values are where
in an optimizer's state, then which memory each tensor has, then its bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from torchelastic.inventory.attributes import CHANGEABLE, Restore, kept_value, put_mapping
from torchelastic.inventory.copies import CopyMemory, TensorCopies
from torchelastic.inventory.inner_optimizers import with_inner
from torchelastic.torch_internals.tensors import version_of


@dataclass
class KeptWeights:
    """Weights and optimizers as they were; valid as long as this object is kept.

    Attributes:
        tensors: parameters and the state of optimizers.
        parameters: each parameter.
        gradients: of each parameter, as an object; empty: gradients are left alone.
        versions: of those gradients: what is another where one was changed in place.
        of_gradients: copies of those; None: they were not copied.
        contents: mappings, such as an optimizer's state, each with what was in it.
        others: what puts back the rest.
    """

    tensors: TensorCopies
    parameters: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor | None]
    versions: Sequence[int]
    of_gradients: TensorCopies | None
    contents: Sequence[tuple[Any, Mapping[Any, Any]]]
    others: Sequence[Restore]

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
        self.tensors.put()
        for restore in self.others:
            restore()
        are_whole = self.of_gradients is not None or not self.have_changed_gradients
        if self.of_gradients is not None:
            self.of_gradients.put()
        for parameter, gradient in zip(self.parameters, self.gradients, strict=False):
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
        self._memory, self._gradient_memory = CopyMemory(), CopyMemory(are_new=True)

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
        for optimizer in with_inner(optimizers):
            mappings = _mappings_of(optimizer)
            contents += [(mapping, dict(mapping)) for mapping in mappings]
            for value in _values_in(mappings):
                if isinstance(value, torch.Tensor):
                    tensors.append(value)
                elif type(value) in CHANGEABLE:
                    others += kept_value(value, is_limited=False)
        copies = self._memory.of(tensors)
        gradients = [] if leaves_gradients else [one.grad for one in own]
        of_gradients = None
        if gradients and self.with_gradients:
            of_gradients = self._gradient_memory.of([one for one in gradients if one is not None])
        return KeptWeights(copies, own, gradients, _versions(gradients), of_gradients, contents, others)

    def needed_bytes(self, parameters: Iterable[torch.Tensor], optimizers: Iterable[torch.optim.Optimizer]) -> int:
        """How much memory a copy takes, but for lists and the like in an optimizer's state."""
        own = self._that_change(list(parameters))
        values = [value for optimizer in with_inner(optimizers) for value in _values_in(_mappings_of(optimizer))]
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


def _versions(gradients: Iterable[torch.Tensor | None]) -> list[int]:
    return [version_of(one) for one in gradients if one is not None and not one.is_inference()]
