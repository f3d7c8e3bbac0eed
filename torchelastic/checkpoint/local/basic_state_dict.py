"""The state of nested dicts, lists and tuples."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from torchelastic.checkpoint.local.base_state_dict import TensorAwareStateDict, TensorPlaceholder
from torchelastic.checkpoint.shards import ShardOf

Leaf = TypeVar("Leaf")
Self = TypeVar("Self", bound="BasicTensorAwareStateDict")


class BasicTensorAwareStateDict(TensorAwareStateDict):
    """Wraps a state dict: nested dicts, lists and tuples with tensors of any dtype, on any device.

    The dicts and lists are copied and the tensors are not, so nothing that is done here reaches the caller's dict or,
    through it, a live optimizer; the values of the tensors are those of training until a save or
    `copy_tensors_to_cpu` has copied them.

    Args:
        state_dict: the state; not changed, now or later.

    Attributes:
        state_dict: the own copy of the containers; holds placeholders while the object is hollow.
    """

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        self.state_dict: Any = mapped(lambda leaf: leaf, state_dict)
        self._is_hollow = False
        self._devices: tuple[torch.device, ...] = tuple(tensor.device for tensor in self.tensors)

    def pop_tensors(self) -> list[torch.Tensor]:
        """See `TensorAwareStateDict`."""
        tensors = list(self.tensors)
        self.state_dict = mapped(TensorPlaceholder.of, self.state_dict)
        self._is_hollow = True
        return tensors

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """See `TensorAwareStateDict`; a tensor that is in two places comes twice."""
        self._require(hollow=False)
        return leaves(self.state_dict, torch.Tensor)

    @property
    def is_hollow(self) -> bool:
        """See `TensorAwareStateDict`."""
        return self._is_hollow

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """See `TensorAwareStateDict`."""
        self._require(hollow=True)
        given = list(tensor_data)
        places = list(leaves(self.state_dict, TensorPlaceholder))
        if len(given) != len(places):
            raise ValueError(f"{len(given)} tensors for {len(places)} places: give as many as pop_tensors returned")
        source = iter(given)
        self.state_dict = mapped(lambda _: next(source), self.state_dict, TensorPlaceholder)
        self._is_hollow = False

    def init_tensors(self) -> None:
        """See `TensorAwareStateDict`."""
        self._require(hollow=True)
        self.state_dict = mapped(TensorPlaceholder.init_tensor, self.state_dict, TensorPlaceholder)
        self._is_hollow = False

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """See `TensorAwareStateDict`; what is on the CPU is copied too, so later training steps do not show."""
        self._require(hollow=False)
        self._replace(lambda tensor: tensor.detach().to("cpu", non_blocking=non_blocking, copy=True))

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """See `TensorAwareStateDict`; each tensor goes back to its own device."""
        self._require(hollow=False)
        device_of = {id(tensor): device for tensor, device in zip(self.tensors, self._devices, strict=True)}
        self._replace(lambda tensor: _moved(tensor, device_of[id(tensor)], non_blocking))

    def to_tree(self) -> Any:
        """The state dict."""
        self._require(hollow=False)
        return self.state_dict

    @classmethod
    def from_tree(cls: type[Self], tree: Any, devices: Sequence[torch.device]) -> Self:
        """See `TensorAwareStateDict`."""
        made = cls(tree)
        if len(devices) == len(made._devices):
            made._devices = tuple(devices)
        return made

    def _replace(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces all tensors; one that is in two places is one afterwards too."""
        done: dict[int, torch.Tensor] = {}

        def replaced(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in done:
                done[id(tensor)] = change(tensor)
            return done[id(tensor)]

        self.state_dict = mapped(replaced, self.state_dict)

    def _require(self, *, hollow: bool) -> None:
        if self._is_hollow != hollow:
            raise RuntimeError(
                "the tensors of this state are still in it: pop_tensors() first"
                if hollow
                else "the tensors of this state were taken out: insert_tensors() or init_tensors() first"
            )


def mapped(change: Callable[[Any], Any], value: Any, kind: type = torch.Tensor) -> Any:
    """A tree with new containers of the same types, in which each leaf of a kind is changed; the given one stays."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, ShardOf):
        return dataclasses.replace(value, tensor=mapped(change, value.tensor, kind))
    if isinstance(value, dict):
        changed = copy.copy(value)  # keeps the type, and what is attached to it
        for key, item in value.items():
            changed[key] = mapped(change, item, kind)
        return changed
    if isinstance(value, list):
        return [mapped(change, item, kind) for item in value]
    if isinstance(value, tuple):
        items = [mapped(change, item, kind) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def leaves(value: Any, kind: type[Leaf]) -> Iterator[Leaf]:
    """The leaves of a kind, in the order in which `mapped` visits them."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, ShardOf):
        yield from leaves(value.tensor, kind)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item, kind)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item, kind)


def _moved(tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
    if device.type not in ("cpu", "meta"):
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or accelerator.type != device.type:
            return tensor
    if tensor.device == device:
        return tensor
    moved = tensor.detach().to(device, non_blocking=non_blocking)  # autograd is to know nothing of it
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(moved, tensor.requires_grad)
    return moved.requires_grad_(tensor.requires_grad)
