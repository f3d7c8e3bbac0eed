"""A state that knows which of its values are tensors, and how it becomes what a shard holds.

That is plain values and tensors, or a pickle where that is allowed.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar, TypeVar

import torch

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.format.header import Header
from torchelastic.checkpoint.format.layout import RecurringLayout
from torchelastic.checkpoint.format.tensor_parts import ShardOf
from torchelastic.checkpoint.format.tree import unflatten
from torchelastic.moved_modules import path_in_files

Leaf = TypeVar("Leaf")
Self = TypeVar("Self", bound="TensorAwareStateDict")
BasicSelf = TypeVar("BasicSelf", bound="BasicTensorAwareStateDict")

#: What a header says of the state besides.
_CLASS, _DEVICES = "state_class", "devices"


@dataclass(frozen=True)
class TensorPlaceholder:
    """What stays in a hollow state where a tensor was.

    Attributes:
        device: where the tensor was.
        shape: its shape.
        dtype: its type.
    """

    device: torch.device
    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorPlaceholder:
        """Describes a tensor."""
        return cls(tensor.device, tensor.shape, tensor.dtype)

    def init_tensor(self) -> torch.Tensor:
        """A tensor of this kind on its device; what is in it is anything."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class TensorAwareStateDict(ABC):
    """The interface between a local checkpoint and whoever knows how a state is built. Names and meanings are NVRx's.

    None of it is a collective. `BasicTensorAwareStateDict` is the one for nested dicts, lists and tuples. A subclass of
    your own is stored by its attributes, or as `to_tree` and `from_tree` say if it has them; it has to be defined
    (imported) in the process that loads it.
    """

    _classes: ClassVar[dict[str, type[TensorAwareStateDict]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        TensorAwareStateDict._classes[cls.class_name()] = cls

    @classmethod
    def class_name(cls) -> str:
        """What a shard says of which class its state is."""
        return f"{path_in_files(cls.__module__)}:{cls.__qualname__}"

    @staticmethod
    def class_named(name: str) -> type[TensorAwareStateDict] | None:
        """The class of that name, if it is defined in this process; nothing is imported."""
        return TensorAwareStateDict._classes.get(name)

    @abstractmethod
    def pop_tensors(self) -> list[torch.Tensor]:
        """Takes the tensors out, in order, and leaves placeholders: the state is hollow then.

        Raises:
            RuntimeError: it is hollow already.
        """

    @property
    @abstractmethod
    def tensors(self) -> Iterable[torch.Tensor]:
        """The tensors, in order. Raises: RuntimeError if the state is hollow."""

    @property
    @abstractmethod
    def is_hollow(self) -> bool:
        """Whether the tensors were taken out and not put back."""

    @abstractmethod
    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Puts tensors where placeholders are: the inverse of `pop_tensors`, in the same order.

        Raises:
            RuntimeError: the state is not hollow.
            ValueError: there are too many or too few.
        """

    @abstractmethod
    def init_tensors(self) -> None:
        """Puts uninitialised tensors where placeholders are. Raises: RuntimeError if the state is not hollow."""

    @abstractmethod
    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Replaces the tensors by copies on the CPU.

        Args:
            non_blocking: copies from a GPU may be under way when it returns; synchronise before you read them.
        """

    @abstractmethod
    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Moves the tensors back to where they were; those for which there is no device here stay on the CPU.

        Args:
            non_blocking: copies to a GPU may be under way when it returns; its own stream waits for them.
        """

    def values(self) -> Iterable[Any]:
        """The values of the instance's attributes."""
        return self.__dict__.values()

    def to_tree(self) -> Any:
        """The state as dicts, lists, tuples, plain values and tensors; it shares the tensors with this object.

        Without a method of its own a class gives its attributes, as they are after its `copy_tensors_to_cpu`: that may
        note for `restore_tensor_device` where the tensors were. It is called for a copy, which shares with this object
        what is no dict, list or tuple. What else is in there is pickled, if that is allowed.

        Raises:
            TypeError: the class has attributes in `__slots__` too, and so has to write this method and `from_tree`.
        """
        slotted = [kind.__qualname__ for kind in type(self).__mro__ if getattr(kind, "__slots__", ()) not in ((), [])]
        if slotted:
            raise TypeError(f"{self.class_name()} has __slots__: write its to_tree and from_tree")
        shadow = object.__new__(type(self))
        shadow.__dict__.update(mapped(lambda leaf: leaf, self.__dict__))
        shadow.copy_tensors_to_cpu()
        return dict(shadow.__dict__)

    @classmethod
    def from_tree(cls: type[Self], tree: Any, devices: Sequence[torch.device]) -> Self:
        """The inverse of `to_tree`.

        Args:
            tree: what `to_tree` made, its tensors on the CPU.
            devices: where `restore_tensor_device` is to move the tensors, in the order of `tensors`. Without a method
                of its own a class has to know them by itself, as its attributes say.
        """
        if not isinstance(tree, dict):
            raise CorruptCheckpointError(f"the saved state of {cls.class_name()} is a {type(tree).__qualname__}")
        del devices  # for those who write this method
        made = cls.__new__(cls)
        made.__dict__.update(tree)
        return made


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
        self._devices: Sequence[torch.device] | None = None  # None: each tensor is where it belongs

    def pop_tensors(self) -> list[torch.Tensor]:
        """See `TensorAwareStateDict`."""
        tensors = list(self.tensors)
        self._remember_devices()
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
        self._remember_devices()
        self._replace(lambda tensor: tensor.detach().to("cpu", non_blocking=non_blocking, copy=True))

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """See `TensorAwareStateDict`; each tensor goes back to its own device."""
        self._require(hollow=False)
        if self._devices is None:
            return
        device_of = {id(tensor): device for tensor, device in zip(self.tensors, self._devices, strict=True)}
        self._replace(lambda tensor: _moved(tensor, device_of[id(tensor)], non_blocking))

    def to_tree(self) -> Any:
        """The state dict."""
        self._require(hollow=False)
        return self.state_dict

    @classmethod
    def from_tree(cls: type[BasicSelf], tree: Any, devices: Sequence[torch.device]) -> BasicSelf:
        """See `TensorAwareStateDict`."""
        made = cls(tree)
        now = [tensor.device for tensor in made.tensors]
        if len(devices) == len(now) and list(devices) != now:
            made._devices = tuple(devices)
        return made

    def _remember_devices(self) -> None:
        """Before the tensors go elsewhere."""
        if self._devices is None:
            self._devices = tuple(tensor.device for tensor in self.tensors)

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
        for key, item in value.items():  # most are leaves: no call for them, there are thousands
            changed[key] = change(item) if isinstance(item, kind) else mapped(change, item, kind)
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
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, kind):  # no generator for each leaf, there are thousands
                yield item
            else:
                yield from leaves(item, kind)


def _moved(tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
    if device.type not in ("cpu", "meta"):
        # a torch that is built for GPUs names one where there is none, too
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if accelerator is None or accelerator.type != device.type:
            return tensor
    if tensor.device == device:
        return tensor
    moved = tensor.detach().to(device, non_blocking=non_blocking)  # autograd is to know nothing of it
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(moved, tensor.requires_grad)
    return moved.requires_grad_(tensor.requires_grad)


def encode(state: TensorAwareStateDict, layout: RecurringLayout) -> tuple[Header, list[torch.Tensor]]:
    """Takes a state apart; copies no tensor, and leaves the state as it was.

    Args:
        state: not hollow.
        layout: of this state, if it is saved again and again; else a new one.

    Returns:
        The layout of the shard, with what `decode` needs to know, and the tensors in the order of its entries.

    Raises:
        TypeError: it holds something else, or cannot be stored; names the remedy.
        RuntimeError: it is hollow.
    """
    if not isinstance(state, TensorAwareStateDict):
        raise TypeError(
            f"a {type(state).__qualname__} was given to be saved: wrap a state dict in BasicTensorAwareStateDict first"
        )
    # NVRx asks neither of these of a state of which it makes no replicas
    with suppress(NotImplementedError):
        if state.is_hollow is True:  # and not a method, in the place of the property
            raise RuntimeError("the tensors of this state were taken out: insert_tensors() before it is saved")
    devices: list[torch.device] = []
    with suppress(NotImplementedError):
        devices += [tensor.device for tensor in state.tensors]
    runs = [[str(device), len(list(run))] for device, run in groupby(devices)]  # nearly always one
    meta = {_CLASS: state.class_name(), _DEVICES: runs}
    return layout.lay_out(state.to_tree(), meta)


def decode(header: Header, tensors: Mapping[str, torch.Tensor], *, allow_pickles: bool) -> TensorAwareStateDict:
    """The inverse of `encode`; the tensors stay on the CPU until `restore_tensor_device`.

    Args:
        header: of the shard.
        tensors: of the shard, by name, checked.
        allow_pickles: run the pickles that are in it.

    Raises:
        CheckpointError: its class is not defined here, or it holds pickles and they are not allowed.
        CorruptCheckpointError: it is damaged.
    """
    name = header.meta.get(_CLASS)
    state_class = TensorAwareStateDict.class_named(str(name))
    if state_class is None:
        raise CheckpointError(f"the saved state is a {name}, which is not defined in this process: import it first")
    tree = unflatten(header.structure, tensors, allow_pickles=allow_pickles)
    return state_class.from_tree(tree, _devices_here(_decode_devices(header.meta.get(_DEVICES, []))))


def plain_basic(tree: Any) -> Any:
    """A tree as `BasicTensorAwareStateDict` stores it, for a template to read into."""
    return tree.to_tree() if isinstance(tree, BasicTensorAwareStateDict) else tree


def _decode_devices(runs: Sequence[Sequence[Any]]) -> list[torch.device]:
    try:
        return [torch.device(name) for name, count in runs for _ in range(int(count))]
    except (RuntimeError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"the devices of the saved state are damaged: {error}") from error


def _devices_here(devices: Sequence[torch.device]) -> list[torch.device]:
    """The same; a state that was on one GPU goes to this process's own, whichever number that had there."""
    if len({device for device in devices if device.type != "cpu"}) > 1:
        return list(devices)
    return [device if device.type == "cpu" else torch.device(device.type) for device in devices]
