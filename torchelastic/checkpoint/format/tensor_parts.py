"""How one tensor of any kind becomes plain strided tensors whose bytes can be stored, and back.

Strided tensors are stored in logical (row-major) order and get their strides back. Quantised and sparse ones are stored
as the parts that torch builds them from. Two views that overlap in one memory block are told apart only by their place,
so each is stored for itself, but the same view twice is stored once.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.format.regions import Region
from torchelastic.torch_internals.tensors import (
    NoSuchTensorsError,
    quantized,
    quantized_by_channel,
    sparse_parts,
    tensors_within,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

_DTYPES = {
    name: value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype)
}  # by every name torch has for them ("float" and "float32")

#: Integers of less than a byte: torch stores each in a byte, and has no kernel that copies them.
_WITHOUT_KERNEL = frozenset(
    _DTYPES[name] for bits in range(1, 8) for name in (f"int{bits}", f"uint{bits}") if name in _DTYPES
)
#: What only quantised tensors have, whose parts are stored, and what has no values that anybody knows of.
NOT_STORED = frozenset(value for name, value in _DTYPES.items() if name.startswith(("q", "bits")))
_QUANTIZED = frozenset({torch.quint8, torch.qint8, torch.qint32})
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The inverse of `dtype_name`. Raises ValueError where this torch has no such dtype."""
    if name not in _DTYPES:
        raise ValueError(f"this torch ({torch.__version__}) has no dtype {name!r}: use a newer one")
    return _DTYPES[name]


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, of a dtype that torch can copy."""
    return tensor.view(torch.uint8) if tensor.dtype in _WITHOUT_KERNEL else tensor


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it is stored: on the CPU, row-major, nothing left to be conjugated or negated."""
    resolved = copyable(tensor.detach()).cpu().resolve_conj().resolve_neg().contiguous()
    return resolved.view(tensor.dtype)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous CPU tensor as one row of bytes, sharing its memory."""
    return tensor.view(-1).view(torch.uint8)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy; valid as long as somebody keeps the tensor.

    `tensor.numpy()` would mark its memory as one that cannot be resized any more, which breaks FSDP.
    """
    size_bytes = tensor.numel() * tensor.element_size()
    if size_bytes == 0:
        return memoryview(b"")
    view: memoryview = _memoryview_from(tensor.data_ptr(), size_bytes, _PYBUF_WRITE)
    return view


_PYBUF_WRITE = 0x200  # of Include/cpython/object.h
_memoryview_from = ctypes.pythonapi.PyMemoryView_FromMemory
_memoryview_from.restype = ctypes.py_object
_memoryview_from.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


@dataclass(frozen=True)
class ShardOf:
    """Marks a tensor in a state as one part of a larger one, whose other parts other ranks hold.

    A DTensor needs no such mark. Parts may overlap; where they do, they must be equal.

    Args:
        tensor: what this rank holds.
        shape: of the whole tensor.
        offsets: where the part begins in the whole, per dimension.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.region.fits_into(self.shape):
            raise ValueError(
                f"a part of shape {tuple(self.tensor.shape)} at {self.offsets} does not lie within a tensor of shape "
                f"{self.shape}"
            )

    @property
    def region(self) -> Region:
        """The part as a region."""
        return Region(tuple(self.offsets), tuple(self.tensor.shape))


class TensorPart(NamedTuple):
    """One plain tensor of a leaf; `role` says which."""

    role: str
    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    region: Region
    is_shard: bool = False


class Leaf(NamedTuple):
    """A leaf of a tree, taken apart.

    Attributes:
        identity: equal for two leaves that are one tensor; valid while the leaf's value lives.
        recipe: what `decode_leaf` needs beside the parts; JSON can hold it.
        parts: the plain tensors.
    """

    identity: object
    recipe: dict[str, Any]
    parts: Sequence[TensorPart]


LEAF_TYPES = (torch.Tensor, ShardOf)


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """Whether it is a DTensor; there is none where nobody has imported them, which takes a second."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def encode_leaf(value: torch.Tensor | ShardOf, name: str) -> Leaf:
    """Takes a tensor apart; copies nothing but the parts of quantised and sparse tensors.

    Raises:
        TypeError: a tensor without data of its own (meta, freed, a wrapper of others), or of a layout or kind that
            torch cannot take apart.
    """
    if isinstance(value, ShardOf):
        tensor = _with_data(value.tensor, name)
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise TypeError(f"the part {name!r} is not a plain tensor: only those can be saved in parts")
        part = TensorPart("data", name, tensor, tuple(value.shape), value.region, is_shard=True)
        return _shard(part, value.tensor)
    if is_dtensor(value):
        return _encode_dtensor(value, name)
    tensor = _with_data(value, name)
    device = str(tensor.device)
    if tensor.layout is torch.strided and not tensor.is_quantized:
        shape = tuple(tensor.shape)
        recipe = {"kind": "strided", "stride": _stride_to_keep(tensor), "device": device, **autograd_of(value)}
        return Leaf(
            memory_identity(tensor, value, name),
            recipe,
            (TensorPart("data", name, tensor, shape, Region.whole(shape)),),
        )
    recipe, parts = _quantized(tensor, name) if tensor.is_quantized else _sparse(tensor, name)
    named = [
        TensorPart(
            role, name if role == "data" else f"{name}~{role}", part, tuple(part.shape), Region.whole(part.shape)
        )
        for role, part in parts.items()
    ]
    return Leaf(("object", id(value)), {**recipe, "device": device}, named)


