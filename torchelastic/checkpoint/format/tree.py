"""A state as plain values plus named tensors, and back; nothing that is read here is ever executed.

What `weights_only` of torch.load accepts is accepted: containers, numbers, strings, bytes, dtypes, tensors; so are the
small objects of `described_objects.py` and the tensors of `made_of_tensors.py`. Tensors are taken out and named by
their path as in a JSON pointer (RFC 6901): `model/layer~1norm/weight`. Everything else is refused by a `TypeError` that
names it, unless the caller asks for pickles on both sides.
"""

from __future__ import annotations

import base64
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.format.described_objects import described, rebuilt
from torchelastic.checkpoint.format.made_of_tensors import class_name, put_together
from torchelastic.checkpoint.format.places import JSON_INT, is_text, place_text, token
from torchelastic.checkpoint.format.regions import Region
from torchelastic.checkpoint.format.structures import places_of
from torchelastic.checkpoint.format.tensor_parts import (
    LEAF_TYPES,
    autograd_of,
    decode_leaf,
    dtype_name,
    dtype_named,
    encode_leaf,
    for_autograd,
)
from torchelastic.torch_internals.tensors import metadata_of, set_metadata, tensors_within

#: What JSON can hold.
Plain = Any

#: Bytes longer than this are stored as a tensor, not as text in the header.
MAX_INLINE_BYTES = 4096
MAX_DEPTH = 100


@dataclass(frozen=True)
class NamedTensor:
    """A tensor that was taken out of a tree: what this rank holds of it, and which part of the whole that is.

    Attributes:
        name: unique in its tree.
        tensor: the local data, of the shape `region.sizes`; not copied, it shares memory with the tree.
        shape: of the whole tensor.
        region: the part that `tensor` is.
        is_shard: whether the tree marked it as a part (DTensor, `ShardOf`), so that other ranks hold others.
    """

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    region: Region
    is_shard: bool = False


@dataclass(frozen=True)
class Flat:
    """A tree, taken apart: `structure` is what JSON can hold, with the tensors' names where they were."""

    structure: Plain
    tensors: tuple[NamedTensor, ...]


def flatten(tree: Any, *, allow_pickles: bool | None = False) -> Flat:
    """Takes a tree apart; copies no tensor and changes nothing in the tree.

    Args:
        tree: dicts, lists, tuples, sets, plain values, tensors of any dtype and layout, DTensors, `ShardOf`, numpy
            arrays; named tuples, enums, namespaces, paths, dates and times, exact numbers, ranges.
        allow_pickles: store what is none of these as a pickle, which is read back only by who allows it too. None: as
            False, where the user has no such argument that a message could name.

    Raises:
        TypeError: something in the tree is of another type; names where and what.
        ValueError: the tree contains itself, or is nested too deeply.
    """
    walk = _Flattener(allow_pickles)
    try:
        structure = walk.encode(tree, ())
    except RecursionError as error:
        raise ValueError("the state is nested too deeply for the interpreter's stack: not saved") from error
    return Flat(structure, tuple(walk.tensors))


def unflatten(
    structure: Plain,
    tensors: Mapping[str, torch.Tensor],
    *,
    allow_pickles: bool | None = False,
    in_place: Container[str] = (),
) -> Any:
    """Puts a tree together again; the inverse of `flatten`.

    Args:
        structure: what `flatten` made.
        tensors: by name; used as they are, so tensors that were one object are one again.
        allow_pickles: run the pickles that are in it. Only for checkpoints that you wrote yourself. None: see
            `flatten`.
        in_place: names of tensors that stay as they are given, also where others were saved with other strides.

    Raises:
        CheckpointError: it holds pickles, and they are not allowed; or a tensor is missing.
        CorruptCheckpointError: the structure is none that `flatten` makes.
    """
    return _decoded(structure, _Unflattener(tensors, allow_pickles, in_place, {}))


