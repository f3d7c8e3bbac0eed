"""The census of a training state: a fingerprint of everything that can be reached from it, by path.

It does not know what `torchelastic` keeps. It goes over every attribute of modules, optimizers, schedulers and the
user's own objects, and over the generators of random numbers, so that a test can say "nothing else has changed", too.
"""

from __future__ import annotations

import functools
import hashlib
import random
import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch

#: What a fingerprint is: a text that says the kind, and what is in it.
Census = dict[str, str]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, Enum)
#: What refers back to whoever holds the state, or is the process's: no part of it.
_FOREIGN = (types.ModuleType, weakref.ref, type, torch.nn.parallel.DistributedDataParallel)
#: Of the group that a sharded model is in, with memory that was freed.
_OF_FSDP = ("torch.distributed.fsdp.", "torch.distributed.tensor.", "torch.distributed.device_mesh")
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodWrapperType)


def census_of(**roots: Any) -> Census:
    """Everything below these, each with its path, `model.layers.0.weight` and so on, and the process's generators.

    An object that is met twice is told as "is" the path where it was met first: that is how tied parameters, shared
    storages and exchanged objects are seen.
    """
    walk = _Walk()
    for name, root in roots.items():
        walk.add(name, root)
    walk.found["random.torch"] = _digest(torch.get_rng_state().numpy().tobytes())
    walk.found["random.python"] = _digest(repr(random.getstate()).encode())
    walk.found["random.numpy"] = _digest(repr(np.random.get_state(legacy=False)).encode())
    return walk.found


def differences(before: Census, after: Census) -> dict[str, str]:
    """By path: what is other now, or was not there, or is gone."""
    gone, new = before.keys() - after.keys(), after.keys() - before.keys()
    changed = (path for path in before.keys() & after.keys() if before[path] != after[path])
    return (
        {path: f"{before[path]} is gone" for path in gone}
        | {path: f"{after[path]} was not there" for path in new}
        | {path: f"{after[path]} was {before[path]}" for path in changed}
    )


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=6).hexdigest()


class _Walk:
    """One walk; objects are kept alive during it, so that no identity is used twice."""

    def __init__(self) -> None:
        self.found: Census = {}
        self._met: dict[int, tuple[str, Any]] = {}
        self._storages: dict[int, tuple[str, Any]] = {}

    def add(self, path: str, value: Any) -> None:
        if _is_plain(value):
            self.found[path] = f"{type(value).__name__} {value!r}"
            return
        if _is_foreign(value):
            self.found[path] = f"a {type(value).__name__}"
            return
        first, _ = self._met.setdefault(id(value), (path, value))
        if first != path:
            self.found[path] = f"is {first}"
            return
        self.found[path] = _kind(value)
        for name, inner in self._inside(path, value):
            self.add(f"{path}.{name}", inner)

    def _inside(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, torch.Tensor):
            yield from self._of_tensor(path, value)
        elif isinstance(value, torch.Generator):
            self.found[path] += f" {_digest(value.get_state().numpy().tobytes())}"
        elif isinstance(value, np.ndarray):
            self.found[path] += f" {value.dtype} {value.shape} {_digest(value.tobytes())}"
        elif isinstance(value, random.Random):
            self.found[path] += f" {_digest(repr(value.getstate()).encode())}"
        elif isinstance(value, np.random.Generator):
            self.found[path] += f" {_digest(repr(value.bit_generator.state).encode())}"
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                yield self._key(key), inner
        elif isinstance(value, (list, tuple, deque)):
            yield from ((str(index), inner) for index, inner in enumerate(value))
        elif isinstance(value, (set, frozenset)):
            self.found[path] += f" {sorted(map(repr, value))}"
        elif isinstance(value, functools.partial):
            yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
        elif isinstance(value, types.MethodType):
            yield from (("of", value.__self__), ("function", value.__func__))
        if not isinstance(value, (torch.Tensor, *_CODE, types.MethodType)):
            yield from sorted(getattr(value, "__dict__", {}).items())

    def _key(self, key: Any) -> str:
        """Of a dict: parameters are keys of an optimizer's state."""
        if isinstance(key, _PLAIN):
            return str(key)
        return f"[{self._met[id(key)][0]}]" if id(key) in self._met else f"[{_kind(key)}]"

    def _of_tensor(self, path: str, tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
        if hasattr(tensor, "__tensor_flatten__") and type(tensor) is not torch.Tensor:
            self.found[path] += " requires_grad" if tensor.requires_grad and tensor.is_leaf else ""
            names, context = tensor.__tensor_flatten__()
            yield from ((name, getattr(tensor, name)) for name in names)
            yield "context", context
            return
        content = tensor.detach().clone().contiguous().reshape(-1).view(torch.uint8)  # numpy's memory cannot be resized
        flag = " requires_grad" if tensor.requires_grad and tensor.is_leaf else ""
        self.found[path] += f" {tensor.dtype} {tuple(tensor.shape)} {tuple(tensor.stride())} {tensor.device}{flag}"
        self.found[path] += f" {_digest(content.numpy().tobytes())}"
        if tensor.numel():
            first, _ = self._storages.setdefault(tensor.untyped_storage().data_ptr(), (path, tensor))
            if first != path:
                self.found[path] += f" in the memory of {first}"
        if tensor.is_leaf and tensor.grad is not None:
            yield "grad", tensor.grad
        yield from sorted(getattr(tensor, "__dict__", {}).items())


def _is_plain(value: Any) -> bool:
    """Whether a value cannot change, so that it is no matter whether it is one object in two places."""
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(isinstance(each, _PLAIN) for each in value))


def _is_foreign(value: Any) -> bool:
    """Whether it is no part of a state: the machinery around it."""
    of_fsdp = type(value).__module__.startswith(_OF_FSDP) and not isinstance(value, (torch.Tensor, torch.nn.Module))
    return isinstance(value, _FOREIGN) or of_fsdp or type(value).__module__.startswith("torchelastic.")


def _kind(value: Any) -> str:
    if isinstance(value, _CODE):
        return f"code {getattr(value, '__qualname__', '?')}"
    return f"{type(value).__module__}.{type(value).__qualname__}"
