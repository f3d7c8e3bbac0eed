"""Averages of the weights that callbacks keep, as parts of a training state: undone with a step, sent, saved.

Found by their form, since each of them is written otherwise: a copy of the module or of a part of it (an
`AveragedModel`), an object with a state of such tensors (torch_ema's), tensors by name; in an attribute of the
callback, or of a plain object that it has there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from torchelastic.errors import UnfitError
from torchelastic.model.one_or_many import is_stateful
from torchelastic.torch_internals.tensors import tree_flatten

#: What is of these is no plain object of the user's, and is not looked into.
_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "torchmetrics", "builtins", "numpy", "pathlib")


class AveragePlace(NamedTuple):
    """Where an average is; the same on all ranks.

    Attributes:
        number: of the callback in the trainer.
        callback: its class.
        path: the attribute, or the attribute of an object in one.
    """

    number: int
    callback: str
    path: str

    @property
    def attribute(self) -> str:
        """Of the callback."""
        return self.path.partition(".")[0]

    @property
    def name(self) -> str:
        """In `extra`."""
        return f"lightning_average_{self.callback}_{self.number}_{self.path}"


def averages_of(callbacks: Iterable[Any], module: torch.nn.Module) -> dict[AveragePlace, Any]:
    """What the callbacks keep of the weights; each has `state_dict` and `load_state_dict`.

    Args:
        callbacks: in the order of the trainer.
        module: that is trained.
    """
    known = _Known(module)
    found: dict[AveragePlace, Any] = {}
    for number, callback in enumerate(callbacks):
        for name, value in sorted(vars(callback).items()):
            for path, owner, key, one in _with_inner(callback, name, value):
                average = known.average_in(owner, key, one)
                if average is not None:
                    found[AveragePlace(number, type(callback).__name__, path)] = average
    return found


def require_all_known(known: Iterable[AveragePlace], callbacks: Iterable[Any], module: torch.nn.Module) -> None:
    """Raise UnfitError for an average that a callback has made since the training has begun."""
    for place in averages_of(callbacks, module).keys() - set(known):
        raise UnfitError(
            f"the callback {place.callback} has made what looks like an average of the weights in its attribute "
            f"{place.path} since the training began, and no worker that joins would get it: make it in setup or "
            "on_fit_start"
        )


class TensorsOf:
    """A mapping or a list of tensors in an attribute, as a part of a training state.

    Args:
        owner: of the attribute.
        name: of it.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name

    def state_dict(self) -> dict[str, Any]:
        """The tensors, not copied."""
        value = getattr(self._owner, self._name)
        return {"tensors": dict(value) if isinstance(value, Mapping) else list(value)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse; other tensors are there then."""
        value, tensors = getattr(self._owner, self._name), state["tensors"]
        if isinstance(value, dict):
            before = dict(value)
            value.clear()
            value.update({name: _copy_for(one, before.get(name, one)) for name, one in tensors.items()})
        else:
            value[:] = [_copy_for(one, old) for one, old in zip(tensors, value, strict=True)]


class _Known:
    """What a value is compared with."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._parts = set(map(id, module.modules()))
        self._weights = set(map(id, module.parameters()))
        self._shapes = {one.shape for one in module.parameters()}

    def average_in(self, owner: Any, name: str, value: Any) -> Any:
        """The value, or what stands for it; None: it is no average."""
        if isinstance(value, torch.nn.Module):
            return value if id(value) not in self._parts and self._are_weights(value.parameters()) else None
        if isinstance(value, (dict, list)):
            tensors = value.values() if isinstance(value, dict) else value
            return TensorsOf(owner, name) if self._are_weights(tensors) else None
        if is_stateful(value) and not isinstance(value, torch.optim.Optimizer):
            tensors = [leaf for leaf in tree_flatten(value.state_dict())[0] if isinstance(leaf, torch.Tensor)]
            return value if self._are_weights(tensors) else None
        return None

    def _are_weights(self, tensors: Iterable[Any]) -> bool:
        """Whether these are tensors, some, and each of the shape of a weight; but not the weights themselves."""
        all_of_them = list(tensors)
        return bool(all_of_them) and all(
            isinstance(one, torch.Tensor) and one.shape in self._shapes and id(one) not in self._weights
            for one in all_of_them
        )


def _with_inner(callback: Any, name: str, value: Any) -> Iterator[tuple[str, Any, str, Any]]:
    """An attribute, and those of a plain object that it holds: the path, who has it, its name there, and the value."""
    yield name, callback, name, value
    is_plain = type(value).__module__.partition(".")[0] not in _LIBRARIES and not hasattr(value, "state_dict")
    if is_plain and not isinstance(value, type) and hasattr(value, "__dict__"):
        for inner, one in sorted(vars(value).items()):
            yield f"{name}.{inner}", value, inner, one


def _copy_for(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A copy where another tensor is."""
    return tensor.detach().to(other.device, copy=True)
