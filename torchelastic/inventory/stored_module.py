"""What a checkpoint has of a module beside its `state_dict`, and a module that a script has just built gets of it.

Flags, the versions of modules, and buffers that are in no `state_dict`. The script may have been changed since. So each
checkpoint says which buffers had another form (shape and type) than when the script had built the module: these forms
are of the run, and a module gets them. Where any other form differs, the script asks for another one now. Flags are put
back as they were saved, and what is another than the script has set is told: it cannot be seen who has set it.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from torchelastic.inventory.module_state import state_of
from torchelastic.inventory.module_values import buffers_of, flags_of, put_buffers, put_flags
from torchelastic.inventory.names import joined, named_modules, named_parameters, plain_name
from torchelastic.text import counted, shortlist
from torchelastic.torch_internals.tensors import metadata_of, set_metadata

#: Shape and type of a buffer; None: its slot is empty.
Form = tuple[tuple[int, ...], torch.dtype] | None
#: What `stored_beside` gives; a part of it may be another rank's.
Beside = Mapping[str, Any]

_PLAIN = (bool, int, float, str, type(None))
#: What torch gives to each module that says nothing else.
_USUAL_VERSION = {"version": 1}
_EXTRA_STATE = "_extra_state"
_NAMED = 5
_REMEDY = "to have others, set requires_grad after the state was loaded"


def forms_of(module: torch.nn.Module) -> dict[str, Form]:
    """The form of each buffer: to be kept when the script has built the module, and given to `buffers_beside`."""
    return {name: _form(buffer) for name, buffer in buffers_of(module).items()}


def is_extra_state(name: str) -> bool:
    """Whether that is what a module's `get_extra_state` gave, whose form is the module's own matter."""
    return name.rpartition(".")[2] == _EXTRA_STATE


# --- what is stored ---------------------------------------------------------------------------------------------------


def stored_beside(module: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Flags and versions: plain values, equal on all ranks.

    Args:
        module: as it is now.
        state: what its `state_dict` gave.
    """
    flags = flags_of(module)
    # saved in an evaluation: what trains in evaluation mode behind it is not known
    modes = None if _evaluates(module, flags["eval"]) else sorted(flags["eval"])
    return {
        "flags": {"frozen": sorted(flags["frozen"]), "eval": modes},
        "versions": _unusual_versions(state),
    }


def _evaluates(module: torch.nn.Module, modes: Collection[str]) -> bool:
    """Whether each module is in evaluation mode, as none is that was just built."""
    return len(modes) == len({name for name, _ in named_modules(module)})


def buffers_beside(module: torch.nn.Module, built: Mapping[str, Form], state: Set[str]) -> dict[str, Any]:
    """Buffers that are in no `state_dict`, and which have been given another form; may be each rank's own.

    Args:
        module: as it is now; its tensors are not copied.
        built: what `forms_of` gave when the script had built it.
        state: the plain names in its `state_dict`.
    """
    buffers = buffers_of(module)
    reshaped = _reshaped(buffers, built)
    slots = {
        name: buffer
        for name, buffer in buffers.items()
        if name not in state and (buffer is None or _is_ordinary(buffer))
    }
    left_out = buffers.keys() - state - slots.keys()
    return {"slots": slots, "reshaped": sorted(reshaped - left_out)}


def with_reshaped(module: torch.nn.Module, built: Mapping[str, Form], buffers: Mapping[str, Any] | None) -> Beside:
    """What was stored, and those buffers besides that have another form here than when the script had built it.

    Args:
        module: ours, which may go back to an older state of its run.
        built: see `buffers_beside`, of ours.
        buffers: what `buffers_beside` gave there; None: it was not stored.
    """
    empty = {name: None for name, form in built.items() if form is None}
    stored = {"slots": empty, "reshaped": ()} if buffers is None else buffers
    return {**stored, "reshaped": sorted({*stored["reshaped"], *_reshaped(buffers_of(module), built)})}


def _reshaped(buffers: Mapping[str, torch.Tensor | None], built: Mapping[str, Form]) -> set[str]:
    forms = {name: _form(buffer) for name, buffer in buffers.items()}
    return {name for name in forms.keys() | built.keys() if forms.get(name, ()) != built.get(name, ())}