def unflatten_beside(structure: Plain, tensors: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> Any:
    """As `unflatten`, where tensors that are made of others lie in the same places here.

    Args:
        structure: what `flatten` made.
        tensors: by name.
        own: those that are here, by `path_of`: what is no plain value in one of the tree is taken from the one of the
            same class in the same place.
    """
    return _decoded(structure, _Unflattener(tensors, None, (), own))


def _decoded(structure: Plain, walk: _Unflattener) -> Any:
    try:
        return walk.decode(structure)
    except _NONSENSE as error:
        raise CorruptCheckpointError(f"the structure of the saved state is damaged: {error!r}") from error


def path_of(*keys: object) -> str:
    """The place of a value in a tree, as tensors are named by it."""
    return "/".join(map(token, keys))


def encode_plain(value: float | str) -> Plain:
    """A number or a text; a few of them JSON cannot hold."""
    if isinstance(value, int):
        return value if -JSON_INT < value < JSON_INT else {"int": hex(value)}
    if isinstance(value, str):
        if is_text(value):
            return value
        return {"text": base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()}
    return value if math.isfinite(value) else {"float": repr(value)}


def tensor_names(structure: Plain) -> set[str]:
    """The names of all tensors that a structure refers to. Raises CorruptCheckpointError as `unflatten`."""
    names: set[str] = set()
    try:
        _collect_names(structure, names)
    except _NONSENSE as error:
        raise CorruptCheckpointError(f"the structure of the saved state is damaged: {error!r}") from error
    return names


def _collect_names(node: Plain, names: set[str]) -> None:
    if isinstance(node, list):
        for item in node:
            _collect_names(item, names)
    elif isinstance(node, dict):
        (kind, value), *_ = node.items()
        if kind == "leaf":
            names.update(value["names"].values())
        elif kind not in _SCALARS and kind != "pickle":
            _collect_names(value, names)
            _collect_names([node.get("metadata"), node.get("context")], names)


@dataclass
class _Flattener:
    allow_pickles: bool | None
    tensors: list[NamedTensor] = field(default_factory=list)
    _names: set[str] = field(default_factory=set)
    _leaves: dict[object, tuple[Plain, Any]] = field(default_factory=dict)  # with the value: an id is of what lives
    _inside: set[int] = field(default_factory=set)

    def encode(self, value: Any, path: tuple[str, ...]) -> Plain:
        if isinstance(value, LEAF_TYPES):
            if isinstance(value, torch.Tensor) and (within := tensors_within(value)) is not None:
                return self._made_of(value, *within, path)
            return self._leaf(value, path)
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind in (int, str, float):
            return encode_plain(value)
        plain = self._scalar(value, path)
        return plain if plain is not None else self._container(value, path)

    def _leaf(self, value: Any, path: tuple[str, ...]) -> Plain:
        leaf = encode_leaf(value, "/".join(path))
        if leaf.identity in self._leaves:
            return self._leaves[leaf.identity][0]  # one tensor in two places stays one
        renamed = {}
        for part in leaf.parts:
            name = self._unused(part.name or "tensor")
            renamed[part.role] = name
            self.tensors.append(NamedTensor(name, part.tensor, part.shape, part.region, part.is_shard))
        node: Plain = {"leaf": {"names": renamed, **leaf.recipe}}
        self._leaves[leaf.identity] = (node, value)
        return node

    def _made_of(
        self, value: torch.Tensor, within: Mapping[str, torch.Tensor], context: Any, path: tuple[str, ...]
    ) -> Plain:
        inner = [[name, self.encode(tensor, (*path, token(name)))] for name, tensor in within.items()]
        about = {"class": class_name(type(value)), "context": self.encode(context, (*path, "~context"))}
        form = [list(value.shape), list(value.stride())]
        return {"made_of": inner, **about, "form": form, "at": "/".join(path), **autograd_of(value)}

    def _unused(self, name: str) -> str:
        candidate, number = name, 2
        while candidate in self._names:
            candidate, number = f"{name}~{number}", number + 1
        self._names.add(candidate)
        return candidate

    def _scalar(self, value: Any, path: tuple[str, ...]) -> Plain:
        kind = type(value)
        if kind in (bytes, bytearray):
            name = kind.__name__
            if len(value) <= MAX_INLINE_BYTES:
                return {name: base64.b64encode(value).decode()}
            array = np.frombuffer(bytes(value), dtype=np.uint8).copy()
            return {"long_bytes": self._leaf(torch.from_numpy(array), path), "type": name}
        if kind is complex:
            return {"complex": [repr(value.real), repr(value.imag)]}
        if kind is torch.Size:
            return {"size": list(value)}
        if kind is torch.dtype:
            return {"dtype": dtype_name(value)}
        if kind is torch.device:
            return {"device": str(value)}
        if (kind is np.ndarray or isinstance(value, np.generic)) and _torch_knows(value.dtype):
            array = np.array(value, order="C")  # a copy: torch wants it writable and in native byte order
            native = array.astype(array.dtype.newbyteorder("="), copy=False)
            return {"numpy": self._leaf(torch.from_numpy(native), path), "scalar": kind is not np.ndarray}
        return None

    def _container(self, value: Any, path: tuple[str, ...]) -> Plain:
        if id(value) in self._inside or len(path) > MAX_DEPTH:
            raise ValueError(f"{place_text(path)} contains itself, or is nested more than {MAX_DEPTH} deep: not saved")
        self._inside.add(id(value))
        try:
            return self._encode_container(value, path)
        finally:
            self._inside.discard(id(value))

    def _encode_container(self, value: Any, path: tuple[str, ...]) -> Plain:
        kind = type(value)
        if kind in (dict, OrderedDict):
            pairs = [
                [self.encode(key, (*path, "~key")), self.encode(item, (*path, token(key)))]
                for key, item in value.items()
            ]
            if kind is dict:
                return {"dict": pairs}
            metadata = metadata_of(value)
            about = {} if metadata is None else {"metadata": self.encode(metadata, (*path, "~metadata"))}
            return {"ordered": pairs, **about}
        if kind in (list, tuple):
            items = [self.encode(item, (*path, str(index))) for index, item in enumerate(value)]
            return items if kind is list else {"tuple": items}
        if kind in (set, frozenset):
            ordered = sorted(value, key=repr)  # so that equal states give equal bytes
            return {kind.__name__: [self.encode(item, (*path, str(index))) for index, item in enumerate(ordered)]}
        simpler = self._described(value, path)
        if simpler is not None:
            return simpler
        if self.allow_pickles:
            return {"pickle": base64.b64encode(_pickle(value, path)).decode()}
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        name = f"{module}{kind.__qualname__}" + (f" of {value.dtype}" if kind is np.ndarray else "")
        pickles = "" if self.allow_pickles is None else ", or pass allow_pickles=True when saving and when loading"
        remedy = f"save plain values and tensors, such as a state_dict(){pickles}"
        article = "an" if name[0] in "aeio" else "a"
        raise TypeError(f"{place_text(path)} is {article} {name}: {remedy}")

    def _described(self, value: Any, path: tuple[str, ...]) -> Plain | None:
        try:
            found = described(value)
        except TypeError as error:
            if self.allow_pickles:
                return None
            raise TypeError(f"{place_text(path)} {error}") from None
        return None if found is None else {"object": self.encode(found.content, path), "about": found.about}


@dataclass(frozen=True)
class _Unflattener:
    tensors: Mapping[str, torch.Tensor]
    allow_pickles: bool | None
    in_place: Container[str]
    own: Mapping[str, torch.Tensor]
    _leaves: dict[object, torch.Tensor] = field(default_factory=dict)

    def decode(self, node: Plain) -> Any:
        if isinstance(node, list):
            return [self.decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "leaf" in node:  # first: there are thousands
            return self._leaf(node["leaf"])
        (kind, value), *rest = node.items()
        if kind in _SCALARS:
            return _SCALARS[kind](value)
        if kind in ("dict", "ordered"):
            pairs = [(self.decode(key), self.decode(item)) for key, item in value]
            return dict(pairs) if kind == "dict" else self._ordered(pairs, dict(rest))
        if kind in _COLLECTIONS:
            return _COLLECTIONS[kind](self.decode(item) for item in value)
        if kind == "long_bytes":
            data = self.decode(value).numpy().tobytes()
            return bytearray(data) if rest[0][1] == "bytearray" else data
        if kind == "made_of":
            return self._made_of(value, dict(rest))
        if kind == "numpy":
            array = self.decode(value).numpy()
            return array[()] if rest[0][1] else array
        if kind == "object":
            return rebuilt(self.decode(value), rest[0][1])
        if kind == "pickle":
            return self._pickled(value)
        raise ValueError(f"unknown kind {kind!r}")

    def _ordered(self, pairs: list[tuple[Any, Any]], about: Mapping[str, Plain]) -> OrderedDict[Any, Any]:
        ordered = OrderedDict(pairs)
        if "metadata" in about:
            set_metadata(ordered, self.decode(about["metadata"]))
        return ordered

    def _made_of(self, pairs: Any, about: Mapping[str, Plain]) -> torch.Tensor:
        inner = {name: self.decode(item) for name, item in pairs}
        shape, stride = about["form"]
        return for_autograd(put_together(about["class"], inner, self._context(about), shape, stride), about)

    def _context(self, about: Mapping[str, Plain]) -> Any:
        own = self.own.get(about.get("at", ""))
        if own is not None and class_name(type(own)) == about["class"] and any(places_of(about["context"], _PICKLES)):
            within = tensors_within(own)
            return None if within is None else within[1]
        return self.decode(about["context"])

    def _leaf(self, recipe: Mapping[str, Any]) -> torch.Tensor:
        key = tuple(recipe["names"].items())
        leaf = self._leaves.get(key)
        if leaf is None:
            leaf = self._leaves[key] = self._decode_leaf(recipe)
        return leaf

    def _decode_leaf(self, recipe: Mapping[str, Any]) -> torch.Tensor:
        parts = {}
        for role, name in recipe["names"].items():
            if name not in self.tensors:
                raise CheckpointError(f"the tensor {name!r} of the saved state is missing")
            parts[role] = self.tensors[name]
        if recipe["kind"] == "strided" and recipe["names"]["data"] in self.in_place:
            return parts["data"]
        return decode_leaf(recipe, parts)

    def _pickled(self, text: str) -> Any:
        if not self.allow_pickles:
            allow = ": pass allow_pickles=True if you trust whoever wrote it"
            raise CheckpointError(
                "the saved state holds pickled objects, which can run any code when read"
                f"{', and are not read here' if self.allow_pickles is None else allow}"
            )
        return pickle.loads(base64.b64decode(text))  # noqa: S301 - the caller said that it trusts the writer


#: What reading a structure that `flatten` did not make can raise, here and in torch.
_NONSENSE = (
    KeyError,
    ValueError,
    TypeError,
    IndexError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
)
_PICKLES = ("pickle",)

_SCALARS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "text": lambda text: base64.b64decode(text).decode("utf-8", "surrogatepass"),
    "float": float,
    "complex": lambda parts: complex(float(parts[0]), float(parts[1])),
    "bytes": base64.b64decode,
    "bytearray": lambda text: bytearray(base64.b64decode(text)),
    "size": torch.Size,
    "dtype": dtype_named,
    "device": torch.device,
}
_COLLECTIONS: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def _torch_knows(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biufc" and dtype.itemsize <= (16 if dtype.kind == "c" else 8)


def _pickle(value: Any, path: tuple[str, ...]) -> bytes:
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise TypeError(f"{place_text(path)} cannot be pickled, so leave it out of the state: {error}") from error
