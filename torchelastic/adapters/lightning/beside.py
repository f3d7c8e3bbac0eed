"""What checkpoints in memory and local ones have beside Lightning's own: see `inventory.stored_module`.

Lightning stores a module's `state_dict` alone. Layers that a callback has thawed in the run (`BaseFinetuning`) would be
frozen again, since its `setup` freezes them at every start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Set
from typing import Any

import torch

from torchelastic.adapters.lightning.memory_state import BESIDE, MODEL
from torchelastic.inventory.module_state import state_of
from torchelastic.inventory.stored_module import (
    Form,
    allowed_in,
    buffers_beside,
    forms_of,
    put_buffers_beside,
    put_flags_beside,
    stored_beside,
    with_reshaped,
)

log = logging.getLogger(__name__)


class StoredBeside:
    """Of the module that a trainer fits; on the training thread. Nothing is stored of FSDP1, which has other names."""

    def __init__(self) -> None:
        self._module: torch.nn.Module | None = None
        self._forms: dict[str, Form] = {}
        self._loaded: Mapping[str, Any] | None = None

    def notice(self, trainer: Any) -> None:
        """The module is as the script has built it, if it is another one than before."""
        module = None if trainer is None else trainer.lightning_module
        if module is not None and module is not self._module and not _is_fsdp1(trainer):
            self._module, self._forms, self._loaded = module, forms_of(module), None

    def added_to(self, checkpoint: dict[str, Any], trainer: Any) -> dict[str, Any]:
        """A checkpoint of Lightning with this; the tensors are the live ones."""
        self.notice(trainer)
        module = self._module
        if module is None or module is not trainer.lightning_module:
            return checkpoint
        state = state_of(module)
        buffers = buffers_beside(module, self._forms, state.keys())
        return {**checkpoint, BESIDE: {**stored_beside(module, state), "buffers": buffers}}

    def take(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
        """Have the buffers of a checkpoint that the module's `state_dict` cannot bring; flags follow.

        Args:
            trainer: whose module gets them, if it is to be fitted; None: it is not known.
            checkpoint: without it afterwards.
        """
        beside = checkpoint.pop(BESIDE, None)
        if beside is not None and self._module is not None and trainer.state.fn == "fit":
            self._loaded = beside
            buffers = with_reshaped(self._module, self._forms, beside["buffers"])
            _tell(trainer, put_buffers_beside(self._module, buffers, checkpoint.get(MODEL, {})))

    def take_sharded(
        self, trainer: Any, rest: dict[str, Any], read: Callable[[Set[str]], dict[str, torch.Tensor]]
    ) -> None:
        """The same where the tensors of the `state_dict` are read later; `rest` stays as it is."""
        names = {f"{MODEL}/{name}" for name in rest.get(BESIDE, {}).get("buffers", {}).get("reshaped", ())}
        found = read(names) if names else {}
        state = {name.removeprefix(f"{MODEL}/"): tensor for name, tensor in found.items()}
        self.take(trainer, {**rest, MODEL: state})

    def put_flags(self, trainer: Any) -> None:
        """Have the flags of the checkpoint that was loaded, if there was one; once, when all else is there."""
        self.notice(trainer)
        beside, self._loaded = self._loaded, None
        if beside is not None and self._module is not None:
            _tell(trainer, put_flags_beside(self._module, beside, allowed_in(trainer.strategy.model)))


def _tell(trainer: Any, notes: list[str]) -> None:
    for note in notes if trainer.global_rank == 0 else ():
        log.warning("the checkpoint that was loaded: %s", note)


def _is_fsdp1(trainer: Any) -> bool:
    return any(one.__name__ == "FSDPStrategy" for one in type(trainer.strategy).__mro__)
