"""What an accelerator has prepared, as the parts of a checkpoint, and back; see `accelerate.py`.

Optimizer state goes by the names of parameters: the number of the model, and the name in it. What a model has beside
its `state_dict` is what `inventory.stored_module` says. Inside an accumulation (`accelerator.accumulate`) the gradients
of that window are each rank's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from torchelastic.adapters.hugging_face.rank_state import RankState, rng_state
from torchelastic.inventory.module_state import load_into, parted, state_of
from torchelastic.inventory.names import named_modules, named_parameters
from torchelastic.inventory.optimizer_values import (
    GroupNames,
    load_named_state,
    members_of,
    named_state,
    stored_faults,
)
from torchelastic.inventory.stored_module import (
    Allowed,
    Form,
    buffers_beside,
    forms_of,
    is_extra_state,
    put_buffers_beside,
    put_flags_beside,
    state_faults,
    stored_beside,
    with_reshaped,
    with_versions,
)


class Prepared:
    """The models, optimizers, schedulers and registered objects of an accelerator; on the training thread.

    Args:
        accelerator: may prepare more later.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        #: As the script has made them: with the objects, whose ids are the keys, so that these are of them for good.
        self._forms: dict[int, tuple[Any, dict[str, Form]]] = {}
        self._groups: dict[int, tuple[Any, GroupNames]] = {}
        self.notice()

    def notice(self) -> None:
        """What the run changes from now on in what is prepared is told from what it is now."""
        for model in self._models():
            self._forms.setdefault(id(model), (model, forms_of(model)))
        live = self._parameters()
        for optimizer in self._optimizers():
            self._groups.setdefault(id(optimizer), (optimizer, members_of(optimizer, live)))

    def parts(self, extra: dict[str, Any]) -> RankState:
        """All that is saved, but for dataloaders; the tensors are the live ones."""
        self.notice()
        accelerator, live = self._accelerator, self._parameters()
        states = [(model, *parted(model, state_of(model))) for model in self._models()]
        optimizers = self._optimizers()
        groups = [(self._groups[id(one)][1], members_of(one, live)) for one in optimizers]
        replicated = {
            "parameters": [parameters for _, parameters, _ in states],
            "named_optimizers": [named_state(optimizer, live) for optimizer in optimizers],
        }
        leading = {
            "buffers": [others for _, _, others in states],
            "beside": [self._beside(model, {**parameters, **others}) for model, parameters, others in states],
            "built_groups": [None if built == now else built for built, now in groups],
            "schedulers": [scheduler.state_dict() for scheduler in accelerator._schedulers],
            "objects": [one.state_dict() for one in accelerator._custom_objects],
            "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
            "step": accelerator.step,
            "ranks": accelerator.num_processes,
            "is_accumulating": not accelerator.sync_gradients,
            "extra": extra,
        }
        keeps_all = accelerator.use_distributed and not self._ddp("broadcast_buffers", True)
        own = {
            "rng": rng_state(),
            "others": [
                {name: value for name, value in others.items() if keeps_all or is_extra_state(name)}
                for _, _, others in states
            ],
            "buffers": [one["buffers"] if keeps_all else None for one in leading["beside"]],
        }
        return RankState(replicated, leading, {**own, **self._window()})

    def _ddp(self, name: str, default: bool) -> bool:
        """What DDP is told: the accelerator has the models that are in it, and not itself."""
        return bool(getattr(self._accelerator.ddp_handler, name, default))

    def _allowed(self) -> Allowed:
        is_wrapped = self._accelerator.use_distributed
        return Allowed(not is_wrapped or self._ddp("find_unused_parameters", False), not is_wrapped)

    def _beside(self, model: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
        buffers = buffers_beside(model, self._forms[id(model)][1], state.keys())
        return {**stored_beside(model, state_of(model)), "buffers": buffers}

    def _window(self) -> dict[str, Any]:
        """The gradients of an accumulation that is under way."""
        if self._accelerator.sync_gradients:
            return {}
        gradients = {name: one.grad for name, one in self._parameters().items() if one.grad is not None}
        return {"gradients": gradients} if gradients else {}

    # --- loading ------------------------------------------------------------------------------------------------------

    def faults(self, saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
        """Why what was saved does not fit what is prepared, in words; changes nothing.

        Args:
            saved: what is equal on all ranks, or rank 0's.
            own: what was this rank's; empty: it did not save.
        """
        accelerator, found = self._accelerator, list[str]()
        optimizers = saved.get("named_optimizers", saved.get("optimizers"))
        for what, states, present in (
            ("models", saved["parameters"], accelerator._models),
            ("optimizers", optimizers, accelerator._optimizers),
            ("schedulers", saved["schedulers"], accelerator._schedulers),
            ("dataloaders", saved["dataloaders"], accelerator._dataloaders),
            ("objects registered for checkpointing", saved["objects"], accelerator._custom_objects),
        ):
            if len(states) != len(present):
                found.append(f"it has {len(states)} {what}, and the accelerator has prepared {len(present)}")
        if found:
            return found
        for number, (model, parameters, others, beside) in enumerate(self._saved_models(saved, own)):
            reshaped = beside["buffers"]["reshaped"]
            found += [f"model {number}: {fault}" for fault in state_faults(model, parameters, others, reshaped)]
        live = self._parameters()
        if "named_optimizers" in saved:
            of_each = zip(optimizers, saved["built_groups"], self._optimizers(), strict=True)
            for number, (state, built, optimizer) in enumerate(of_each):
                here = self._groups[id(optimizer)][1]
                faults = stored_faults(state, built, optimizer, live, here)
                found += [f"optimizer {number}: {fault}" for fault in faults]
        return found

    def apply(self, saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
        """The inverse of `parts`, but for random numbers and gradients; `faults` found none.

        Returns:
            What the user is to learn, one sentence each.
        """
        accelerator, notes = self._accelerator, list[str]()
        self.notice()
        for model, parameters, others, beside in self._saved_models(saved, own):
            notes += put_buffers_beside(model, beside["buffers"], others)
            modules = [name for name, _ in named_modules(model)]
            load_into(model, with_versions({**parameters, **others}, beside.get("versions"), modules))
        live = self._parameters()
        for optimizer, state in zip(self._optimizers(), saved.get("named_optimizers", ()), strict=False):
            notes += load_named_state(optimizer, state, live)
        for objects, states in (
            (accelerator._optimizers, saved.get("optimizers", ())),
            (accelerator._schedulers, saved["schedulers"]),
            (accelerator._custom_objects, saved["objects"]),
        ):
            for one, state in zip(objects, states, strict=False):
                one.load_state_dict(state)
        if accelerator.scaler is not None and saved["scaler"] is not None:
            accelerator.scaler.load_state_dict(saved["scaler"])
        accelerator.step = saved["step"]
        for model, _, _, beside in self._saved_models(saved, own):
            if "flags" in beside:
                notes += put_flags_beside(model, beside, self._allowed())
        return notes

    def put_gradients(self, windows: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Have the gradients of an accumulation that was under way.

        Args:
            windows: what this rank had; or what each rank had, where their number is another one now: each has the
                mean of it then, which is what the ranks would have come to together.
        """
        for name, parameter in self._parameters().items():
            given = [window[name] for window in windows if name in window]
            if given:
                gradient = given[0] if len(given) == len(windows) == 1 else sum(given[1:], given[0]) / len(windows)
                parameter.grad = gradient.to(parameter.device)
        if any(windows):
            self._accelerator.sync_gradients = False

    # --- inside -------------------------------------------------------------------------------------------------------

    def _models(self) -> list[torch.nn.Module]:
        unwrap = self._accelerator.unwrap_model
        return [unwrap(model, keep_torch_compile=False) for model in self._accelerator._models]

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [getattr(one, "optimizer", one) for one in self._accelerator._optimizers]

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        """Of all models, each by the number of its model and its name there."""
        return named_parameters(torch.nn.ModuleList(self._models()))

    def _saved_models(
        self, saved: Mapping[str, Any], own: Mapping[str, Any]
    ) -> Iterator[tuple[torch.nn.Module, dict[str, Any], dict[str, Any], Mapping[str, Any]]]:
        """Each model with the saved parameters, the rest of its `state_dict`, and what was stored beside that."""
        nothing: list[Any] = [{} for _ in self._accelerator._models]
        of_each = zip(
            self._models(),
            saved["parameters"],
            saved["buffers"],
            saved.get("beside", nothing),
            own.get("others", nothing),
            own.get("buffers", nothing),
            strict=True,
        )
        for model, parameters, others, beside, mine, buffers in of_each:
            stored = with_reshaped(model, self._forms[id(model)][1], buffers or beside.get("buffers"))
            yield model, parameters, {**others, **mine}, {**beside, "buffers": stored}
