"""What `torch.save` writes: a zip archive, or (before torch 1.6) pickles followed by raw storages."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from torchelastic.checkpoint.command.command_error import CheckpointCommandError, underlying
from torchelastic.checkpoint.compat.elastic01.verification import damage_of_torch_file
from torchelastic.checkpoint.errors import CorruptCheckpointError, explained, torch_reason
from torchelastic.checkpoint.format.described_objects import KINDS
from torchelastic.checkpoint.format.structures import places_of
from torchelastic.checkpoint.format.torch_stream import put_together
from torchelastic.text import shortlist
from torchelastic.torch_internals.tensors import tree_flatten

_PICKLE_PROTOCOL_2_OR_LATER = b"\x80"
_ZIP = b"PK\x03\x04"

#: Of the largest type; where memory is cut, all types keep their alignment.
MOST_ITEM_BYTES = 16
#: Kinds of values that torch.load(weights_only=True) refuses (see `structures.places_of`), as a user knows them.
_UNLOADABLE = {
    "frozenset": "a frozenset",
    "numpy": "a numpy array or number",
    "pickle": "an object of another type",
    "made_of": "a tensor of a class that is made of others",
    **{kind: f"no plain value ({kind})" for kind in KINDS if kind != "counter"},
}


def is_one(path: Path) -> bool:
    """Whether a file may be one, by its first bytes."""
    if not path.is_file():
        return False
    with explained("read the file", path), path.open("rb") as file:
        return file.read(4).startswith((_PICKLE_PROTOCOL_2_OR_LATER, _ZIP))


def read(path: Path, *, allow_pickles: bool = False, check_all: bool = True) -> Any:
    """The state in a file, on the CPU; tensors of a zip archive are mapped, not read.

    Args:
        path: the file.
        allow_pickles: run the pickles in it, whatever they do.
        check_all: compare all checksums of a zip archive, which reads all of it.

    Raises:
        CorruptCheckpointError: the file is cut or damaged.
        CheckpointCommandError: it holds objects that are not loaded without `allow_pickles`.
    """
    with explained("read the file", path), path.open("rb") as file:
        damage = damage_of_torch_file(file, read_all=check_all)
        if damage:
            raise CorruptCheckpointError(f"{path} is no whole file of torch.save: {damage}")
        file.seek(0)
        is_zip = zipfile.is_zipfile(file)
    try:
        return put_together(torch.load(path, map_location="cpu", weights_only=not allow_pickles, mmap=is_zip))
    except pickle.UnpicklingError as error:
        raise CheckpointCommandError(
            f"{path} holds objects that run code when they are read ({torch_reason(error)}): use --allow-pickles if "
            "you trust whoever wrote it"
        ) from error
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, ImportError, EOFError) as error:
        raise CheckpointCommandError(f"torch cannot read {path}: {torch_reason(error)}") from error


def check(structure: Any, *, allow_pickles: bool) -> None:
    """Raises CheckpointCommandError if a state holds what `torch.load(weights_only=True)` would refuse."""
    if allow_pickles:
        return
    unloadable = [f"{place} is {_UNLOADABLE[kind]}" for place, kind in places_of(structure, _UNLOADABLE)]
    if unloadable:
        raise CheckpointCommandError(
            f"torch.load(weights_only=True) could not read this state back: {shortlist(unloadable)}; use "
            "--to shard, or --allow-pickles to write a file that needs weights_only=False"
        )


def write(path: Path, tree: Any) -> None:
    """Writes a state, whose tensors may get other memory: those that are one object, or share memory, go on so."""
    _cut_memory(tree)
    with explained("write the file", path), path.open("wb") as file:
        try:
            torch.save(tree, file)  # given a path, torch refuses names that begin with a dot
        except RuntimeError as error:  # what torch's zip writer makes of a full disk, or of Ctrl-C
            reason = underlying(error)
            raise OSError(torch_reason(error)) if reason is error else reason from None


def _cut_memory(tree: Any) -> None:
    """Lets go of memory that the tensors are views of and do not show: `torch.save` writes all of it."""
    leaves, _ = tree_flatten(tree)
    views: dict[int, dict[int, torch.Tensor]] = {}
    for leaf in leaves:
        if type(leaf) not in (torch.Tensor, torch.nn.Parameter) or leaf.layout is not torch.strided:
            continue
        if leaf.numel():
            views.setdefault(leaf.untyped_storage().data_ptr(), {})[id(leaf)] = leaf
        else:
            with torch.no_grad():
                leaf.set_(torch.empty(0).untyped_storage(), 0, leaf.shape, leaf.stride())
    for tensors in views.values():
        _cut_one(sorted(tensors.values(), key=lambda tensor: _shown(tensor)[0]))


def _cut_one(tensors: list[torch.Tensor]) -> None:
    """Gives views of one memory, sorted by their begin, memory of their own; those that overlap go on doing so."""
    storage = tensors[0].untyped_storage()
    groups: list[tuple[int, int, list[torch.Tensor]]] = []
    for tensor in tensors:
        begin, end = _shown(tensor)
        if groups and begin < groups[-1][1]:
            first, last, inside = groups.pop()
            groups.append((first, max(last, end), [*inside, tensor]))
        else:
            groups.append((begin - begin % MOST_ITEM_BYTES, end, [tensor]))
    if sum(end - begin for begin, end, _ in groups) >= storage.nbytes():
        return
    for begin, end, inside in groups:
        shown = torch.empty(0, dtype=torch.uint8).set_(storage, begin, (end - begin,), (1,)).clone().untyped_storage()
        for tensor in inside:
            offset = tensor.storage_offset() - begin // tensor.element_size()
            with torch.no_grad():
                tensor.set_(shown, offset, tensor.shape, tensor.stride())


def _shown(tensor: torch.Tensor) -> tuple[int, int]:
    """From which byte to which of its memory a tensor reaches."""
    begin = tensor.storage_offset() * tensor.element_size()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(begin), int(begin + (reach + 1) * tensor.element_size())
