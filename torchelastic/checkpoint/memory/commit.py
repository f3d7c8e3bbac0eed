"""The commit of a checkpoint in memory: which shards belong to it, and DCP's metadata of what is in them. Pure.

Without it a step is nothing; it is written when every shard has its replicas. It is a shard without a share of the
state, so that it is checked like one. Metadata are stored as JSON: nothing that is read here is executed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.memory.ids import COMMIT_FILE, ShardName, generation_of, is_part, is_save_id
from torchelastic.checkpoint.shards.tensors import dtype_name, dtype_named
from torchelastic.checkpoint.shards.tree import flatten, unflatten

VERSION = 1
#: What the header of a commit says, beside its files.
_HEAD = ("generation", "step", "save_id", "world_size")

_MEMORY_FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "preserve": torch.preserve_format,
}
_LAYOUTS = {
    str(layout).removeprefix("torch."): layout for layout in (torch.strided, torch.sparse_coo, torch.sparse_csr)
}
#: What decoding a damaged or hostile commit may raise; a `CheckpointError` passes.
_NONSENSE = (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError)
_FIELDS = frozenset(field.name for field in fields(Metadata))


@dataclass(frozen=True)
class StoredItem:
    """Where one item of DCP's plan lies: the storage data of its `WriteResult`.

    Attributes:
        file: the shard, in the container of the checkpoint.
        entry: the name of its entry there.
    """

    file: str
    entry: str


@dataclass(frozen=True, order=True)
class CommitHead:
    """A complete checkpoint, by what the header of its commit says; the greater, the newer.

    Attributes:
        generation: grows from save to save of a job, whatever the steps: the highest is the newest.
        step: of the checkpoint.
        save_id: of the save; see `names`.
        world_size: how many ranks have saved.
        files: the shards, sorted.
    """

    generation: int
    step: int
    save_id: str
    world_size: int
    files: tuple[str, ...]

    def __post_init__(self) -> None:
        numbers = (self.step, self.generation, self.world_size)
        if any(type(number) is not int or number < 0 for number in numbers) or not is_save_id(self.save_id):
            raise ValueError(f"step {self.step}, generation {self.generation}, save {self.save_id}: no commit")
        if generation_of(self.save_id) != self.generation:
            raise ValueError(f"save {self.save_id} is not of generation {self.generation}")
        for file in self.files:
            shard = ShardName.find(file)
            if shard is None or shard.save_id != self.save_id or shard.world_size != self.world_size:
                raise ValueError(f"{file!r} is no shard of save {self.save_id} by {self.world_size} ranks")

    @property
    def objects(self) -> tuple[str, ...]:
        """Its shards and its commit."""
        return (*self.files, COMMIT_FILE)

    def files_of(self, ranks: Collection[int]) -> list[str]:
        """The shards of some ranks, in the order of their ranks."""
        found = [(shard.rank, file) for file in self.files if (shard := ShardName.find(file)) and shard.rank in ranks]
        return [file for _, file in sorted(found)]


@dataclass(frozen=True)
class Commit(CommitHead):
    """The same with all that it holds.

    Attributes:
        metadata: DCP's, with a `StoredItem` for each index.
        extras: further files of the checkpoint by name, which lie beside the shards on every host.
    """

    metadata: Metadata
    extras: Mapping[str, bytes]

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.extras:
            check_extra_name(name)


@dataclass(frozen=True)
class StoredStep:
    """What lies in the container of one step on one host, by names and sizes.

    Attributes:
        step: its number.
        shards: the lengths of the shards' files in bytes.
        commit: what its header says; None: it is not complete, or its commit cannot be read.
        is_settled: whether another host has the commit too, so that older steps may go.
    """

    step: int
    shards: Mapping[ShardName, int]
    commit: CommitHead | None = None
    is_settled: bool = False

    @property
    def objects(self) -> dict[str, int]:
        """The files that other hosts can have from here, with their lengths in bytes (0 for the commit)."""
        sizes = {str(name): size_bytes for name, size_bytes in self.shards.items()}
        return sizes if self.commit is None else {**sizes, COMMIT_FILE: 0}

    def told(self) -> list[Any]:
        """For other ranks, as JSON."""
        commit = None if self.commit is None else meta_of(self.commit)
        return [self.step, {str(name): size_bytes for name, size_bytes in self.shards.items()}, commit]

    @classmethod
    def heard(cls, told: Sequence[Any]) -> StoredStep:
        """The inverse of `told`."""
        step, sizes, commit = told
        shards = {name: int(size_bytes) for file, size_bytes in sizes.items() if (name := ShardName.find(file))}
        return cls(int(step), shards, None if commit is None else candidate_from(commit))


def check_extra_name(name: str) -> str:
    """Returns the name of an extra file.

    Raises:
        ValueError: it is no plain name of a file, or one that shards and commits have.
    """
    if not is_part(name) or name.endswith(".shard"):
        raise ValueError(f"{name!r} cannot be the name of an extra file: use letters, digits and _.=@+,- only")
    return name


def meta_of(commit: CommitHead) -> dict[str, Any]:
    """What the header of the commit's shard says: enough to tell whether a checkpoint is complete."""
    return {"version": VERSION, **{name: getattr(commit, name) for name in _HEAD}, "files": list(commit.files)}


