"""Tensors of classes that are made of other tensors, such as the state of 8-bit optimizers and float8 weights.

Such a class takes its tensors apart and puts them together by itself (`__tensor_flatten__`, `__tensor_unflatten__`,
which `torch.compile` uses too). What is stored or sent are the tensors inside, the plain values that it gives besides,
and the name of the class. Who reads it takes the class of that name among those of tensors that exist in its process:
nothing is imported and nothing is unpickled, and no other class can be named. A worker that joins has the class
because its script has built the same optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.moved_modules import path_in_files


def class_name(kind: type[torch.Tensor]) -> str:
    """What `put_together` finds a class by."""
    return f"{path_in_files(kind.__module__)}:{kind.__qualname__}"


def put_together(
    name: str, inner: Mapping[str, torch.Tensor], context: Any, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """A tensor of a class of this process, from what its `__tensor_flatten__` gave.

    Raises:
        CheckpointError: there is no such class here, or it takes other things by now.
        TypeError: these are no such things.
    """
    if not isinstance(name, str):
        raise TypeError("a class without a name")
    kind = _found(name)
    if kind is None:
        raise CheckpointError(
            f"the state holds tensors of the class {name.replace(':', '.')}, which is not defined in this process: "
            "import it first"
        )
    size = torch.Size(shape)
    try:
        made: Any = kind.__tensor_unflatten__(dict(inner), context, size, tuple(stride))  # type: ignore[attr-defined]
    except Exception as error:
        raise CheckpointError(
            f"a {kind.__name__} cannot be put together from what was saved or sent: {error}"
        ) from error
    if not isinstance(made, torch.Tensor):
        raise CheckpointError(f"{kind.__name__}.__tensor_unflatten__ gave a {type(made).__name__}, and no tensor")
    return made


def _found(name: str) -> type[torch.Tensor] | None:
    """The class of that name, the one that was defined last where there are several."""
    named = [kind for kind in _classes(torch.Tensor) if class_name(kind) == name]
    return named[-1] if named else None


def _classes(of: type[torch.Tensor]) -> Iterator[type[torch.Tensor]]:
    for kind in type.__subclasses__(of):
        if hasattr(kind, "__tensor_unflatten__"):
            yield kind
        yield from _classes(kind)
