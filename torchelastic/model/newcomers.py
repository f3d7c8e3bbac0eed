"""What a rank gets that lacks the state: as it is saved, but by names, and with what is in no `state_dict` besides."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from torchelastic.checkpoint.format.tree import path_of
from torchelastic.inventory import module_state
from torchelastic.inventory.module_values import differing_attributes, put_flags, values_of
from torchelastic.inventory.names import named_parameters
from torchelastic.model.companions import Companions, Trained
from torchelastic.text import shortlist
from torchelastic.torch_internals.tensors import tensors_within

log = logging.getLogger(__name__)

#: The model, among the modules; others are called as in `extra`.
_MODEL = None


def sent(module: torch.nn.Module, own: Companions, trained: Trained, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """What the source sends; plain values and tensors, which are not copied.

    Args:
        module: the plain one.
        own: what belongs to the state beside weights and optimizers.
        trained: what else is trained.
        attributes: those of the module that the run has changed.
    """
    return {
        **own.state_dict(trained),
        "module": module_state.state_of(module),
        "values": {name: values_of(one) for name, one in _modules(module, own).items()},
        "attributes": dict(attributes),
        "optimizer": trained.optimizers.named_state(named_parameters(module)),
        "inner": trained.optimizers.inner_states(named_parameters(module)),
        "gradients": trained.optimizers.left.by_name(named_parameters(module)),
    }


def own_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Those parameters and buffers that are made of other tensors, by their places in what is sent."""
    state = module_state.state_of(module).items()
    made = ((name, value) for name, value in state if isinstance(value, torch.Tensor) and tensors_within(value))
    return {path_of("module", name): value for name, value in made}


def receive(
    tree: Mapping[str, Any],
    module: torch.nn.Module,
    own: Companions,
    trained: Trained,
    *,
    was_in_sync: bool,
    source: int,
) -> None:
    """The inverse; random numbers stay each rank's own: one that copied them would augment like its source.

    Args:
        tree: what `sent` gave there.
        module: ours, and so the next two.
        own: see `sent`.
        trained: see `sent`.
        was_in_sync: whether this rank was in a group before, so that its optimizers may have been changed in the run.
        source: the rank that has sent it.

    Raises:
        UnfitStateError: it is of another model or of other optimizers.
    """
    keeps_types = module_state.has_types_of(module, tree["module"])
    modules = _modules(module, own)
    present = {name: values for name, values in tree["values"].items() if name in modules}
    for name, values in present.items():
        module_state.put_values(modules[name], values, tree["module"] if name is _MODEL else tree["extra"][name])
    module_state.load_into(module, tree["module"])
    for name, values in present.items():
        put_flags(modules[name], values["flags"])
    trained.optimizers.load_named_state(
        tree["optimizer"], named_parameters(module), inner=tree["inner"], keeps_types=keeps_types, may_lose=was_in_sync
    )
    trained.optimizers.left.take(tree["gradients"], named_parameters(module))
    own.load_state_dict(dict(tree), trained, with_random=False)
    differing = differing_attributes(module, tree["attributes"])
    if differing:
        log.warning(
            "step %d: attributes of the model have changed in the run, and are not sent to a worker that joins: %s "
            "(there: rank %d). Make what the training depends on a buffer, or return it from get_extra_state",
            own.step, shortlist(differing), source,
        )  # fmt: skip


def _modules(module: torch.nn.Module, own: Companions) -> dict[str | None, torch.nn.Module]:
    """The model, and what else is a module among the user's own values."""
    values = own.extras.values.items()
    return {_MODEL: module, **{name: value for name, value in values if isinstance(value, torch.nn.Module)}}