def content_of(commit: Commit) -> dict[str, Any]:
    """The rest, for `shards.save_tree`.

    Raises:
        TypeError: the metadata hold something that is not stored; names it.
    """
    return {
        "metadata": _as_tensor(encode_metadata(commit.metadata)),
        "extras": {name: _as_tensor(content) for name, content in commit.extras.items()},
    }


def candidate_from(meta: Mapping[str, Any]) -> CommitHead:
    """The inverse of `meta_of`.

    Raises:
        CorruptCheckpointError: it is no commit.
        CheckpointError: a newer release has written it.
    """
    try:
        if meta["version"] != VERSION:
            raise CheckpointError(
                f"its commit is version {meta['version']}; this release reads version {VERSION}; use the release that "
                "wrote it"
            )
        return CommitHead(**{name: meta[name] for name in _HEAD}, files=tuple(meta["files"]))
    except _NONSENSE as error:
        raise CorruptCheckpointError(f"its commit makes no sense: {error!r}") from error


def commit_from(meta: Mapping[str, Any], content: Any) -> Commit:
    """The inverse of `meta_of` and `content_of`; raises as `candidate_from`."""
    head = candidate_from(meta)
    try:
        metadata = decode_metadata(_as_bytes(content["metadata"]))
        extras = {name: _as_bytes(data) for name, data in content["extras"].items()}
        return Commit(**vars(head), metadata=metadata, extras=extras)
    except _NONSENSE as error:
        raise CorruptCheckpointError(f"its commit makes no sense: {error!r}") from error


def storage_data_of(results: Iterable[Iterable[Any]]) -> dict[MetadataIndex, StoredItem]:
    """Where everything lies, out of the `WriteResult`s of all ranks."""
    return {result.index: result.storage_data for each in results for result in each}


def encode_metadata(metadata: Metadata) -> bytes:
    """DCP's metadata as JSON.

    Raises:
        TypeError: a planner has put something into it that is no plain value.
    """
    files: dict[str, int] = {}
    stored = [
        [index.fqn, _offset(index), files.setdefault(item.file, len(files)), item.entry]
        for index, item in (metadata.storage_data or {}).items()
    ]
    extra = {name: value for name, value in vars(metadata).items() if name not in _FIELDS}
    document = {
        "state": [[fqn, *_encode_item(fqn, item)] for fqn, item in metadata.state_dict_metadata.items()],
        "files": list(files),
        "stored": stored,
        "planner": _structure(metadata.planner_data, "planner_data"),
        "meta": _structure(None if metadata.storage_meta is None else vars(metadata.storage_meta), "storage_meta"),
        "version": metadata.version,
        "extra": _structure(extra, "the metadata"),
    }
    return json.dumps(document, separators=(",", ":")).encode()


def decode_metadata(data: bytes) -> Metadata:
    """The inverse of `encode_metadata`; raises what `commit_from` explains."""
    document = json.loads(data)
    files = document["files"]
    meta = unflatten(document["meta"], {})
    metadata = Metadata(
        {fqn: _decode_item(kind, rest) for fqn, kind, *rest in document["state"]},
        planner_data=unflatten(document["planner"], {}),
        storage_data={
            MetadataIndex(fqn, None if offset is None else torch.Size(offset)): StoredItem(files[number], entry)
            for fqn, offset, number, entry in document["stored"]
        },
        storage_meta=None if meta is None else StorageMeta(**meta),
    )
    if hasattr(metadata, "version"):  # pragma: no branch - torch 2.9 and later have it
        metadata.version = document["version"]
    for name, value in unflatten(document["extra"], {}).items():
        setattr(metadata, name, value)
    return metadata


def _structure(value: Any, what: str) -> Any:
    flat = flatten(value)
    if flat.tensors:
        raise TypeError(f"{what} of the checkpoint holds tensors ({flat.tensors[0].name}): use plain values there")
    return flat.structure


def _offset(index: MetadataIndex) -> list[int] | None:
    return None if index.offset is None else list(index.offset)


def _encode_item(fqn: str, item: Any) -> list[Any]:
    if isinstance(item, BytesStorageMetadata):
        return ["bytes"]
    if not isinstance(item, TensorStorageMetadata):
        raise TypeError(f"the planner describes {fqn!r} by a {type(item).__name__}: only tensors and bytes are known")
    properties = item.properties
    formats = [name for name, known in _MEMORY_FORMATS.items() if known is properties.memory_format]
    return [
        "tensor",
        dtype_name(properties.dtype),
        str(properties.layout).removeprefix("torch."),
        properties.requires_grad,
        formats[0] if formats else "contiguous",
        properties.pin_memory,
        list(item.size),
        [[list(chunk.offsets), list(chunk.sizes)] for chunk in item.chunks],
    ]


def _decode_item(kind: str, rest: list[Any]) -> TensorStorageMetadata | BytesStorageMetadata:
    if kind == "bytes":
        return BytesStorageMetadata()
    dtype, layout, requires_grad, memory_format, pin_memory, size, chunks = rest
    return TensorStorageMetadata(
        TensorProperties(
            dtype_named(dtype), _LAYOUTS[layout], requires_grad, _MEMORY_FORMATS[memory_format], pin_memory
        ),
        torch.Size(size),
        [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks],
    )


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()
