"""What a checkpoint has of a module beside its `state_dict`: flags, and the buffers that are not persistent.

They may be others than what a script builds for two reasons: the run has changed them, or somebody has changed the
script since. So a checkpoint says of each how it was built and how it was when it was saved. What is built now as it
was built then becomes as it was saved; all else stays as it is built now, and is told: a three-way merge.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import torch

from torchelastic.inventory.module_values import Flags, buffers_of, flags_of, put_buffers, put_flags
from torchelastic.inventory.names import NamedParts, named_modules, named_parameters

#: How a module was built: its flags, and what stands for the content of each buffer that is not persistent.
Built = Mapping[str, Any]


def as_built(module: torch.nn.Module, persistent: Collection[str]) -> dict[str, Any]:
    """How a module is now, before anything has trained it: plain values.

    Args:
        module: any.
        persistent: the names in its `state_dict`, without what wrappers put into them.
    """
    buffers = {name: _digest(value) for name, value in buffers_of(module).items() if name not in persistent}
    return {**_plain(flags_of(module)), "buffers": buffers}


def stored_values(
    module: torch.nn.Module, parts: NamedParts, persistent: Collection[str], built: Built
) -> dict[str, Any]:
    """What is saved: plain values and tensors, which are not copied.

    Args:
        module: any.
        parts: of it.
        persistent: see `as_built`.
        built: what that gave.
    """
    buffers = buffers_of(module, parts)
    return {
        "flags": _plain(flags_of(module, parts)),
        "slots": sorted(buffers),
        "buffers": {name: buffers[name] for name in sorted(buffers.keys() - persistent)},
        "built": dict(built),
    }


def put_stored_buffers(
    module: torch.nn.Module, values: Mapping[str, Any], state: Mapping[str, Any], own: Collection[str], built: Built
) -> list[str]:
    """Have the buffers that were saved, before the saved `state_dict` is loaded, which fits their sizes then.

    Args:
        module: ours.
        values: what `stored_values` gave.
        state: the saved `state_dict`, by names without what wrappers put into them.
        own: the names in the module's own, likewise.
        built: how ours was built.

    Returns:
        The names of those that are built otherwise here than there, and stay.
    """
    now = buffers_of(module)
    wanted, kept = merged_buffers(now, values, state, own, built)
    tensors = (tensor for tensors in (module.parameters(), module.buffers()) for tensor in tensors)
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    for name, value in wanted.items():
        if value is not None and now.get(name) is None:
            wanted[name] = value.to(device, copy=True)  # it is going to be the module's own
    put_buffers(module, wanted, stored=state.keys(), own=own)
    return kept


def merged_buffers(
    now: Mapping[str, torch.Tensor | None],
    values: Mapping[str, Any],
    state: Mapping[str, Any],
    own: Collection[str],
    built: Built,
) -> tuple[dict[str, torch.Tensor | None], list[str]]:
    """All buffers that a module is to have, and the names of those that stay as they are built; changes nothing.

    Args:
        now: what `buffers_of` gives here.
        values: see `put_stored_buffers`.
        state: see there.
        own: see there.
        built: see there.
    """
    before = values.get("built", built)["buffers"]
    wanted: dict[str, torch.Tensor | None] = {}
    kept = []

    def is_built_alike(name: str) -> bool:
        return bool(before.get(name) == built["buffers"].get(name))

    for name in values["slots"]:
        if name in state:
            wanted[name] = state[name]
        elif is_built_alike(name):
            wanted[name] = values["buffers"][name]
        else:
            kept.append(name)
    for name, value in now.items():
        is_new = name not in values["slots"] and name not in own and not is_built_alike(name)
        if is_new or name in kept:
            wanted[name] = value
    return wanted, kept


def put_stored_flags(module: torch.nn.Module, values: Mapping[str, Any], built: Built) -> list[str]:
    """Have the flags that were saved; arguments and result as of `put_stored_buffers`."""
    wanted, kept = merged_flags(module, values, built)
    put_flags(module, wanted)
    return kept


def merged_flags(
    module: torch.nn.Module, values: Mapping[str, Any], built: Built
) -> tuple[dict[str, list[str]], list[str]]:
    """The flags that a module is to have, and the names of what stays as it is built; changes nothing."""
    flags, before = values["flags"], values.get("built", built)
    names = {
        "frozen": list(named_parameters(module)),
        "eval": list(dict.fromkeys(name for name, _ in named_modules(module))),
    }
    wanted: dict[str, list[str]] = {}
    kept = []
    for kind, of_kind in names.items():
        here, there, saved = set(built[kind]), set(before[kind]), set(flags[kind])
        otherwise = {name for name in of_kind if (name in here) is not (name in there)}
        wanted[kind] = sorted((saved - otherwise) | (here & otherwise))
        kept += [name or "the module" for name in of_kind if name in otherwise & (here ^ saved)]
    return wanted, kept


def _plain(flags: Flags) -> dict[str, list[str]]:
    return {kind: sorted(names) for kind, names in flags.items()}


def _digest(value: torch.Tensor | None) -> str:
    """Equal for equal content; of what has no plain bytes only the form counts."""
    if value is None:
        return "none"
    form = f"{value.dtype} {tuple(value.shape)}"
    try:
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    except (RuntimeError, TypeError, NotImplementedError):
        return f"{type(value).__name__} {form}"
    return f"{form} {hashlib.blake2b(content.data, digest_size=8).hexdigest()}"
