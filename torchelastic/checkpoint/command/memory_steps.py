"""Checkpoints in memory: what the store has in a job's container, which is looked at without being claimed."""

from __future__ import annotations

import base64
import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from torchelastic.checkpoint.command.command_error import CheckpointCommandError
from torchelastic.checkpoint.command.foreign.dcp import read_through
from torchelastic.checkpoint.command.format import Advance, Contents, FoundCheckpoint, TensorRow, still_there
from torchelastic.checkpoint.command.shard_checkpoints import (
    FolderOfShards,
    checkpoints_in,
    described_part,
    kind_at,
)
from torchelastic.checkpoint.compat.flashpoint.container import read_commit
from torchelastic.checkpoint.compat.flashpoint.ids import CheckpointContainerId
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.format.shard_reader import ShardReader
from torchelastic.checkpoint.format.tensor_parts import dtype_name
from torchelastic.checkpoint.store.kinds import Kind
from torchelastic.checkpoint.store.save_id import SaveId


class MemorySteps(FolderOfShards):
    """Saves into memory, by the names of their steps."""

    kind = "memory"

    def find(self, path: Path) -> list[FoundCheckpoint]:
        """One save, the newest one of a step, or all in the container of a job: as those that load them choose."""
        if not path.is_dir():
            return []
        step = CheckpointContainerId.parse_version_container_step(path.name)
        saves = [path, *checkpoints_in(path)] if step is None else checkpoints_in(path.parent)
        found = still_there(saves, lambda save: self._look_at(save) if kind_at(save) is Kind.MEMORY else None)
        return found if step is None else [one for one in found if one.step == step][:1]

    def contents(self, found: FoundCheckpoint) -> Contents:
        """Out of the commit; of the pickles those whose shards are here."""
        metadata = read_commit(found.path).metadata
        holders: dict[str, list[str]] = {}
        for index, item in (metadata.storage_data or {}).items():
            files, file = holders.setdefault(index.fqn, []), Path(item.file).name
            files += [file] if file not in files else []
        rows = [
            TensorRow(
                fqn,
                dtype_name(item.properties.dtype),
                tuple(item.size),
                math.prod(item.size) * item.properties.dtype.itemsize,
                tuple(sorted(holders.get(fqn, ()))),
            )
            for fqn, item in metadata.state_dict_metadata.items()
            if isinstance(item, TensorStorageMetadata)
        ]
        values = [[fqn, {"pickle": base64.b64encode(data).decode()}] for fqn, data in _pickles(found, metadata)]
        return Contents({"dict": values}, rows)

    def verify(self, found: FoundCheckpoint, advance: Advance) -> list[str]:
        """Compares the shards that are here, and the attached files with the commit."""
        lines = super().verify(found, advance)
        if found.is_unfinished or found.manifest is None:
            return lines
        try:
            extras = read_commit(found.path).extras
        except CorruptCheckpointError as error:
            return [*lines, str(error)]
        folder = found.path.resolve()
        for name, content in extras.items() if SaveId.find(folder.name) is not None else ():  # else it is a copy alone
            file = folder.with_name(found.name) / name
            if not file.is_file() or file.read_bytes() != content:
                lines.append(f"{file} is not what the commit holds of it: it is missing, or was changed")
        return lines

    def load(self, found: FoundCheckpoint, *, allow_pickles: bool) -> Any:
        """Through DCP, nested as its planner has stored it."""
        from torchelastic.checkpoint.compat.flashpoint.reader import MemoryStorageReader

        if found.partial is not None:
            raise CheckpointError(
                f"{found.path} is not whole ({found.partial}): convert it where all of its shards are"
            )
        loader: Any = _LocalFiles(found.path)
        reader = MemoryStorageReader(found.path.absolute(), loader, allow_pickles=allow_pickles)
        return read_through(reader, found.path)

    def remove(self, found: FoundCheckpoint) -> None:
        """Never: its job does that."""
        raise CheckpointCommandError(
            f"{found.path} is in the memory of a job, which removes old ones itself: use `prune --dead` when it is over"
        )

    def _look_at(self, folder: Path) -> FoundCheckpoint:
        found = super()._look_at(folder)
        facts = {**found.facts, "save": str(found.manifest.name) if found.manifest else folder.name}
        name = CheckpointContainerId.format_version_container(found.step or 0)
        ranks = max((found.world_size or 0) - 1, 1)  # the last shard is the commit, of no rank
        if found.manifest is None:
            return replace(found, name=name, world_size=ranks, facts=facts)
        here = {record.rank for record in found.manifest.shards if folder / record.file in found.shards}
        return replace(
            found,
            name=name,
            world_size=ranks,
            damage=found.damage or (None if ranks in here else f"{folder} has a manifest, and no commit"),
            partial=described_part(here - {ranks}, ranks),
            shards=tuple(path for path in found.shards if path.name != found.manifest.shards[-1].file),
            facts=facts,
        )


class _LocalFiles:
    """What `MemoryStorageReader` asks of a loader, for a checkpoint of which everything is here."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return read_commit(self._folder).metadata

    def open(self, _: Any, file: str) -> ShardReader:
        return ShardReader(self._folder / Path(file).name)  # whatever the folder is called

    def repair(self, _: Any, file: str) -> ShardReader:
        return self.open(_, file)  # there is no other copy: reading it again names what is damaged


def _pickles(found: FoundCheckpoint, metadata: Metadata) -> list[tuple[str, bytes]]:
    """What the planner has pickled, unopened."""
    wanted = [
        (index.fqn, item)
        for index, item in (metadata.storage_data or {}).items()
        if isinstance(metadata.state_dict_metadata.get(index.fqn), BytesStorageMetadata)
    ]
    with ExitStack() as opened:
        shards = {path.name: opened.enter_context(ShardReader(path)) for path in found.shards}
        try:
            return [
                (fqn, shards[Path(item.file).name].read_one(item.entry).numpy().tobytes())
                for fqn, item in wanted
                if Path(item.file).name in shards
            ]
        except KeyError as error:
            raise CorruptCheckpointError(f"a shard in {found.path} lacks {error}, which its commit promises") from error
