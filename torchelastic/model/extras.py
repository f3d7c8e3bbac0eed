"""The user's own values beside a model: plain ones, and objects with a state of their own (a GradScaler, an EMA).

The object stays the one that the user's code holds; only its state is copied, restored, sent and saved. A small state
is copied before each step. A large one (an EMA is as large as the weights) is not: like the weights it may change in a
step only after an optimizer has begun to step, and then it is synchronized together with them.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any, NamedTuple

import numpy as np
import torch

from torchelastic.inventory.attributes import SMALL_BYTES, attributes_of
from torchelastic.inventory.copies import CopyMemory, TensorCopies
from torchelastic.inventory.module_structure import ModuleStructure
from torchelastic.model.one_or_many import is_stateful
from torchelastic.torch_internals.gradients import device_of_scaler, forget_unfinished_step
from torchelastic.torch_internals.tensors import tree_flatten, tree_unflatten

log = logging.getLogger(__name__)

#: To copy more plain values takes longer than many a step: about a microsecond each.
MOST_PLAIN_VALUES = 10_000


class Copied(NamedTuple):
    """The user's values before a step: plain ones, objects, and the states of those whose state was copied.

    Attributes:
        attributes: puts back what objects are that have nothing in their state (metrics that are not saved).
    """

    plain: dict[str, Any]
    objects: dict[str, Any]
    states: dict[str, Any]
    order: tuple[str, ...]
    attributes: tuple[Callable[[], object], ...] = ()


class CopiedStates(NamedTuple):
    """The states of large objects, by name: their leaves with copies of the tensors among them, and their form."""

    states: dict[str, tuple[list[Any], TensorCopies, Any]]


class Extras:
    """The values of `ModelState.extra`, plain ones and objects with a state of their own.

    Args:
        values: the user's dict; it stays the same object.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self._large: set[int] = set()
        self._memories: dict[str, CopyMemory] = {}
        self._kept: CopiedStates | None = None
        self._structures: dict[int, ModuleStructure] = {}
        self._has_told: set[int] = set()
        self._named_large: set[str] = set()

    def objects(self) -> dict[str, Any]:
        """The objects with a state of their own, by name."""
        return {name: value for name, value in self.values.items() if is_stateful(value)}

    def measure(self) -> None:
        """Find out which objects are large; when a group forms, because measuring walks through the whole state."""
        states = {name: (value, value.state_dict()) for name, value in self.objects().items()}
        self._large = {id(value) for value, state in states.values() if tensor_bytes(state) > SMALL_BYTES}
        for name, (value, state) in states.items():
            has_nothing = isinstance(state, Mapping) and not state and bool(getattr(value, "__dict__", None))
            if has_nothing and id(value) not in self._has_told and not isinstance(value, torch.amp.GradScaler):
                self._has_told.add(id(value))
                log.warning(
                    "extra[%r], a %s, has an empty state_dict: a failed step is undone in it, but a worker that joins, "
                    "or a run that resumes, begins with it as it was built. Give it a state_dict that holds what it "
                    "counts (metrics of torchmetrics: metric.persistent(True))",
                    name, type(value).__name__,
                )  # fmt: skip

    # --- undoing a step ---------------------------------------------------------------------------

    def capture(self) -> Copied:
        """Copy what undoes a step, but for the states of large objects."""
        if not self.values:
            return Copied({}, {}, {}, ())
        objects = self.objects()
        states, attributes = {}, []
        for name, value in objects.items():
            if id(value) in self._large:
                continue
            state = value.state_dict()
            if isinstance(state, Mapping) and not state:
                attributes += self._structure_of(name, value)
                continue
            if tensor_bytes(state) > SMALL_BYTES:
                self._large.add(id(value))  # it was empty when the group formed, and has grown
                continue
            states[name] = copy.deepcopy(state)
        plain = {name: value for name, value in self.values.items() if name not in objects}
        self._say_what_is_large(plain)
        plain = _copied(plain)
        return Copied(plain, objects, states, tuple(self.values), tuple(attributes))

    def _say_what_is_large(self, plain: Mapping[str, Any]) -> None:
        for name, value in plain.items():
            if (
                not isinstance(value, (str, bytes, torch.Tensor, np.ndarray))
                and isinstance(value, Sized)
                and len(value) > MOST_PLAIN_VALUES
                and name not in self._named_large
            ):
                self._named_large.add(name)
                log.warning(
                    "extra[%r] has %s values by now, which are copied before each step: keep a large one (a replay "
                    "buffer) outside of `extra`, or in an object with state_dict and load_state_dict that gives it as "
                    "tensors and changes only after the optimizer has stepped",
                    name, f"{len(value):,}",
                )  # fmt: skip

    def _structure_of(self, name: str, value: Any) -> list[Callable[[], object]]:
        """What puts back an object whose `state_dict` is empty: it keeps what it counts in its attributes."""
        if isinstance(value, torch.nn.Module):
            structure = self._structures.get(id(value))
            if structure is None:
                if len(self._structures) > len(self.values):
                    self._structures.clear()  # of objects that were replaced
                structure = self._structures[id(value)] = ModuleStructure(value, f"extra[{name!r}]")
            return [structure.copy().put]
        return attributes_of(value, f"extra[{name!r}]") if hasattr(value, "__dict__") else []

    def restore(self, copied: Copied) -> None:
        """Go back to what `capture` returned, as far as it goes."""
        plain = copy.deepcopy(copied.plain)
        self.values.clear()
        self.values.update(
            {name: copied.objects[name] if name in copied.objects else plain[name] for name in copied.order}
        )
        for name, state in copied.states.items():
            _load(copied.objects[name], copy.deepcopy(state))
        for restore in copied.attributes:
            restore()

    def copy_large(self) -> CopiedStates:
        """Copy the states of large objects, into memory of earlier copies that nobody holds any more."""
        states = {}
        for name, value in self.objects().items() if self._large else ():
            if id(value) in self._large:
                leaves, form = tree_flatten(value.state_dict())
                tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
                kept = [leaf if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf) for leaf in leaves]
                states[name] = kept, self._memories.setdefault(name, CopyMemory()).of(tensors), form
        return CopiedStates(states)

    def large_bytes(self) -> int:
        """How much memory a copy of the large states takes."""
        large = (value for value in self.objects().values() if id(value) in self._large) if self._large else ()
        return sum(tensor_bytes(value.state_dict()) for value in large)

    def large_tensors(self) -> list[torch.Tensor]:
        """Those in the states of large objects; of an object that gives copies, these say nothing of it."""
        large = (value for value in self.objects().values() if id(value) in self._large) if self._large else ()
        return [tensor for value in large for tensor in _tensors(value.state_dict())]

    def keep_large(self) -> None:
        """Copy the large states: an optimizer is going to step, and another one later in the same train step."""
        self._kept = None  # its memory is used again
        self._kept = self.copy_large()

    def restore_kept(self) -> None:
        """Undo what has happened to the large states since `keep_large`."""
        if self._kept is not None:
            self.restore_large(self._kept)

    def restore_large(self, copied: CopiedStates) -> None:
        """Undo what has happened to the large states since they were copied."""
        objects = self.objects()
        for name, (leaves, copies, form) in copied.states.items():
            tensors = copies.by_tensor()
            state = [tensors[id(leaf)] if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf) for leaf in leaves]
            _load(objects[name], tree_unflatten(state, form))

    # --- as part of a state -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All values by name; an object's is its state. Tensors are not copied."""
        return {name: value.state_dict() if is_stateful(value) else value for name, value in self.values.items()}

    def load_state_dict(self, state: dict[str, Any], *, is_own: bool) -> None:
        """The inverse. What the state does not know stays as it was built, and that is logged.

        Args:
            state: what `state_dict` returned, here or on another rank.
            is_own: whether it is this rank's, or from a checkpoint, which an older program may have written. A plain
                value that another rank of this group does not have is removed: the others have removed it.
        """
        objects = self.objects()
        kept = self.values if is_own else objects
        missing = {name: value for name, value in kept.items() if name not in state}
        if missing:
            log.warning("extra: the state that is loaded has nothing for %s: kept as built", ", ".join(missing))
        self.values.clear()
        self.values.update({name: objects.get(name, value) for name, value in state.items()})
        self.values.update(missing)
        for name, value in objects.items():
            if name not in missing:
                _load(value, state[name])

    def states(self) -> dict[str, Any]:
        """The states of the objects alone, by name."""
        return {name: value.state_dict() for name, value in self.objects().items()}

    def load_states(self, states: Mapping[str, Any]) -> None:
        """The inverse of `states`."""
        objects = self.objects()
        for name, state in states.items():
            _load(objects[name], state)

    def __getstate__(self) -> dict[str, Any]:
        return {"values": self.values}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["values"])  # type: ignore[misc]  # ids of another process mean nothing here


def _copied(plain: dict[str, Any]) -> dict[str, Any]:
    copies: dict[str, Any] = {}
    memo: dict[int, Any] = {}
    for name, value in plain.items():
        try:
            copies[name] = copy.deepcopy(value, memo)
        except Exception as error:
            raise TypeError(
                f"extra[{name!r}] cannot be copied before a step, which undoes it: keep plain values (loss.item()), "
                f"tensors without a gradient (loss.detach()), or objects with a state_dict: {error}"
            ) from error
    return copies


def tensor_bytes(tree: Any) -> int:
    """Bytes of all tensors in a nested state."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(tree))


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)


def _load(value: Any, state: Any) -> None:
    value.load_state_dict(state)
    if isinstance(value, torch.amp.GradScaler) and value.is_enabled():
        forget_unfinished_step(value)
        # its scale is made by the first loss; a rank that has no logical shard of its first batch steps without one
        value.scale(torch.zeros((), device=device_of_scaler(value)))
