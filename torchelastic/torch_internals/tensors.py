"""Tensors, their storages, and the containers that they are in. On any thread."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import torch

from torchelastic.torch_internals.canary import check_torch, found, has_argument, installed_version, say_missing

check_torch()

tree_map: Callable[..., Any] = found("torch.utils._pytree.tree_map")
tree_map_only: Callable[..., Any] = found("torch.utils._pytree.tree_map_only")
tree_flatten: Callable[[Any], tuple[list[Any], Any]] = found("torch.utils._pytree.tree_flatten")
tree_unflatten: Callable[[list[Any], Any], Any] = found("torch.utils._pytree.tree_unflatten")

_QUANTIZED = "torch._make_per_tensor_quantized_tensor"
_QUANTIZED_BY_CHANNEL = "torch._make_per_channel_quantized_tensor"
_OLD_FORMAT = "torch.save._use_new_zipfile_serialization"
_TYPED = "torch.storage.TypedStorage"

_SIMPLE = (torch.Tensor, torch.nn.Parameter)


class NoSuchTensorsError(NotImplementedError):
    """This torch makes no tensors of that kind."""


def version_of(tensor: torch.Tensor) -> int:
    """Torch's count of the changes that a tensor has seen in place, except through its `.data`."""
    return tensor._version


def copy_each(places: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> bool:
    """Copy each source into its place, all at once; False: this torch cannot.

    Raises:
        RuntimeError, NotImplementedError: there are dtypes without a kernel among them, such as int4.
    """
    copy = found("torch._foreach_copy_")
    if copy is None:
        return False
    copy(list(places), list(sources))
    return True


def copy_all(places: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its place: all at once, or one by one where there is no way to do that.

    Raises:
        RuntimeError, NotImplementedError: one of them cannot be copied at all.
    """
    try:
        if copy_each(places, sources):
            return
    except (RuntimeError, NotImplementedError):  # a type without such a kernel is among them, or a DTensor
        pass
    for place, source in zip(places, sources, strict=True):
        place.copy_(source)


def quantized(values: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """A quantized tensor of its integers. Raises NoSuchTensorsError where this torch has none."""
    make = _maker_of_quantized(_QUANTIZED)
    made: torch.Tensor = make(values, scale, zero_point)
    return made


def quantized_by_channel(
    values: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor, axis: int
) -> torch.Tensor:
    """The same with a scale for each channel. Raises NoSuchTensorsError where this torch has none."""
    make = _maker_of_quantized(_QUANTIZED_BY_CHANNEL)
    made: torch.Tensor = make(values, scales, zero_points, axis)
    return made


def _maker_of_quantized(path: str) -> Callable[..., Any]:
    make: Callable[..., Any] | None = found(path)
    if make is None:
        raise NoSuchTensorsError(f"torch {installed_version()} makes no quantized tensors: use an older one")
    return make


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """The indices and values of a sparse COO tensor, and whether these are of a coalesced one."""
    if found("torch.Tensor._indices") is None or found("torch.Tensor._values") is None:
        tensor = tensor.coalesce()
        return tensor.indices(), tensor.values(), True
    return tensor._indices(), tensor._values(), tensor.is_coalesced()


def tensors_within(tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], Any] | None:
    """What a tensor that is made of others gives of itself: those, and what else it has to know.

    None: it is no such tensor. So are a DTensor, of which a rank has a part, and a nested one.
    """
    if type(tensor) in _SIMPLE or not hasattr(tensor, "__tensor_flatten__"):
        return None
    if hasattr(tensor, "device_mesh") or tensor.is_nested:
        return None
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, context


def with_inner_tensors(tensor: torch.Tensor, inner: Mapping[str, torch.Tensor], context: Any) -> torch.Tensor:
    """One of the same class, shape and strides, of other tensors; the inverse of `tensors_within`."""
    kind: Any = type(tensor)
    made: torch.Tensor = kind.__tensor_unflatten__(dict(inner), context, tensor.shape, tensor.stride())
    return made


def identity_of_storage(storage: torch.UntypedStorage) -> object:
    """Equal for two objects that are the same storage."""
    identity = getattr(storage, "_cdata", None)
    if identity is not None:
        return identity
    say_missing("torch.UntypedStorage._cdata")
    address = storage.data_ptr()
    return (address, storage.nbytes()) if address else id(storage)


def storage_within(typed: torch.storage.TypedStorage) -> torch.UntypedStorage:
    """The storage that a typed one is around; pickles of tensors refer to typed ones."""
    untyped = getattr(typed, "_untyped_storage", None)
    if untyped is None:
        say_missing(f"{_TYPED}._untyped_storage")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            untyped = typed.untyped()  # type: ignore[no-untyped-call]  # torch has no types here
    assert isinstance(untyped, torch.UntypedStorage)
    return untyped


def storage_around(untyped: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    """The inverse."""
    quietly: Any = {"_internal": True} if has_argument(f"{_TYPED}._internal") else {}
    with warnings.catch_warnings():
        if not quietly:
            warnings.simplefilter("ignore", UserWarning)
        return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, **quietly)  # type: ignore[no-untyped-call]


def save_small(value: Any, file: BinaryIO, *, in_an_archive: bool) -> None:
    """`torch.save`; without an archive it is written and read in half the time, for values that hold no tensor."""
    if in_an_archive or not has_argument(_OLD_FORMAT):
        torch.save(value, file)
    else:
        torch.save(value, file, _use_new_zipfile_serialization=False)


def metadata_of(ordered: OrderedDict[Any, Any]) -> Any:
    """What `Module.state_dict()` attaches to its result: the modules' versions, by which old states are mended."""
    return getattr(ordered, "_metadata", None)


def set_metadata(ordered: OrderedDict[Any, Any], metadata: Any) -> None:
    """The inverse."""
    ordered._metadata = metadata  # type: ignore[attr-defined]  # as torch does


def has_version_of_its_own(module: torch.nn.Module) -> bool:
    """Whether the version that `state_dict` attaches for a module is that object's, and not that of its class."""
    return "_version" in vars(module)


class ModuleSlots(NamedTuple):
    """Those dicts of a module itself that have its parameters, buffers and children by name, None among them."""

    parameters: dict[str, Any]
    buffers: dict[str, Any]
    children: dict[str, Any]


def slots_of(module: torch.nn.Module) -> ModuleSlots | None:
    """Where a module has what is registered with it; None: this torch, or a module of TorchScript, has it elsewhere."""
    values = vars(module)
    held: list[Any] = [values.get(name) for name in ("_parameters", "_buffers", "_modules")]
    return ModuleSlots(*held) if all(type(each) is dict for each in held) else None


def own_tensors(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters and the buffers of a module itself, None among them: those dicts that are the module's.

    Raises:
        TypeError: this torch has them elsewhere.
    """
    held = [getattr(module, name, None) for name in ("_parameters", "_buffers")]
    if not all(isinstance(each, dict) for each in held):
        raise TypeError(
            f"a model on the meta device cannot be initialized with torch {installed_version()}, whose modules keep "
            "their parameters elsewhere: build it on the CPU"
        )
    return held[0], held[1]  # type: ignore[return-value]  # they are dicts


def children_of(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """The children of a module itself by name, None among them."""
    slots = slots_of(module)
    return dict(module.named_children()) if slots is None else slots.children


def give_tensors(
    module: torch.nn.Module,
    parameters: Mapping[str, Any],
    buffers: Mapping[str, Any],
    children: Mapping[str, torch.nn.Module | None],
) -> None:
    """Have a module hold these, and leave the dicts alone that it had."""
    module._parameters, module._buffers = dict(parameters), dict(buffers)
    module._modules = dict(children)
