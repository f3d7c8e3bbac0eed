"""Checkpoints in memory: folders `step-<N>_ckpt` in a job's container, which is looked at without being claimed."""

from __future__ import annotations

import base64
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from torchelastic.checkpoint.command.errors import CheckpointCommandError
from torchelastic.checkpoint.command.foreign.dcp import read_through
from torchelastic.checkpoint.command.format import Advance, Contents, FoundCheckpoint, TensorRow, still_there
from torchelastic.checkpoint.command.shards import ShardFormat, described_part
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError, explained
from torchelastic.checkpoint.kinds import Kind, kind_in
from torchelastic.checkpoint.memory.container import read_candidate, read_commit
from torchelastic.checkpoint.memory.ids import COMMIT_FILE, CheckpointContainerId
from torchelastic.checkpoint.shards.reading import ShardReader
from torchelastic.checkpoint.shards.tensors import dtype_name
from torchelastic.checkpoint.store.owner import read_fence
from torchelastic.checkpoint.store.save_id import SaveId


class MemorySteps(ShardFormat):
    """Folders of steps."""

    kind = "memory"

    def find(self, path: Path) -> list[FoundCheckpoint]:
        """One step, or all in the container of a job: as those that load them choose."""
        if not path.is_dir():
            return []
        if kind_in(path) is Kind.MEMORY:
            return [self._look_at(path)]
        with explained("list the checkpoints in memory", path):
            folders = [folder for folder in path.iterdir() if kind_in(folder) is Kind.MEMORY]
        return sorted(still_there(folders, self._look_at), key=_newness, reverse=True)

    def contents(self, found: FoundCheckpoint) -> Contents:
        """Out of the commit; of the pickles those whose shards are here."""
        metadata = read_commit(found.path).metadata
        holders: dict[str, list[str]] = {}
        for index, item in (metadata.storage_data or {}).items():
            files = holders.setdefault(index.fqn, [])
            files += [item.file] if item.file not in files else []
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
        """Compares the commit, the shards that are here, and the extra files."""
        try:
            commit = read_commit(found.path)
        except CorruptCheckpointError as error:
            return [str(error)]
        lines = super().verify(found, advance)
        for name, content in commit.extras.items():
            file = found.path / name
            if not file.is_file() or file.read_bytes() != content:
                lines.append(f"{file} is not what the commit holds of it: it is missing, or was changed")
        return lines

    def load(self, found: FoundCheckpoint, *, allow_pickles: bool) -> Any:
        """Through DCP, nested as its planner has stored it."""
        from torchelastic.checkpoint.memory.reader import MemoryStorageReader

        if found.partial is not None:
            raise CheckpointError(
                f"{found.path} is not whole ({found.partial}): convert it where all of its shards are"
            )
        loader: Any = _LocalFiles(found.path)
        return read_through(MemoryStorageReader(found.path, loader, allow_pickles=allow_pickles), found.path)

    def remove(self, found: FoundCheckpoint) -> None:
        """Never: its job does that."""
        raise CheckpointCommandError(
            f"{found.path} is in the memory of a job, which removes old ones itself: use `prune --dead` when it is over"
        )

    def _look_at(self, folder: Path) -> FoundCheckpoint:
        with explained("look at the checkpoint", folder):
            sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
            at = folder / COMMIT_FILE
            saved_s = at.stat().st_ctime if at.exists() else folder.stat().st_mtime
        try:
            commit, damage = read_candidate(folder), None
        except CorruptCheckpointError as error:
            commit, damage = None, str(error)
        run_id = _run_id_of(folder.parent)
        facts: dict[str, Any] = {} if run_id is None else {"run": run_id}
        shards: dict[str, int] = {}
        if commit is not None:
            facts["save"] = str(commit.name)
            shards = {file: rank for rank, file in enumerate(commit.files) if file in sizes}
        return FoundCheckpoint(
            format=self,
            path=folder,
            name=folder.name,
            step=CheckpointContainerId.parse_version_container_step(folder.name),
            world_size=commit.world_size if commit else None,
            saved_s=saved_s,
            size_bytes=sum(sizes.values()),
            damage=damage,
            partial=described_part(shards.values(), commit.world_size) if commit else None,
            shards=tuple(folder / file for file in shards),
            facts=facts,
        )


class _LocalFiles:
    """What `MemoryStorageReader` asks of a loader, for a checkpoint of which everything is here."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return read_commit(self._folder).metadata

    def open(self, _: Any, file: str) -> ShardReader:
        return ShardReader(self._folder / file)

    def repair(self, _: Any, file: str) -> ShardReader:
        return self.open(_, file)  # there is no other copy: reading it again names what is damaged


def _newness(one: FoundCheckpoint) -> tuple[bool, SaveId | int]:
    save = SaveId.find(one.facts.get("save", ""))
    return (False, one.step or 0) if save is None else (True, save)


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
                (fqn, shards[item.file].read_one(item.entry).numpy().tobytes())
                for fqn, item in wanted
                if item.file in shards
            ]
        except KeyError as error:
            raise CorruptCheckpointError(f"a shard in {found.path} lacks {error}, which its commit promises") from error


def _run_id_of(container: Path) -> str | None:
    try:
        return read_fence(container).run_id or None
    except CheckpointError:
        return None