def _unusual_versions(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    versions = metadata_of(state) if isinstance(state, OrderedDict) else None
    plain = {
        plain_name(name): {key: value for key, value in about.items() if type(value) in _PLAIN}
        for name, about in (versions or {}).items()
    }
    return {name: about for name, about in plain.items() if about != _USUAL_VERSION}


def with_versions(
    state: Mapping[str, Any], versions: Mapping[str, Any] | None, modules: Iterable[str] = ()
) -> Mapping[str, Any]:
    """A state as `state_dict` gives it: with the versions of the modules, by which these bring old states up to date.

    Args:
        state: by plain names.
        versions: as they were stored; None: they were not.
        modules: the plain names of the modules that the state is for; those that are in it are known.
    """
    if versions is None:
        return state
    ordered = OrderedDict(state)
    # as torch does it: each module, before those that are below it
    names = dict.fromkeys(["", *modules, *(above for name in state for above in _above(name)), *versions])
    set_metadata(ordered, OrderedDict((name, dict(versions.get(name, _USUAL_VERSION))) for name in names))
    return ordered


def _above(name: str) -> Iterable[str]:
    parts = name.split(".")[:-1]
    return (".".join(parts[: count + 1]) for count in range(len(parts)))


# --- what is loaded ---------------------------------------------------------------------------------------------------


def state_faults(
    module: torch.nn.Module, parameters: Mapping[str, Any], others: Mapping[str, Any], reshaped: Collection[str]
) -> list[str]:
    """Why a module that a script has just built cannot have a saved state, in words; changes nothing.

    Args:
        module: ours.
        parameters: the saved ones by plain names; their contents do not matter, and so it is with the next.
        others: what else is in the saved `state_dict`.
        reshaped: see `buffers_beside`.
    """
    live = {name: value for name, value in state_of(module).items() if name not in reshaped}
    saved = {name: value for name, value in {**parameters, **others}.items() if name not in reshaped}
    for name in [name for name in others.keys() & saved.keys() if _form_of(saved[name]) != _form_of(live.get(name))]:
        if (is_extra_state(name) and name in live) or _makes_room(module, name, others):
            live[name] = saved[name]
    faults = []
    for who, lacking in (("checkpoint", live.keys() - saved.keys()), ("model", saved.keys() - live.keys())):
        if lacking:
            faults.append(f"the {who} lacks {shortlist([repr(name) for name in sorted(lacking)], _NAMED)}")
    different = [name for name in saved if name in live and _form_of(saved[name]) != _form_of(live[name])]
    faults += [f"{name!r} was {_words(saved[name])} and is {_words(live[name])}" for name in different[:_NAMED]]
    if len(different) > _NAMED:
        faults.append(f"{len(different) - _NAMED} more differ")
    return faults


def _form_of(value: Any) -> Form:
    return _form(value) if isinstance(value, torch.Tensor) else None


def _words(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return "a plain value"
    return f"a {str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"


def _makes_room(module: torch.nn.Module, name: str, saved: Mapping[str, Any]) -> bool:
    """Whether the module that has a buffer takes one of another form by a way of its own, as torch's observers do.

    It is tried with a copy of that module, which shares its weights and gets none.

    Args:
        module: ours, which stays as it is.
        name: of the buffer.
        saved: buffers by name, whose contents do not matter.
    """
    path, _, key = name.rpartition(".")
    owner = dict(named_modules(module)).get(path)
    if owner is None or not isinstance(saved.get(name), torch.Tensor):
        return False
    below = {joined(path, inner): inner for inner in owner.state_dict()} | {name: key}
    try:
        tried = copy.deepcopy(owner, {id(one): one for one in owner.parameters()})
        # of the others it has what it had, and the same values in its weights
        state = {**tried.state_dict(), **{inner: saved[outer] for outer, inner in below.items() if outer in saved}}
        tried.load_state_dict(
            {inner: value for inner, value in state.items() if not is_extra_state(inner)}, strict=False
        )
    except Exception:  # noqa: BLE001 - whatever the user's own code says to it: it does not take it
        return False
    return _form(dict(tried.named_buffers(recurse=False)).get(key)) == _form(saved[name])


def put_buffers_beside(module: torch.nn.Module, beside: Beside, state: Mapping[str, Any]) -> list[str]:
    """Have the stored buffers that no `state_dict` can bring; before the `state_dict` itself is loaded.

    Args:
        module: ours.
        beside: what `buffers_beside` gave there.
        state: the saved `state_dict`, which fits but for what is `reshaped`.

    Returns:
        What the user is to learn, one sentence each.
    """
    own, forms = buffers_of(module), forms_of(module)
    reshaped = set(beside["reshaped"])
    saved = {name: value for name, value in state.items() if name in reshaped and not is_extra_state(name)}
    slots = {name: value for name, value in beside["slots"].items() if name not in state}
    saved |= {name: value for name, value in slots.items() if _fits(name, value, forms, reshaped)}
    others = [
        name
        for name, value in saved.items()
        if name not in reshaped and name not in state and not _are_equal(value, own.get(name))
    ]
    odd = sorted(name for name, value in slots.items() if not _fits(name, value, forms, reshaped))
    placed = {name: _beside_own(module, name, value) for name, value in saved.items()}
    put_buffers(module, placed, stored=state.keys(), own=own.keys() - reshaped)
    notes = []
    if others:
        notes.append(
            f"{counted(len(others), 'buffer')} that no state_dict has ({shortlist(sorted(others))}) were saved with "
            "other values than the script has given them now, and have the saved ones"
        )
    if odd:
        notes.append(
            f"{counted(len(odd), 'buffer')} that no state_dict has ({shortlist(odd)}) are of another size or type now "
            "than the script had given them when this was saved, and stay as the script has made them"
        )
    return notes


class Allowed(NamedTuple):
    """Which flags may be put back.

    Attributes:
        freezes: a parameter that is trained may be frozen.
        thaws: the other way round.
    """

    freezes: bool
    thaws: bool


def allowed_in(wrapper: torch.nn.Module | None) -> Allowed:
    """By what is around a module.

    DDP averages nothing of what it has found frozen, and what it has found trained needs gradients, or may be unused.
    """
    if not isinstance(wrapper, DistributedDataParallel):
        return Allowed(True, True)
    return Allowed(wrapper.find_unused_parameters, False)


def put_flags_beside(module: torch.nn.Module, beside: Beside, allowed: Allowed) -> list[str]:
    """Have the flags that were stored; not where the script has frozen all, or evaluates: then it does not train.

    Args:
        module: ours, with the saved weights.
        beside: what `stored_beside` gave there.
        allowed: the others are told alone.

    Returns:
        As `put_buffers_beside`.
    """
    saved, own, known = beside["flags"], flags_of(module), named_parameters(module).keys()
    if known and known <= set(own["frozen"]):
        saved = {**saved, "frozen": own["frozen"]}
    frozen = sorted((set(saved["frozen"]) - set(own["frozen"])) & known)
    thawed = sorted((set(own["frozen"]) - set(saved["frozen"])) & known)
    now = {*own["frozen"], *(frozen if allowed.freezes else ())}.difference(thawed if allowed.thaws else ())
    modes = own["eval"] if saved["eval"] is None or _evaluates(module, own["eval"]) else saved["eval"]
    switched = [repr(name) for name in sorted(set(modes) ^ set(own["eval"]))]
    put_flags(module, {"frozen": now, "eval": modes})
    notes = [
        *_sentences(frozen, "frozen", "not frozen", allowed.freezes),
        *_sentences(thawed, "not frozen", "frozen", allowed.thaws),
    ]
    if switched:
        notes.append(
            f"{counted(len(switched), 'module')} ({shortlist(switched)}) are in training or evaluation mode as when "
            "this was saved, and not as the script has set them; to have another mode, call train() or eval() after "
            "the state was loaded"
        )
    return notes


def _sentences(names: Sequence[str], there: str, here: str, is_put: bool) -> list[str]:
    if not names:
        return []
    named = f"{counted(len(names), 'parameter')} ({shortlist(names)})"
    if is_put:
        return [f"{named} are {there}, as when this was saved, and the script has {here} them; {_REMEDY}"]
    return [
        f"{named} were {there} when this was saved, and the script has {here} them: DDP goes by what it has found when "
        "it was made, so they stay as they are; set requires_grad, then wrap the model"
    ]


def _fits(name: str, value: torch.Tensor | None, forms: Mapping[str, Form], reshaped: Collection[str]) -> bool:
    return name in reshaped or (name in forms and forms[name] == _form(value))


def _are_equal(saved: torch.Tensor | None, own: torch.Tensor | None) -> bool:
    if saved is None or own is None:
        return saved is own
    return bool(torch.equal(saved.to(own.device), own)) if saved.shape == own.shape else False


def _beside_own(module: torch.nn.Module, name: str, value: torch.Tensor | None) -> torch.Tensor | None:
    """A value where the buffer is that it replaces, or else where the nearest other tensors are."""
    if value is None:
        return None
    path, _, key = name.rpartition(".")
    owner = dict(named_modules(module)).get(path, module)
    own = dict(owner.named_buffers(recurse=False)).get(key)
    near = (own,) if own is not None else (*owner.parameters(), *owner.buffers(), *module.parameters(), value)
    return value.to(near[0].device)


def _form(buffer: torch.Tensor | None) -> Form:
    return None if buffer is None else (tuple(buffer.shape), buffer.dtype)


def _is_ordinary(buffer: torch.Tensor) -> bool:
    """Whether any checkpoint can hold it; other ones that are in no `state_dict` are the script's to make."""
    is_part = hasattr(buffer, "device_mesh") or hasattr(buffer, "__tensor_flatten__")
    return not is_part and buffer.layout is torch.strided and not buffer.is_meta and not buffer.is_nested
