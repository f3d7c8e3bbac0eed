"""What goes into a model and comes out of it in one computation, in order: whose data differ is not compared further.

A worker computes wrong if its model gives something else for the same input, or hands other gradients on for the same
ones. What stands around the model, such as an augmentation or a loss, may depend on what only the script knows, a
generator of its own: so other inputs, or other gradients that come back from the loss, say nothing of a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from torchelastic.model.digest import as_word, begun_digest, leaves_of

#: So many inputs, outputs and gradients of a computation are told apart.
MOST = 64


class Trail:
    """Of one computation; on the training thread."""

    def __init__(self) -> None:
        self._events: list[tuple[bool, Callable[[], int]]] = []

    def called(self, call: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Call the model, and note what it gets and gives."""
        if not torch.is_grad_enabled():
            return call(*args, **named)
        self._note([list(args), dict(named)], is_given=True)
        output = call(*args, **named)
        self._note(output, is_given=False)
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._note, is_given=True))  # type: ignore[no-untyped-call]  # torch has no types here
        return output

    def words(self) -> list[int]:
        """For a message: as many on each rank; 0 where there is nothing."""
        found = [as_word(end() << 1 | is_given) for is_given, end in self._events]
        return [*found, *[0] * (MOST - len(found))]

    def _note(self, values: Any, *, is_given: bool) -> None:
        if len(self._events) < MOST:
            self._events.append((is_given, begun_digest([("", one.detach()) for one in tensors_in(values)])))


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Those of a nested structure, also of a dataclass of outputs, as Transformers has them, and the like."""
    if not isinstance(values, (torch.Tensor, Mapping, list, tuple)) and hasattr(values, "__dict__"):
        values = vars(values)
    return [leaf for _, leaf in leaves_of(values) if isinstance(leaf, torch.Tensor)]


def were_given_others(trails: Sequence[Sequence[int]]) -> bool:
    """Whether what differs first is what the model was given; false: nothing differs, or what it has given. Pure.

    >>> were_given_others([[3, 4, 0], [5, 4, 0]]), were_given_others([[3, 4, 7], [3, 6, 9]])
    (True, False)
    """
    for words in zip(*trails, strict=True):
        if len(set(words)) > 1:
            return any(word & 1 for word in words)
    return False
