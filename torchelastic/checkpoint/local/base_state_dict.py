"""A state that knows which of its values are tensors, so that these can be taken out, moved and put back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch

from torchelastic.checkpoint.errors import CorruptCheckpointError

Self = TypeVar("Self", bound="TensorAwareStateDict")


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
        return f"{cls.__module__}:{cls.__qualname__}"

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

        Without a method of its own a class gives its attributes. What else is in there is pickled, if that is allowed.

        Raises:
            TypeError: the class has attributes in `__slots__` too, and so has to write this method and `from_tree`.
        """
        slotted = [kind.__qualname__ for kind in type(self).__mro__ if getattr(kind, "__slots__", ()) not in ((), [])]
        if slotted:
            raise TypeError(f"{self.class_name()} has __slots__: write its to_tree and from_tree")
        return dict(self.__dict__)

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
