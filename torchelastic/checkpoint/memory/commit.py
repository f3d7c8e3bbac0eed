"""The commit of a checkpoint in memory: which shards belong to it, and DCP's metadata of what is in them. Pure.

Without it a step is nothing; it is written when every shard has its replicas. It is a shard without a share of the
state, so that it is checked like one. Metadata are stored as JSON: nothing that is read here is executed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
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
from torchelastic.checkpoint.memory.ids import COMMIT_FILE, is_part
from torchelastic.checkpoint.shards.tensors import dtype_name, dtype_named
from torchelastic.checkpoint.shards.tree import flatten, unflatten
from torchelastic.checkpoint.store.save_id import SaveId, ShardId, file_name_of
from torchelastic.checkpoint.store.tier import TierEntry

VERSION = 1
#: More ranks no commit is believed to have: all of them are counted where a checkpoint is chosen.
MOST_RANKS = 1 << 20

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


@dataclass(frozen=True)
class CommitHead:
    """A checkpoint with a shard of each rank, by what the header of its commit says.

    Attributes:
        name: of the save; the greatest is the newest, whatever the steps.
        world_size: how many ranks have saved.

    Raises:
        ValueError: so many ranks there are not.
    """

    name: SaveId
    world_size: int

    def __post_init__(self) -> None:
        if not 1 <= self.world_size <= MOST_RANKS:
            raise ValueError(f"{self.name} is by {self.world_size} ranks")

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return self.name.step

    @property
    def files(self) -> list[str]:
        """The names of its shards, in the order of the ranks."""
        return self.files_of(range(self.world_size))

    def files_of(self, ranks: Collection[int]) -> list[str]:
        """The shards of some ranks, in their order; of those that have saved."""
        return [file_name_of(ShardId(self.name, rank, self.world_size)) for rank in ranks if rank < self.world_size]


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
        strange = {item.file for item in (self.metadata.storage_data or {}).values()} - {*self.files}
        if strange:
            raise ValueError(f"{min(strange)!r} is no shard of {self.name} by {self.world_size} ranks")


def shards_of(entry: TierEntry) -> list[str]:
    """The names of the shards that lie where a save was listed."""
    return [file_name_of(ShardId(entry.name, rank, entry.world_size)) for rank in entry.ranks]


def objects_of(entry: TierEntry) -> list[str]:
    """All of a save that other hosts can have from there: shards, and the commit."""
    return [*shards_of(entry), *([COMMIT_FILE] if entry.is_committed else [])]


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
    return {"version": VERSION, "save": str(commit.name), "world_size": commit.world_size}


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
        return CommitHead(SaveId.parse(meta["save"]), meta["world_size"])
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
