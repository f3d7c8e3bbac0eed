"""What a module is besides the numbers in its weights: flags, hooks, attributes, and which object is in which slot.

Everything of a module is in its `__dict__`: flags and plain attributes as values, parameters, buffers, children and
hooks in dicts of theirs. So a copy of these, which are small, has it all. Where a buffer was replaced by another tensor
the slot gets the one of before back, and that one its shape and its bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from torchelastic.inventory.attributes import CHANGEABLE, Restore, kept_or_logged, put_mapping
from torchelastic.inventory.copies import CopyMemory, TensorCopies
from torchelastic.torch_internals.tensors import slots_of

#: What every module has of its own: flags, and dicts and sets of parameters, buffers, children and hooks.
STANDARD = frozenset(vars(torch.nn.Module()))


class KeptStructure(NamedTuple):
    """A module, and all below it, as it was.

    Attributes:
        modules: the `__dict__` of each.
        values: what was in each of these.
        empty: those of the dicts and sets that every module has in which nothing was.
        filled: the others.
        contents: what was in each of these.
        parameters: each parameter.
        flags: whether each of these required a gradient.
        buffers: a copy of each buffer that was there.
        attributes: what puts back the values of other attributes.
    """

    modules: list[dict[str, Any]]
    values: list[dict[str, Any]]
    empty: list[Any]
    filled: list[Any]
    contents: list[Any]
    parameters: list[torch.nn.Parameter]
    flags: list[bool]
    buffers: TensorCopies
    attributes: list[Restore]

    def put(self) -> None:
        """All is as it was; weights are not touched, but are in their slots."""
        for module, before in zip(self.modules, self.values, strict=True):
            put_mapping(module, before)
        for container in self.empty:
            container.clear()
        for container, content in zip(self.filled, self.contents, strict=True):
            if type(container) is set:
                container.clear()
                container.update(content)
            else:
                put_mapping(container, content)
        for parameter, requires_grad in zip(self.parameters, self.flags, strict=True):
            if parameter.requires_grad is not requires_grad:
                parameter.requires_grad_(requires_grad)
        self.buffers.put()
        for restore in self.attributes:
            restore()

    def with_flags_of(self, earlier: KeptStructure) -> KeptStructure:
        """The same with the flags that were there earlier, `training` and `requires_grad`.

        A step that was cut off in the evaluation behind its optimizers has had no time to put them back.
        """
        training = {
            id(module): before["training"]
            for module, before in zip(earlier.modules, earlier.values, strict=True)
            if "training" in before
        }
        values = [
            {**before, "training": training[id(module)]} if id(module) in training else before
            for module, before in zip(self.modules, self.values, strict=True)
        ]
        return self._replace(values=values, parameters=earlier.parameters, flags=earlier.flags)


class ModuleStructure:
    """The structure of one module and of all below it. On the training thread.

    Args:
        module: modules in it whose parameters are made by their first forward pass are left alone until then.
        name: how a message calls it.

    Attributes:
        walks: how often it was gone through, since it had other modules or attributes than before.
    """

    def __init__(self, module: torch.nn.Module, name: str = "model") -> None:
        self.walks = 0
        self._module, self._name = module, name
        self._copied = CopyMemory()
        self._unbind()

    def _unbind(self) -> None:
        self._modules: list[dict[str, Any]] = []
        self._lengths: list[int] = []
        self._empty: list[Any] = []
        self._filled: list[Any] = []
        self._parameters: list[dict[str, Any]] = []
        self._buffers: list[dict[str, Any]] = []
        self._loose: list[torch.Tensor] = []  # buffers of modules that have no slots
        self._loose_parameters: list[torch.Tensor] = []  # and parameters of such
        self._children: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._others: list[tuple[dict[str, Any], str, str]] = []
        self._is_whole = False

    def copy(self) -> KeptStructure:
        """As it is now. Walks through the module only where that has other modules or attributes than before."""
        if not self._is_bound():
            self._bind()
        parameters = [one for slots in self._parameters for one in slots.values() if one is not None]
        attributes: list[Restore] = []
        for module, attribute, path in self._others:
            value = module.get(attribute)
            if type(value) in CHANGEABLE:
                attributes += kept_or_logged(value, path)
        return KeptStructure(
            modules=self._modules,
            values=[module.copy() for module in self._modules],
            empty=self._empty,
            filled=self._filled,
            contents=[container.copy() for container in self._filled],
            parameters=parameters,
            flags=[parameter.requires_grad for parameter in parameters],
            buffers=self._copied.of(self.buffers()),
            attributes=attributes,
        )

    def buffers(self) -> list[torch.Tensor]:
        """The buffers that are there, also those that are not persistent, as of the last copy's modules."""
        slotted = [buffer for slots in self._buffers for buffer in slots.values() if buffer is not None]
        return slotted + self._loose

    def parameters(self) -> list[torch.Tensor]:
        """The parameters that are there, once for each slot, as of the last copy's modules."""
        slotted = [one for slots in self._parameters for one in slots.values() if one is not None]
        return slotted + self._loose_parameters

    def _is_bound(self) -> bool:
        return (
            self._is_whole
            and not any(self._empty)
            and self._lengths == list(map(len, self._modules))
            and all(now == before for now, before in self._children)
        )

    def _bind(self) -> None:
        self._unbind()
        self.walks += 1
        self._is_whole = True
        for path, module in self._module.named_modules(prefix=self._name):
            values, slots = vars(module), slots_of(module)
            if slots is None:
                self._loose += module.buffers(recurse=False)
                self._loose_parameters += module.parameters(recurse=False)
                continue
            if any(one is not None and is_lazy(one) for one in (*slots.parameters.values(), *slots.buffers.values())):
                self._is_whole = False
                continue
            self._modules.append(values)
            self._lengths.append(len(values))
            self._parameters.append(slots.parameters)
            self._buffers.append(slots.buffers)
            if slots.children:
                self._children.append((slots.children, dict(slots.children)))
            for container in (values[name] for name in STANDARD & values.keys()):
                if isinstance(container, (dict, set)):
                    (self._filled if container else self._empty).append(container)
            plain = STANDARD.union(
                getattr(type(module), "__constants__", ())
            )  # TorchScript's word for numbers and flags
            self._others += [(values, name, f"{path}.{name}") for name in values.keys() - plain]

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self._module, "name": self._name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["module"], state["name"])  # type: ignore[misc]  # the dicts of another process mean nothing here
