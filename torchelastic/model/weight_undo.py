"""How weights, gradients and optimizers are undone: by copies before each step, or by the rule of `ModelState`."""

from __future__ import annotations

import logging
import os
import time
import weakref
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from torchelastic.checkpoint.store.host_memory.room import measure
from torchelastic.inventory.module_structure import ModuleStructure
from torchelastic.inventory.weights import KeptWeights, WeightCopier
from torchelastic.model.companions import Large
from torchelastic.model.extras import Extras
from torchelastic.model.optimizers import Optimizers
from torchelastic.model.undo_choice import Trial, Undo

log = logging.getLogger(__name__)

#: How the weights are undone with each at first.
SNAPSHOT_MODES = {"auto": Undo.TRIAL, "commit": Undo.RULE, "full": Undo.COPIES}

_STRAYS = (
    "the train step changes weights itself, beside the optimizer, or a large object of `extra` before it: so that a "
    "step can be undone, weights, optimizer and such objects are copied before each one from now on. Say "
    "ModelState(..., snapshot='full') to have that from the first step on"
)


class WeightUndo:
    """Makes the copies, and decides after each step whether the next one has some. On the training thread.

    Args:
        mode: one of `SNAPSHOT_MODES`.
        module: the plain one.
        structure: of this module; copied before the weights in each step.
        optimizers: of it.
        extras: the user's own values, of which the large ones are copied with the weights.
        are_watched: watch the weights for changes beside the optimizer also where copies undo these.
    """

    def __init__(
        self,
        mode: str,
        module: torch.nn.Module,
        structure: ModuleStructure,
        optimizers: Optimizers,
        extras: Extras,
        *,
        are_watched: bool,
    ) -> None:
        self._undo = SNAPSHOT_MODES[mode]
        self._module, self._structure, self._optimizers, self._extras = module, structure, optimizers, extras
        self._are_watched = are_watched
        self._copier = WeightCopier()
        self._trial = Trial(partial(time_when_done_s, module), partial(free_memory_bytes, module))
        self._has_strayed = self._has_kept_gradients = False  # in the trial
        self._copied: weakref.ref[KeptWeights] | None = None  # before this step
        self.watch()

    @property
    def copies(self) -> bool:
        """Whether this step has copies, or is going to have some."""
        return self._undo is not Undo.RULE

    def watch(self) -> None:
        """Watch the weights that there are now for changes beside the optimizer, if these count for anything."""
        is_needed = self._are_watched or self._undo is not Undo.COPIES
        watched = self._module.parameters() if is_needed else ()
        followers = self._extras.large_tensors() if is_needed else ()
        self._optimizers.watch(watched, followers, by_bytes=self._undo is Undo.TRIAL)

    def copy(self) -> Large | None:
        """All that is large, as it is before a step; None: nothing is copied."""
        if self._undo is Undo.RULE:
            return None
        parameters = list(chain(self._structure.parameters(), self._optimizers.parameters()))
        if self._undo is Undo.COPIES:
            return self._copy_of(parameters)
        try:
            needed_bytes = self._copier.needed_bytes(parameters, self._optimizers.objects)
            no_room = self._trial.why_no_room(needed_bytes + self._extras.large_bytes())
            if no_room is not None:
                self._leave_trial(no_room)
                return self.copy()
            self._trial.copy_begins()
            large = self._copy_of(parameters)
            self._trial.copy_ends()
        except Exception as error:  # noqa: BLE001 - a tensor of a class of its own may raise anything
            self._leave_trial(f"they cannot be copied: {type(error).__name__}: {error}")
            return None
        return large

    def _copy_of(self, parameters: list[torch.Tensor]) -> Large:
        weights = self._copier.copy(parameters, self._optimizers.objects)
        self._copied = weakref.ref(weights)
        return Large(weights, self._extras.copy_large())

    def step_succeeded(self) -> None:
        """Choose how the next steps are undone."""
        if self._undo is Undo.COPIES:
            if not self._copier.with_gradients and self._has_changed_gradients():
                self._copier.with_gradients = True
        elif self._undo is Undo.RULE:
            if self._optimizers.has_strayed:
                self._set(Undo.COPIES, _STRAYS)
        else:
            self._judge_trial()

    def _judge_trial(self) -> None:
        self._has_strayed |= self._optimizers.has_strayed
        self._has_kept_gradients |= self._has_changed_gradients()
        choice = self._trial.step_ends()
        if choice.undo is Undo.RULE:
            self._leave_trial(choice.why)
        elif choice.undo is Undo.COPIES:
            self._set(Undo.COPIES)
            self._copier.with_gradients = self._has_kept_gradients

    def _leave_trial(self, why: str) -> None:
        """Copies are dear, or there can be none."""
        if self._has_strayed:
            self._set(Undo.COPIES, f"{_STRAYS}; {why}")
        else:
            self._set(Undo.RULE)
            log.info(
                "weights are not copied before each step (%s): a step that fails is undone as long as only the "
                "optimizer changes weights. Where the step changes them itself, through .data, say ModelState(..., "
                "snapshot='full')", why,
            )  # fmt: skip

    def _set(self, undo: Undo, warning: str = "") -> None:
        self._undo = undo
        if warning:
            log.warning("%s", warning)
        self.watch()

    def _has_changed_gradients(self) -> bool:
        """Whether this step has added to gradients of the step before, as far as is known."""
        weights = None if self._copied is None else self._copied()
        return weights is None or weights.have_changed_gradients

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_copied": None}


def free_memory_bytes(module: torch.nn.Module) -> int:
    """How much memory is free where a module is; of a host's, the share of one of the workers there."""
    device = _device_of(module)
    if device.type == "cuda":
        unused_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused_bytes
    workers = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return measure(Path("/")).ram_bytes // max(1, workers)


def time_when_done_s(module: torch.nn.Module) -> float:
    """The time when all is done that a module's device has been given to do."""
    device = _device_of(module)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _device_of(module: torch.nn.Module) -> torch.device:
    return next((one.device for one in module.parameters()), torch.device("cpu"))
