"""What a module has besides its weights, where it is asked for often: before each copy of a sharded model's parts.

It is what `module_values.py` has, by the same names. The walk through the module is made once, and again when it has
other modules; buffers are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from torchelastic.inventory.module_values import PlainAttributes, put_buffers, put_flags
from torchelastic.inventory.names import joined, named_modules, plain_name
from torchelastic.inventory.packing import TensorPacker, unpacked
from torchelastic.torch_internals.tensors import ModuleSlots, slots_of

#: The last part of a name in a `state_dict`: of what `get_extra_state` has returned.
EXTRA_STATE = "_extra_state"


class ModuleParts:
    """Flags, buffers and states of their own making of one module and of all below it. On the training thread.

    Args:
        module: it.
        parameters: its parameters by name: whose flags count, whatever is in the module's slots in a step.

    Attributes:
        module: as given.
    """

    def __init__(self, module: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.module, self._parameters = module, parameters
        self._packer = TensorPacker()
        self._attributes = PlainAttributes(module)
        self._modules: list[tuple[str, torch.nn.Module]] = []
        self._children: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._slots: list[tuple[str, ModuleSlots]] = []
        self._states: list[tuple[str, Callable[[], Any]]] = []
        self._names: list[str] = []
        self._persistent: list[str] = []

    def tree(self) -> dict[str, Any]:
        """All of it, as plain values and tensors, for `load`; valid until the next call."""
        buffers = self.buffers()
        if list(buffers) != self._names:
            self._names, self._persistent = list(buffers), self.persistent()
        return {
            "flags": self.flags(),
            "buffers": self._packer.packed(buffers),
            "persistent": self._persistent,
            "states": {path: state() for path, state in self._states},
            "attributes": self._attributes.changed(),
        }

    def flags(self) -> dict[str, list[str]]:
        """See `module_values.flags_of`; sorted."""
        self._bind()
        return {
            "frozen": sorted(name for name, value in self._parameters.items() if not value.requires_grad),
            "eval": sorted(path for path, module in self._modules if not module.training),
        }

    def buffers(self) -> dict[str, torch.Tensor | None]:
        """See `module_values.buffers_of`."""
        self._bind()
        return {
            joined(path, key): value
            for path, slots in self._slots
            for key, value in slots.buffers.items()
            if value is None or not is_lazy(value)
        }

    def persistent(self) -> list[str]:
        """The names of those buffers that are in the module's `state_dict`."""
        stored = {plain_name(name) for name in self.module.state_dict()}
        return [name for name in self.buffers() if name in stored]

    def may_have(self, name: str) -> bool:
        """Whether a buffer of this name is there, or could be: the script may have made it in the run."""
        self._bind()
        path, _, key = name.rpartition(".")
        return any(path == own and key not in slots.parameters for own, slots in self._slots)

    def load(self, tree: Mapping[str, Any], *, device: torch.device, is_whole: bool) -> None:
        """Have what another module like this one has.

        Args:
            tree: what `tree` gave there; `flags` may be None: they stay.
            device: of buffers that this one does not have.
            is_whole: whether it has all buffers that were there: others go.
        """
        own, given = self.buffers(), unpacked(tree["buffers"])
        buffers = {} if is_whole else {name: value for name, value in own.items() if name not in given}
        for name, value in given.items():
            mine = own.get(name)
            buffers[name] = None if value is None else value.to(device if mine is None else mine.device)
        put_buffers(self.module, buffers, stored=set(tree["persistent"]), own=())
        modules = dict(self._modules)
        for path, state in tree["states"].items():
            if path in modules:
                modules[path].set_extra_state(state)
        if tree["flags"] is not None:
            put_flags(self.module, {kind: set(names) for kind, names in tree["flags"].items()})

    def _bind(self) -> None:
        if self._modules and all(now == before for now, before in self._children):
            return
        self._modules = list(named_modules(self.module))
        found = [(path, module, slots_of(module)) for path, module in self._modules]
        self._children = [(slots.children, dict(slots.children)) for _, _, slots in found if slots and slots.children]
        self._slots = [(path, slots) for path, _, slots in found if slots]
        plain = torch.nn.Module.get_extra_state
        self._states = [
            (path, module.get_extra_state)
            for path, module in self._modules
            if type(module).get_extra_state is not plain
        ]
