"""Putting a state together from the shards of all ranks, whatever number of ranks wrote them and whatever number reads.

Each piece says which region of which tensor it holds, so a reader takes from each shard what overlaps
with what it wants.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.format.header import Entry
from torchelastic.checkpoint.format.regions import Region, uncovered
from torchelastic.checkpoint.format.shard_reader import ShardReader, is_plain_memory
from torchelastic.checkpoint.format.tensor_parts import copyable, dtype_name, dtype_named
from torchelastic.checkpoint.format.tree import NamedTensor, flatten, tensor_names, unflatten
from torchelastic.text import shortlist

#: How many names an error lists before it only counts.
MAX_NAMED = 5

#: A tensor that is wanted, an entry of a shard, and the region that is read of it.
_Read = tuple[NamedTensor, Entry, Region]
_Pieces = Mapping[str, Sequence[tuple[ShardReader, Entry]]]


def read_tree(shards: Sequence[ShardReader], *, allow_pickles: bool = False) -> Any:
    """Reads the whole state: every tensor is put together from its pieces.

    Args:
        shards: all shards of one checkpoint, open. The first whose header has a structure gives the plain values.
        allow_pickles: see `unflatten`.

    Raises:
        CorruptCheckpointError: a shard is damaged.
        CheckpointError: pieces are missing; names the tensors.
    """
    structure = next((shard.header.structure for shard in shards if shard.header.structure is not None), None)
    if structure is None:
        raise CheckpointError(f"none of {_places(shards)} says how the state was built: the shard of rank 0 is missing")
    pieces = _pieces_by_name(shards)
    missing = sorted(name for name in tensor_names(structure) if name not in pieces)
    if missing:
        raise CheckpointError(
            f"{_places(shards)} lack {shortlist([repr(name) for name in missing], MAX_NAMED)}: "
            "the shards of other ranks are missing"
        )
    return unflatten(structure, read_tensors(shards), allow_pickles=allow_pickles)


def read_tensors(shards: Sequence[ShardReader]) -> dict[str, torch.Tensor]:
    """Reads every tensor that the shards hold, whole; arguments and errors as `read_tree`."""
    wanted = []
    for name, found in _pieces_by_name(shards).items():
        entry = found[0][1]
        whole = Region.whole(entry.shape)
        _require_covered(name, whole, found)
        tensor = torch.empty(entry.shape, dtype=dtype_named(entry.dtype))
        wanted.append(NamedTensor(name, tensor, entry.shape, whole))
    _fill(_planned(shards, wanted))
    return {named.name: named.tensor for named in wanted}


def read_into(shards: Sequence[ShardReader], template: Any, *, strict: bool = True, allow_pickles: bool = False) -> Any:
    """Copies the saved tensors into those of a state that exists already; a DTensor or `ShardOf` gets its own part.

    Everything is checked before the first byte is copied: names, shapes, dtypes, coverage, then the checksums of all
    that is read. So the state is either untouched or complete.

    Args:
        shards: all shards of one checkpoint, open.
        template: a state of the same structure; its tensors are overwritten in place, on whatever device they are.
        strict: names that are in only one of the two are an error; else they are passed over.
        allow_pickles: see `flatten`.

    Returns:
        The saved state, with the tensors of `template` where it has them; of a DTensor its local part.

    Raises:
        CheckpointError: names, shapes or dtypes differ; names them. Or pieces are missing.
        CorruptCheckpointError: a shard is damaged.
    """
    wanted = flatten(template, allow_pickles=allow_pickles).tensors
    pieces = _pieces_by_name(shards)
    _require_same(wanted, pieces, strict)
    present = [named for named in wanted if named.name in pieces]
    for named in present:
        _require_covered(named.name, named.region, pieces[named.name])
    reads = _planned(shards, present)
    for shard, parts in reads:
        shard.verify(names={entry.name for _, entry, _ in parts})
    with torch.no_grad():
        _fill(reads)
    structure = next((shard.header.structure for shard in shards if shard.header.structure is not None), None)
    if structure is None:
        return template
    tensors = {named.name: named.tensor for named in wanted}
    in_place = frozenset(tensors)
    absent = tensor_names(structure) - in_place
    if absent:
        tensors |= {name: tensor for name, tensor in read_tensors(shards).items() if name in absent}
    return unflatten(structure, tensors, allow_pickles=allow_pickles, in_place=in_place)


def _pieces_by_name(shards: Sequence[ShardReader]) -> dict[str, list[tuple[ShardReader, Entry]]]:
    pieces: dict[str, list[tuple[ShardReader, Entry]]] = defaultdict(list)
    for shard in shards:
        for entry in shard.header.entries:
            first = pieces[entry.name][0][1] if pieces[entry.name] else entry
            if (first.dtype, first.shape) != (entry.dtype, entry.shape):
                raise CorruptCheckpointError(
                    f"{shard.shown} says that {entry.name!r} is a {entry.dtype} of shape {entry.shape}, and another "
                    f"shard that it is a {first.dtype} of shape {first.shape}: they do not belong together"
                )
            pieces[entry.name].append((shard, entry))
    return dict(pieces)


def _planned(shards: Sequence[ShardReader], wanted: Sequence[NamedTensor]) -> list[tuple[ShardReader, list[_Read]]]:
    """What is read of each shard, if no shard before it has just that: what two hold is equal."""
    named_as = {named.name: named for named in wanted}
    done: set[tuple[str, Region]] = set()
    plan: list[tuple[ShardReader, list[_Read]]] = []
    for shard in shards:
        parts: list[_Read] = []
        for entry in shard.header.entries:
            named = named_as.get(entry.name)
            common = None if named is None else _common(entry.region, named.region)
            if named is not None and common is not None and (entry.name, common) not in done:
                done.add((entry.name, common))
                parts.append((named, entry, common))
        plan.append((shard, parts))
    return plan


def _fill(plan: Sequence[tuple[ShardReader, Sequence[_Read]]]) -> None:
    """Copies what was planned; what lies in a row in its tensor is read straight into it, the rest through a copy."""
    for shard, parts in plan:
        straight: dict[str, torch.Tensor] = {}
        by_copy: list[tuple[torch.Tensor, Entry, Region]] = []
        for named, entry, common in parts:
            place = named.tensor if common == named.region else named.tensor[common.within(named.region)]
            if common == entry.region and is_plain_memory(place):
                straight[entry.name] = place
            else:
                by_copy.append((place, entry, common))
        shard.read(straight, names=straight)
        shard.bring(entry.name for _, entry, _ in by_copy)
        for place, entry, common in by_copy:
            part = shard.read_one(entry.name)
            copyable(place).copy_(copyable(part)[common.within(entry.region)])


def _common(stored: Region, wanted: Region) -> Region | None:
    """What both hold, also where that is all of a tensor without elements."""
    return stored if stored == wanted else stored.intersection(wanted)


def _require_covered(name: str, wanted: Region, pieces: Sequence[tuple[ShardReader, Entry]]) -> None:
    missing = uncovered(wanted, [entry.region for _, entry in pieces])
    if missing:
        raise CheckpointError(
            f"{len(missing)} part(s) of the tensor {name!r} are in none of {_places([shard for shard, _ in pieces])} "
            f"(the first: {missing[0]}): the shards of other ranks are missing, read it where they are"
        )


def _require_same(wanted: Sequence[NamedTensor], pieces: _Pieces, strict: bool) -> None:
    faults = []
    missing = [named.name for named in wanted if named.name not in pieces]
    unexpected = sorted(pieces.keys() - {named.name for named in wanted})
    if strict and missing:
        faults.append(f"the checkpoint lacks {shortlist([repr(name) for name in missing], MAX_NAMED)}")
    if strict and unexpected:
        faults.append(f"the state lacks {shortlist([repr(name) for name in unexpected], MAX_NAMED)}")
    for named in wanted:
        if named.name in pieces:
            entry = pieces[named.name][0][1]
            dtype = dtype_name(named.tensor.dtype)
            if (entry.shape, entry.dtype) != (named.shape, dtype):
                faults.append(
                    f"{named.name!r} is a {entry.dtype} of shape {entry.shape} in the checkpoint, and a {dtype} of "
                    f"shape {named.shape} in the state"
                )
            if _is_expanded(named.tensor):
                faults.append(f"{named.name!r} is expanded in the state: several of its elements are one in memory")
    if faults:
        shown = faults[:MAX_NAMED] + ([f"and {len(faults) - MAX_NAMED} more"] if len(faults) > MAX_NAMED else [])
        raise CheckpointError(
            f"the checkpoint does not fit this state: {'; '.join(shown)}. Nothing was loaded; build the state as it "
            "was when it was saved" + ("" if not (missing or unexpected) else ", or pass strict=False")
        )


def _is_expanded(tensor: torch.Tensor) -> bool:
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    return tensor.numel() > 0 and any(stride == 0 and size > 1 for stride, size in sizes)


def _places(shards: Sequence[ShardReader]) -> str:
    return ", ".join(shard.shown for shard in shards) or "no shard at all"