def decode_leaf(recipe: Mapping[str, Any], parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Puts a tensor together from its parts (which it shares memory with where that is possible).

    Raises:
        ValueError, KeyError, TypeError, RuntimeError: the recipe is none that `encode_leaf` makes.
        CheckpointError: this torch has no such tensors any more.
    """
    kind = recipe["kind"]
    if kind == "shard":
        return parts["data"]
    if kind == "strided":
        stride = recipe["stride"]
        return for_autograd(parts["data"] if stride is None else _with_strides(parts["data"], stride), recipe)
    if kind in ("per_tensor", "per_channel"):
        try:
            if kind == "per_tensor":
                return quantized(parts["data"], recipe["scale"], recipe["zero_point"])
            return quantized_by_channel(parts["data"], parts["scales"], parts["zero_points"], recipe["axis"])
        except NoSuchTensorsError as error:
            raise CheckpointError(f"the checkpoint holds quantized tensors, and {error}") from error
    if kind == "sparse_coo":
        # None, not False: torch takes False for "check that it is not", and a lone element is coalesced either way
        coalesced = True if recipe["coalesced"] else None
        return torch.sparse_coo_tensor(
            parts["indices"], parts["values"], recipe["shape"], check_invariants=True, is_coalesced=coalesced
        )
    layout = getattr(torch, kind) if kind in _COMPRESSED else None
    if layout is None:
        raise ValueError(f"unknown kind of tensor {kind!r}")
    return torch.sparse_compressed_tensor(
        parts["outer"], parts["inner"], parts["values"], recipe["shape"], layout=layout, check_invariants=True
    )


def _shard(part: TensorPart, value: torch.Tensor) -> Leaf:
    identity = ("shard", part.shape, part.region, memory_identity(part.tensor, value, part.name))
    return Leaf(identity, {"kind": "shard", "device": str(part.tensor.device)}, (part,))


def region_of(value: torch.Tensor) -> Region:
    """The region of the whole tensor that this rank holds; a plain tensor is whole on every rank."""
    if not is_dtensor(value):
        return Region.whole(value.shape)
    from torchelastic.torch_internals.sharding import place_of_part

    sizes, offsets = place_of_part(value)
    # torch places what is empty behind the end
    return Region(offsets, sizes) if 0 not in sizes else Region((0,) * len(sizes), sizes)


def _encode_dtensor(value: DTensor, name: str) -> Leaf:
    if any(placement.is_partial() for placement in value.placements):
        raise TypeError(f"the DTensor {name!r} holds partial sums: reduce it (redistribute) before saving")
    local = _with_data(value.to_local(), name)
    is_shard = any(placement.is_shard() for placement in value.placements)
    return _shard(TensorPart("data", name, local, tuple(value.shape), region_of(value), is_shard), value)


def _with_data(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor without its gradients. Raises TypeError where there is nothing to read."""
    if tensor.is_meta:
        raise TypeError(f"the tensor {name!r} has no data (it is on the meta device): materialise it before saving")
    if type(tensor) not in _PLAIN_TYPES:
        if tensors_within(tensor) is not None:
            raise TypeError(f"the tensor {name!r} is a {type(tensor).__name__}, made of other tensors: save those")
        tensor = tensor.as_subclass(torch.Tensor)
    if tensor.is_nested:
        raise TypeError(f"the tensor {name!r} is nested: save the tensors it is made of, or a padded one")
    if tensor.dtype in NOT_STORED and not tensor.is_quantized:
        raise TypeError(f"the tensor {name!r} is of the type {tensor.dtype}: save a view of it as torch.uint8")
    return tensor.detach()


def asks_for_gradients(value: torch.Tensor) -> bool:
    """Whether gradients of it are wanted; what was computed from such a tensor is saved as a plain one."""
    return value.requires_grad and value.is_leaf


def autograd_of(value: torch.Tensor) -> dict[str, bool]:
    """Whether it is a parameter, and asks for gradients; empty for what most states hold: neither."""
    flags = {"parameter": isinstance(value, torch.nn.Parameter), "requires_grad": asks_for_gradients(value)}
    return flags if any(flags.values()) else {}


def for_autograd(tensor: torch.Tensor, recipe: Mapping[str, Any]) -> torch.Tensor:
    """The inverse; it shares the tensor's memory."""
    if recipe.get("parameter"):
        return torch.nn.Parameter(tensor, requires_grad=recipe["requires_grad"])
    return tensor.detach().requires_grad_() if recipe.get("requires_grad") else tensor


def _stride_to_keep(tensor: torch.Tensor) -> list[int] | None:
    """The strides, where they are not the usual ones and the tensor fills its memory (such as channels_last).

    A view with gaps, or an expanded one, is stored and read as a contiguous one.
    """
    if tensor.is_contiguous() or not _fills_memory(tensor.shape, tensor.stride()):
        return None
    return list(tensor.stride())


def _fills_memory(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements of such a tensor lie side by side, each once, in whatever order."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return expected > 0


def _with_strides(data: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    if data.stride() == tuple(stride):
        return data
    if not _fills_memory(data.shape, stride):
        raise ValueError(f"a tensor of shape {tuple(data.shape)} does not have the strides {stride}")
    ordered = torch.empty_strided(data.shape, stride, dtype=data.dtype)
    copyable(ordered).copy_(copyable(data))
    return ordered


def _quantized(tensor: torch.Tensor, name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    if tensor.dtype not in _QUANTIZED or tensor.qscheme() is torch.per_channel_affine_float_qparams:
        raise TypeError(
            f"the tensor {name!r} is quantised as {tensor.dtype}: save it dequantised, or as its int_repr()"
        )
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        recipe = {"kind": "per_tensor", "scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
        return recipe, {"data": tensor.int_repr()}
    parts = {
        "data": tensor.int_repr(),
        "scales": tensor.q_per_channel_scales(),
        "zero_points": tensor.q_per_channel_zero_points(),
    }
    return {"kind": "per_channel", "axis": tensor.q_per_channel_axis()}, parts


def _sparse(tensor: torch.Tensor, name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    shape = list(tensor.shape)
    if tensor.layout is torch.sparse_coo:
        indices, values, coalesced = sparse_parts(tensor)
        recipe = {"kind": "sparse_coo", "shape": shape, "coalesced": coalesced}
        return recipe, {"indices": indices, "values": values}
    kind = str(tensor.layout).removeprefix("torch.")
    if kind not in _COMPRESSED:
        raise TypeError(f"the tensor {name!r} has the layout {tensor.layout}: convert it with to_dense() before saving")
    by_row = kind in ("sparse_csr", "sparse_bsr")
    outer, inner = (
        (tensor.crow_indices(), tensor.col_indices()) if by_row else (tensor.ccol_indices(), tensor.row_indices())
    )
    return {"kind": kind, "shape": shape}, {"outer": outer, "inner": inner, "values": tensor.values()}


_COMPRESSED = ("sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")


def memory_identity(tensor: torch.Tensor, value: torch.Tensor, name: str) -> object:
    """Equal for two tensors that are the same view of the same memory; where there is none, for the same object."""
    address = tensor.data_ptr()
    if address == 0:
        if tensor.numel():
            raise TypeError(f"the tensor {name!r} has no data: its memory was freed (as FSDP does) before saving")
        return "object", id(value)
    # a conjugated view of the same memory holds other values
    flags = (tensor.is_conj(), tensor.is_neg())
    return address, tensor.shape, tensor.stride(), tensor.dtype, tensor.device, flags
