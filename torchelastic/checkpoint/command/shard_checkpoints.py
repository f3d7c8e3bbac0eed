"""Reading checkpoints of shards, whoever has written them: a single file, or a folder of them with a manifest.

Tiers, `BCPState` and `LocalCheckpointManager` write such folders (see `torchelastic.checkpoint.store`); of the last one
each session has a folder of them.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torchelastic.checkpoint.command.command_error import CheckpointCommandError
from torchelastic.checkpoint.command.format import Advance, Contents, Format, FoundCheckpoint, TensorRow, still_there
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError, explained
from torchelastic.checkpoint.format.batches import checksums_in, over_batches
from torchelastic.checkpoint.format.header import PREAMBLE_BYTES, decode_preamble, encode_preamble
from torchelastic.checkpoint.format.loading import read_tree
from torchelastic.checkpoint.format.regions import Region
from torchelastic.checkpoint.format.shard_reader import ShardReader, load_tree
from torchelastic.checkpoint.format.tensor_parts import dtype_named
from torchelastic.checkpoint.format.tree import tensor_names
from torchelastic.checkpoint.store.inventory import info_of
from torchelastic.checkpoint.store.kinds import LOCAL_STATE, TRAINING_STATE, Kind, kind_in, kind_of
from torchelastic.checkpoint.store.manifest import MANIFEST_NAME
from torchelastic.checkpoint.store.reading import names_in, open_shard, read_manifest, sizes_in
from torchelastic.checkpoint.store.rewinds import Rewind, counts
from torchelastic.checkpoint.store.save_id import SaveId, shard_file_name
from torchelastic.checkpoint.store.writing import remove_folder
from torchelastic.console import complain
from torchelastic.text import shortlist

_UNFINISHED = "not finished: it has no manifest; its job is still saving it, or was stopped"
#: Each host has a folder of its own for these: what is not in it is on another one.
_OF_EACH_HOST = (Kind.LOCAL, Kind.MEMORY)
#: A file of this name that does not begin like a shard is a torn one.
_SUFFIX = ".shard"
_START = encode_preamble(b"", 0, 0)[:8]

#: How a shard is opened.
_Opener = Callable[[], ShardReader]


class ShardFormat(Format):
    """Checkpoints of one shard or several."""

    def contents(self, found: FoundCheckpoint) -> Contents:
        """Out of the headers of the shards that are here."""
        with opened_shards(found, all_of_it=False) as shards:
            return contents_of(shards)

    def verify(self, found: FoundCheckpoint, advance: Advance) -> list[str]:
        """Compares each header and each tensor, and the headers with the manifest; goes on behind what is damaged."""
        if found.is_unfinished:
            return []
        all_of_it = found.path.is_file() or kind_at(found.path) not in _OF_EACH_HOST
        lines = damages_of(openers_of(found, all_of_it=all_of_it), advance)
        return lines or ([] if found.damage is None else [found.damage])

    def load(self, found: FoundCheckpoint, *, allow_pickles: bool) -> Any:
        """Put together from all shards."""
        with opened_shards(found) as shards:
            return read_tree(shards, allow_pickles=allow_pickles)


class ShardFile(ShardFormat):
    """A single file, such as `save_tree` writes."""

    kind = "shard"

    def find(self, path: Path) -> list[FoundCheckpoint]:
        """The file, if it is one; as its header describes it."""
        if not is_shard(path):
            return []
        with explained("look at the checkpoint", path):
            status = path.stat()
        meta, damage = _stated_in(path)
        one = FoundCheckpoint(
            format=self,
            path=path,
            name=path.name,
            step=_first_number(meta, "step", "iteration"),
            world_size=_first_number(meta, "world_size"),
            saved_s=status.st_mtime,
            size_bytes=status.st_size,
            damage=damage,
            shards=(path,),
            facts=meta,
        )
        return [one]

    def load(self, found: FoundCheckpoint, *, allow_pickles: bool) -> Any:
        """All of it, if it is whole."""
        with ShardReader(found.path) as shard:
            lacks_structure = shard.header.structure is None and shard.header.entries
        if lacks_structure or found.facts.get("kind") == TRAINING_STATE:
            raise CheckpointCommandError(f"{found.path} is a part of a checkpoint: give its folder {found.path.parent}")
        return load_tree(found.path, allow_pickles=allow_pickles)


class FolderOfShards(ShardFormat):
    """Folders of shards."""

    kind = "shards"

    def find(self, path: Path) -> list[FoundCheckpoint]:
        """One folder of shards, or all that are in a folder, local ones of all sessions there."""
        if not path.is_dir():
            return []
        rewinds = list[Rewind]()
        if SaveId.find(path.name) is not None or _has_manifest(path):
            paths = [path]
        else:
            paths, rewinds = checkpoints_in(path) + _sessions_in(path), Rewind.all_in(names_in(path))
        found = still_there(paths, lambda one: None if kind_at(one) is Kind.MEMORY else self._look_at(one))
        return [
            replace(one, is_rewound=not counts(SaveId.parse(one.name), rewinds)) if rewinds else one for one in found
        ]

    def load(self, found: FoundCheckpoint, *, allow_pickles: bool) -> Any:
        """Put together from all shards; of local checkpoints if they are parts, and not each a state of its own."""
        with opened_shards(found) as shards:
            if len(shards) > 1 and any(shard.header.meta.get("kind") == LOCAL_STATE for shard in shards):
                _require_parts(found, shards)
            if any(shard.header.meta.get("kind") == TRAINING_STATE for shard in shards):
                from torchelastic.checkpoint.compat.velastic.shard import read_state_dict

                complain(f"left out of {found.name}: what is each rank's own (its extra state, its random numbers)")
                return read_state_dict(shards, allow_pickles=allow_pickles)
            return read_tree(shards, allow_pickles=allow_pickles)

    def remove(self, found: FoundCheckpoint) -> None:
        """Hidden first, then removed; a reader that has it open can go on."""
        remove_folder(found.path.parent, SaveId.parse(found.path.name).folder_name)

    def _look_at(self, folder: Path) -> FoundCheckpoint:
        with explained("look at the checkpoint", folder):
            saved_s = folder.stat().st_mtime
        sizes, name = sizes_in(folder), SaveId.find(folder.name)
        manifest, info, here, is_unfinished = None, None, list[str](), False
        facts: dict[str, Any] = {}
        try:
            manifest = read_manifest(folder)
        except CheckpointError as error:
            damage: str | None = str(error)
            before, sizes = sizes, sizes_in(folder)
            # it may just have come or gone, and object storage in a folder creates it empty
            if name is not None and not (before.get(MANIFEST_NAME) and sizes.get(MANIFEST_NAME)):
                info, damage = info_of(name, folder, error, sizes, whole=False), None
                here = [shard_file_name(rank, info.world_size) for rank in sorted(info.shards)]
                # a local one counts without a manifest where all ranks have written it, as for its manager
                is_unfinished = kind_in(folder) is not Kind.LOCAL or len(here) < info.world_size
                is_unfinished = is_unfinished or any(_is_with_its_writer(folder / file) for file in here)
        else:
            sizes = sizes_in(folder)  # again: all that it names has come before it
            name, saved_s, facts = manifest.name, manifest.saved_s or saved_s, {"run": manifest.run_id}
            info = info_of(name, folder, manifest, sizes, whole=False)
            # what is not here may be elsewhere: in a tier of which each host has its own
            none_here = None if info.shards else f"none of its {info.world_size} shards is in {folder}"
            damage = info.damage or none_here
            here = [record.file for record in manifest.shards if record.file in sizes]
        if name is not None:
            facts |= {"fencing token": f"epoch {name.epoch}, round {name.round}", "generation": name.generation}
        part = described_part(info.shards, info.world_size) if info is not None and damage is None else None
        return FoundCheckpoint(
            format=self,
            path=folder,
            name=folder.name,
            step=name.step if name is not None else None,
            world_size=info.world_size if info is not None else None,
            saved_s=saved_s,
            size_bytes=manifest.size_bytes if manifest else sum(size or 0 for size in sizes.values()),
            damage=damage,
            partial=_UNFINISHED if is_unfinished else part,
            is_unfinished=is_unfinished,
            shards=tuple(folder / file for file in here),
            manifest=manifest,
            facts=facts,
            metrics=manifest.metrics if manifest else {},
        )


def _is_with_its_writer(path: Path) -> bool:
    """Whether whoever has written a shard still has it to itself: it is being sent to other hosts, say."""
    try:
        with ShardReader(path):
            return False
    except CorruptCheckpointError:
        return False
    except CheckpointError:
        return True


def is_shard(path: Path) -> bool:
    """Whether a path is a shard file, also a torn one."""
    if not path.is_file():
        return False
    if path.suffix == _SUFFIX:
        return True
    with explained("read the file", path), path.open("rb") as file:
        return file.read(len(_START)) == _START


def contents_of(shards: Iterable[ShardReader]) -> Contents:
    """What shards of one checkpoint hold together."""
    rows: dict[str, TensorRow] = {}
    structure = None
    for shard in shards:
        structure = shard.header.structure if structure is None else structure
        for entry in shard.header.entries:
            place = (
                shard.path.name if entry.region.sizes == entry.shape else f"{shard.path.name}{_ranges(entry.region)}"
            )
            before = rows[entry.name].shards if entry.name in rows else ()
            size_bytes = math.prod(entry.shape) * dtype_named(entry.dtype).itemsize
            rows[entry.name] = TensorRow(entry.name, entry.dtype, entry.shape, size_bytes, (*before, place))
    return Contents(structure, list(rows.values()))


def damages_of(openers: Iterable[_Opener], advance: Advance) -> list[str]:
    """Compares every shard with its checksums, and goes on behind what is damaged; a line for each damage."""
    lines = []
    for opened in openers:
        try:
            with opened() as shard:
                lines += _damage_of(shard, advance)
        except CorruptCheckpointError as error:
            lines.append(str(error))
    return lines


def described_part(ranks: Iterable[int], world_size: int) -> str | None:
    """What is here of a checkpoint, of which the rest may be elsewhere; None for all of it."""
    here = sorted(set(ranks))
    if len(here) == world_size:
        return None
    return f"only the shards of rank(s) {', '.join(map(str, here)) or 'none'} of {world_size} are here"


def _stated_in(path: Path) -> tuple[dict[str, Any], str | None]:
    """What the header of a shard says; and why it cannot be read."""
    try:
        with ShardReader(path) as shard:
            return dict(shard.header.meta), None
    except CheckpointError as error:
        return {}, str(error)


@contextmanager
def opened_shards(found: FoundCheckpoint, *, all_of_it: bool = True) -> Iterator[list[ShardReader]]:
    """Opens its shards.

    Args:
        found: the checkpoint.
        all_of_it: also those that its manifest has and that are not here, which is an error.

    Raises:
        CheckpointError: a shard cannot be opened, or is not what the manifest says.
    """
    with ExitStack() as opened:
        yield [opened.enter_context(opener()) for opener in openers_of(found, all_of_it=all_of_it)]


def _require_parts(found: FoundCheckpoint, shards: Sequence[ShardReader]) -> None:
    """Refuses local shards that are no parts of one state; reports what differs between ranks (rank 0's is taken)."""
    entries = [entry for shard in shards for entry in shard.header.entries]
    if not any(entry.is_shard for entry in entries):
        raise CheckpointCommandError(
            f"in {found.name} each of {len(shards)} ranks has saved a state of its own: give the shard of one rank, "
            f"such as {found.shards[0]}"
        )
    structures = [shard.header.structure for shard in shards]
    names = [tensor_names(structure) for structure in structures]
    lost = sorted({name for some in names for name in names[0] ^ some})
    if lost:
        raise CheckpointCommandError(
            f"in {found.name} only some ranks have {shortlist(lost)}: load it with LocalCheckpointManager.load_all()"
        )
    wholes = {(entry.name, entry.checksum) for entry in entries if not entry.is_shard}
    own = sorted(name for name, count in Counter(name for name, _ in wholes).items() if count > 1)
    if any(structure != structures[0] for structure in structures):
        own.append("values that are no tensors")
    if own:
        complain(f"of {found.name}, what is each rank's own is rank 0's: {shortlist(own)}")


def openers_of(found: FoundCheckpoint, *, all_of_it: bool) -> list[_Opener]:
    """How to open each shard; with `all_of_it` also those that belong to it and are not here, which is an error.

    What the manifest says of a shard is compared when it is opened.
    """
    if found.manifest is None:
        missing = (
            [partial(_raise_incomplete, f"{found.path} is not whole: {found.partial}")]
            if all_of_it and found.partial
            else []
        )
        return [*(partial(ShardReader, path) for path in found.shards), *missing]
    records = found.manifest.shards
    wanted = [record for record in records if all_of_it or found.path / record.file in found.shards]
    return [partial(open_shard, found.path, record) for record in wanted]


def _raise_incomplete(why: str) -> ShardReader:
    raise CorruptCheckpointError(why)


def _damage_of(shard: ShardReader, advance: Advance) -> list[str]:
    """Compares every tensor of a shard with its checksum; one line for each that differs."""
    entries = shard.header.entries
    with shard.view() as view:
        offset = decode_preamble(bytes(view[:PREAMBLE_BYTES])).data_offset_bytes

        def look(batch: range) -> list[str]:
            some = entries[batch.start : batch.stop]
            checksums = checksums_in(view, some, offset, threads=1)
            advance(sum(entry.size_bytes for entry in some))
            return checksums

        found = over_batches(entries, look)
    return [
        f"{shard.path}: tensor {entry.name!r} is damaged (checksum {checksum} instead of {entry.checksum})"
        for entry, checksum in zip(entries, found, strict=True)
        if checksum != entry.checksum
    ]


def _ranges(region: Region) -> str:
    pairs = zip(region.offsets, region.sizes, strict=True)
    return f"[{', '.join(f'{offset}:{offset + size}' for offset, size in pairs)}]"


def _first_number(meta: dict[str, Any], *names: str) -> int | None:
    return next((meta[name] for name in names if type(meta.get(name)) is int), None)


def checkpoints_in(path: Path) -> list[Path]:
    """The folders of shards in a folder, newest first."""
    names = sorted(filter(None, map(SaveId.find, names_in(path))), reverse=True)
    return [path / name.folder_name for name in names]


def _sessions_in(path: Path) -> list[Path]:
    """The local checkpoints of all sessions that have a folder in this one."""
    names = [name for name in sorted(names_in(path)) if not name.startswith(".") and SaveId.find(name) is None]
    sessions = [path / name for name in names if (path / name).is_dir()]
    return [one for session in sessions for one in checkpoints_in(session) if kind_in(one) is Kind.LOCAL]


def kind_at(folder: Path) -> Kind | None:
    """As `kind_in`; also where the folder has another name, of a copy or a link. Raises: CheckpointError."""
    if SaveId.find(folder.name) is not None or not _has_manifest(folder):
        return kind_in(folder)
    try:
        name = read_manifest(folder).name.folder_name
    except CorruptCheckpointError:
        return None
    return kind_of(name, names_in(folder), lambda file: (folder / file).open("rb"))


def _has_manifest(folder: Path) -> bool:
    """Whether there is a manifest of shards, whatever the folder is called; one of streams is of another format."""
    try:
        document = json.loads((folder / MANIFEST_NAME).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and "shards" in document
