"""Digests of what each module of a model gives, in the order of their calls: where two computations part first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torchelastic.inventory.names import named_parameters
from torchelastic.model.compute_check.trail import tensors_in
from torchelastic.model.digest import as_word, begun_digest

#: So many calls of modules, and so many gradients, are compared one by one.
MOST = 4096

#: What is compared one by one: names and digests, those of calls first and then those of gradients.
Traced = list[tuple[str, Callable[[], int]]]


class OutputTrace:
    """What one computation of a step gives on the way: of each innermost module, and each parameter's gradient.

    Args:
        module: the plain module.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._calls: Traced = []
        self._gradients: Traced = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around forward and backward passes; with hooks on modules, which `torch.compile` may leave out."""
        inner = [(name, one) for name, one in self._module.named_modules() if not any(True for _ in one.children())]
        hooks = [one.register_forward_hook(self._noting(name)) for name, one in inner]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def note_gradients(self) -> None:
        """Behind the backward pass."""
        for name, parameter in named_parameters(self._module).items():
            if parameter.grad is not None and len(self._gradients) < MOST:
                self._gradients.append((f"the gradient of {name}", begun_digest([("", parameter.grad)])))

    def digests(self) -> list[int]:
        """In an order that is the same on all ranks: 2 x MOST numbers of 64 bits, 0 where there is nothing."""
        both = (self._calls, self._gradients)
        return [number for part in both for number in _filled([as_word(end()) for _, end in part])]

    def name_of(self, place: int) -> str:
        """What stands at a place of `digests`, for people."""
        part, offset = (self._calls, 0) if place < MOST else (self._gradients, MOST)
        return part[place - offset][0] if place - offset < len(part) else "another number of calls"

    def _noting(self, name: str) -> Callable[..., None]:
        def note(module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            if torch.is_grad_enabled() and len(self._calls) < MOST:
                called = f"the output of {name or 'the model'} ({type(module).__name__})"
                self._calls.append((called, begun_digest([("", tensor) for tensor in tensors_in(output)])))

        return note


def first_difference(rows: Mapping[int, Sequence[int]]) -> int | None:
    """The first place at which rows of equal length differ; None: nowhere. Pure.

    >>> first_difference({0: [1, 2, 3], 4: [1, 5, 3]})
    1
    """
    differing = (place for place, values in enumerate(zip(*rows.values(), strict=True)) if len(set(values)) > 1)
    return next(differing, None)


def _filled(numbers: Sequence[int]) -> list[int]:
    return [*numbers[:MOST], *[0] * (MOST - len(numbers))]
