"""The module that a train step calls: the user's own in all but its call, which goes through the group's wrapper.

DDP has the user's module inside: other names in its `state_dict`, none of its attributes and methods, and there is no
DDP where a worker is alone. A step that was written for one size of the group would end at another. So the step gets
one object for the whole run: of a subclass of the user's class, with the very same `__dict__` (as FSDP2's `fully_shard`
makes subclasses), whose call alone is another.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from torchelastic.torch_internals.tensors import slots_of


class _StandsFirst:
    """Stands before the user's class, which may keep a list of its subclasses and is not to learn of this one."""

    def __init_subclass__(cls, **_: Any) -> None: ...


def step_model(
    module: torch.nn.Module,
    called: Callable[..., Any],
    accumulates: Callable[[], AbstractContextManager[Any]],
) -> torch.nn.Module | None:
    """An object that is the user's module, except for its call, which goes through the present wrapper.

    `module` and `no_sync()` are there as on DDP, unless the user's own class has such names. A copy of it, deep or by
    pickle, is one of the user's module.

    Args:
        module: the user's.
        called: what its call is.
        accumulates: what `no_sync()` is.

    Returns:
        None: it cannot be made of this module (one of TorchScript, one whose class lets nobody derive from it).
    """
    kind = type(module)
    if slots_of(module) is None or isinstance(module, torch.jit.ScriptModule):
        return None

    def call(_: Any, *args: Any, **kwargs: Any) -> Any:
        return called(*args, **kwargs)

    def no_sync(_: Any) -> AbstractContextManager[Any]:
        return accumulates()

    body: dict[str, Any] = {
        "__call__": call,
        "forward": call,
        "__copy__": lambda _: copy.copy(module),
        "__deepcopy__": lambda _, memo: copy.deepcopy(module, memo),
        "__reduce_ex__": lambda _, __: (_itself, (module,)),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    of_ddp = {"module": property(lambda _: module), "no_sync": no_sync}
    body |= {name: value for name, value in of_ddp.items() if not hasattr(module, name)}
    try:
        derived = types.new_class(kind.__name__, (_StandsFirst, kind), exec_body=lambda names: names.update(body))
        made: torch.nn.Module = object.__new__(derived)
        object.__setattr__(made, "__dict__", vars(module))
    except TypeError:
        return None
    return made


def _itself(module: torch.nn.Module) -> torch.nn.Module:
    return module
