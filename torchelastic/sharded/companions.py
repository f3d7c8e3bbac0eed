"""The companions of a `ShardedState` with what `build` has made: as they go to other ranks, and to checkpoints."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import torch

from torchelastic.checkpoint.format.tensor_parts import contiguous, dtype_name, dtype_named, memory_of
from torchelastic.checkpoint.format.tree import flatten, unflatten
from torchelastic.errors import NonRetryableException
from torchelastic.inventory.module_parts import EXTRA_STATE
from torchelastic.inventory.module_state import state_of
from torchelastic.inventory.module_values import differing_attributes, put_attributes, ties_of
from torchelastic.inventory.names import named_modules, plain_name
from torchelastic.inventory.packing import as_packed
from torchelastic.inventory.stored_values import merged_buffers, merged_flags
from torchelastic.model.companions import Companions
from torchelastic.model.stored_form import MODEL, OF_RANKS, form_of, report_buffers, report_flags
from torchelastic.model.transfer import UnsendableError
from torchelastic.sharded.built import Built, other_parameters
from torchelastic.sharded.plain_tensors import own_tree, plain_names
from torchelastic.sharded.stored_names import names_in_tree, plain_values_in, settings_in
from torchelastic.text import shortlist
from torchelastic.torch_internals.tensors import has_version_of_its_own, metadata_of

log = logging.getLogger(__name__)

#: The structure of a tree, the names, types and shapes of its tensors, and their bytes.
_Written = tuple[Any, list[tuple[str, str, tuple[int, ...]]], bytes]


def companions_tree(own: Companions, built: Built) -> dict[str, Any]:
    """All that goes with the parts, as plain values and tensors, which are valid until it is asked for again."""
    return {
        **own.state_dict(built.trained),
        "module": {**built.rest.tree(), "is_whole": True},
        "beside": {name: parts.tree() for name, parts in built.parts_of(own.extras.values).items()},
        "groups": built.groups(),
        "others": built.others(),
        "values": built.plain_values(),
    }


def checkpoint_tree(own: Companions, built: Built, equal: Collection[str], rank: int) -> dict[str, Any]:
    """The whole state in the form of `ModelState`'s, with DTensors; the tensors are not copied.

    Args:
        own: what goes with the parts.
        built: the parts, and what the model has besides.
        equal: names of plain tensors that are known to be equal on all ranks; of the others each rank's own are stored.
        rank: this one.
    """
    state: Any = state_of(built.model)
    for name, first in ties_of(built.model).items():
        if name in state:
            state[name] = state[first]  # one object is stored once, also where this rank has no part of it
    whole = {"module": state, "optimizer": built.optimizers.state_dict(), **own.state_dict(built.trained)}
    names = [name for name in plain_names(built.layout()) if name not in equal]
    tensors = built.tensors() if names else {}
    of_ranks = own_tree({name: tensors[name] for name in names}, rank)
    return {**whole, **built.form.beside(whole), **({OF_RANKS: of_ranks} if of_ranks else {})}


def companions_in(tree: Mapping[str, Any], built: Built) -> dict[str, Any]:
    """What goes with the parts in a checkpoint, of a `ShardedState` or of a `ModelState`, as `companions_tree` has it.

    Args:
        tree: of the checkpoint; in place of tensors that are stored in parts it has some without memory.
        built: what was built here: whose names count.

    Raises:
        NonRetryableException: the checkpoint is of another model or of other optimizers.
    """
    module = {plain_name(name): value for name, value in tree["module"].items()}
    _require_versions(tree["module"], built.model)
    values = tree["values"] if form_of(tree) > 1 else None
    states = {name: value for name, value in module.items() if name.rpartition(".")[2] == EXTRA_STATE}
    weights = built.parameters.keys() | ties_of(built.model).keys() | states.keys()
    buffers = {name: value for name, value in module.items() if name not in weights}
    strange = [name for name, value in buffers.items() if value.is_meta or not built.rest.may_have(name)]
    strange += built.parameters.keys() - module.keys()
    if strange:
        raise NonRetryableException(other_parameters(sorted(strange)))
    persistent, flags, is_whole = list(buffers), None, values is not None
    if values is not None:
        as_built = built.form.built[MODEL]
        merged, kept = merged_buffers(built.rest.buffers(), values[MODEL], buffers, built.rest.persistent(), as_built)
        buffers = {name: value for name, value in merged.items() if name in buffers or name not in kept}
        is_whole = not kept  # others stay as they are built
        report_buffers(kept)
        flags, kept = merged_flags(built.model, values[MODEL], as_built)
        report_flags(kept)
    lacking = sorted(name for name in built.rest.persistent() if name not in buffers)
    if lacking:
        raise NonRetryableException(
            f"the checkpoint is of another model: it has no {shortlist(lacking)}, and the model that build(mesh) has "
            "made has such buffers. Build the model as it was when it was saved, or save to another folder"
        )
    names = names_in_tree(tree, built)
    return {
        "module": {
            "flags": flags,
            "buffers": as_packed(buffers),
            "persistent": persistent,
            "states": {name.rpartition(".")[0]: value for name, value in states.items()},
            "attributes": tree.get("attributes", {}),
            "is_whole": is_whole,
        },
        "beside": {},
        "groups": settings_in(tree["optimizer"], built, names, tree.get("groups")),
        "others": [],
        "optimizer_steps": tree.get("optimizer_steps", ()),
        "values": plain_values_in(tree["optimizer"], built, names),
        **{key: tree[key] for key in ("scheduler", "sampler", "extra", "step", "epoch", "random")},
    }


def _require_versions(stored: Mapping[str, Any], model: torch.nn.Module) -> None:
    """Raise NonRetryableException where a module was saved by another version of its class, which loads it otherwise.

    Args:
        stored: the model's state in a checkpoint.
        model: the one here.
    """
    before, now = _versions_in(stored), _versions_in(state_of(model))
    of_objects = {name for name, module in named_modules(model) if has_version_of_its_own(module)}
    known = (before.keys() & now.keys()) - of_objects
    other = sorted(name for name in known if before[name] != now[name])
    if other:
        name = other[0]
        raise NonRetryableException(
            f"the module {name or '(the model itself)'!r} was saved as version {before[name]} of its class and is "
            f"version {now[name]} here: no worker has it whole to bring it up to date. Load the checkpoint with a "
            "ModelState and save it again, or use the class as it was"
        )


def _versions_in(state: Mapping[str, Any]) -> dict[str, Any]:
    versions = metadata_of(state) if isinstance(state, OrderedDict) else None
    return {plain_name(name): about.get("version") for name, about in (versions or {}).items()}


def load_companions(own: Companions, tree: dict[str, Any], built: Built, *, with_random: bool, is_stored: bool) -> None:
    """The inverse of `companions_tree`, into what was built for a new group, whose optimizers have their state already.

    Args:
        own: what is overwritten.
        tree: of this rank or of another one.
        built: for the new group.
        with_random: see `Companions.load_state_dict`.
        is_stored: the same.
    """
    module, device = tree["module"], torch.device(built.mesh.device_type)
    built.rest.load(module, device=device, is_whole=module["is_whole"])
    for name, parts in built.parts_of(own.extras.values).items():
        if name in tree["beside"]:
            parts.load(tree["beside"][name], device=device, is_whole=True)
    attributes = module["attributes"]
    own.load_state_dict(tree, built.trained, with_random=with_random, is_stored=is_stored)
    if with_random:
        put_attributes(built.model, attributes)
    elif differing := differing_attributes(built.model, attributes):
        log.warning(
            "step %d: attributes of the model have changed in the run, and a worker that joins, or a run that resumes, "
            "does not get them: %s. Make what the training depends on a buffer, or return it from get_extra_state",
            own.step, shortlist(differing),
        )  # fmt: skip
    built.optimizers.load_settings(tree["groups"])


def to_bytes(tree: dict[str, Any]) -> bytes:
    """A tree of what a checkpoint can hold, written; the inverse of `from_bytes`.

    Raises:
        UnsendableError: there is something else in it; names it.
    """
    try:
        flat = flatten(tree, allow_pickles=None)
    except (TypeError, ValueError) as error:
        raise UnsendableError(f"what goes with a sharded state cannot be given to other workers: {error}") from error
    forms = [(part.name, dtype_name(part.tensor.dtype), tuple(part.tensor.shape)) for part in flat.tensors]
    data = b"".join(memory_of(contiguous(part.tensor)) for part in flat.tensors)
    return msgspec.msgpack.encode((flat.structure, forms, data))


def from_bytes(data: bytes) -> dict[str, Any]:
    """The inverse of `to_bytes`. Raises CheckpointError: a class in it is not defined in this process."""
    structure, forms, content = msgspec.msgpack.decode(data, type=_Written)
    begin, tensors = 0, dict[str, torch.Tensor]()
    for name, dtype, shape in forms:
        tensors[name] = tensor = torch.empty(shape, dtype=dtype_named(dtype))
        if tensor.nbytes:  # what is empty has no memory that could be written to
            memory_of(tensor)[:] = content[begin : begin + tensor.nbytes]
        begin += tensor.nbytes
    tree: dict[str, Any] = unflatten(structure, tensors, allow_pickles=None)
    return tree
