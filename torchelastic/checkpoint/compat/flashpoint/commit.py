"""What the last shard of a save holds: DCP's metadata, the attached files, and the records of all other shards. Pure.

It is the shard of no rank, and the coordinator writes it when every other one has its replicas. A host that has it can
make the manifest, by which the store counts the checkpoint. Metadata are stored as JSON: nothing that is read here is
executed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
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

from torchelastic.checkpoint.compat.flashpoint.ids import is_part, meta_of_shard, shard_of
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.format.tensor_parts import dtype_name, dtype_named
from torchelastic.checkpoint.format.tree import flatten, unflatten
from torchelastic.checkpoint.store.manifest import MANIFEST_NAME, Manifest, ShardRecord
from torchelastic.checkpoint.store.save_id import SaveId, ShardId, shard_file_name

VERSION = 1

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
        file: the shard, as its `ShardId` spells it.
        entry: the name of its entry there.
    """

    file: str
    entry: str


@dataclass(frozen=True)
class Commit:
    """What makes shards with replicas a checkpoint.

    Attributes:
        name: of the save; the greatest is the newest, whatever the steps.
        records: of the shards of all ranks, in their order.
        metadata: DCP's, with a `StoredItem` for each index.
        extras: attached files of the checkpoint by name, which lie in the container of its step on every host.
        run_id: see `Manifest`.
        saved_s: see `Manifest`.

    Raises:
        ValueError: this is none.
    """

    name: SaveId
    records: tuple[ShardRecord, ...]
    metadata: Metadata
    extras: Mapping[str, bytes]
    run_id: str = ""
    saved_s: float = 0.0

    def __post_init__(self) -> None:
        ranks = len(self.records)
        if not ranks or [record.rank for record in self.records] != list(range(ranks)):
            raise ValueError(f"{self.name} has the shards of {[record.rank for record in self.records]}")
        for name in self.extras:
            check_extra_name(name)
        files = {str(shard_of(self.name, rank, ranks)) for rank in range(ranks)}
        strange = {item.file for item in (self.metadata.storage_data or {}).values()} - files
        if strange:
            raise ValueError(f"{min(strange)!r} is no shard of {self.name} by {ranks} ranks")

    @property
    def shard(self) -> ShardId:
        """The shard that holds it."""
        return shard_of(self.name, len(self.records), len(self.records))

    def manifest(self, own: ShardRecord) -> Manifest:
        """The manifest of the checkpoint.

        Args:
            own: of the shard that holds this commit.
        """
        records = (*self.records, own)
        return Manifest(self.name, self.run_id, len(records), records, saved_s=self.saved_s)


def check_extra_name(name: str) -> str:
    """Returns the name of an attached file.

    Raises:
        ValueError: it is no plain name of a file, or one that a shard or a manifest has.
    """
    if not is_part(name) or name.endswith(".shard") or name == MANIFEST_NAME:
        raise ValueError(f"{name!r} cannot be the name of an attached file: use letters, digits and _.=@+,- only")
    return name


def meta_of(commit: Commit) -> dict[str, Any]:
    """What the header of the commit's shard says."""
    return {
        **meta_of_shard(commit.shard),
        "version": VERSION,
        "run_id": commit.run_id,
        "saved_s": commit.saved_s,
        "shards": [[record.size_bytes, record.header_digest] for record in commit.records],
    }


def content_of(commit: Commit) -> dict[str, Any]:
    """The rest, for `shards.save_tree`.

    Raises:
        TypeError: the metadata hold something that is not stored; names it.
    """
    return {"metadata": encode_metadata(commit.metadata), "extras": dict(commit.extras)}


def commit_from(meta: Mapping[str, Any], content: Any) -> Commit:
    """The inverse of `meta_of` and `content_of`.

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
        count = len(meta["shards"])
        records = [
            ShardRecord(rank, shard_file_name(rank, count + 1), size_bytes, digest)
            for rank, (size_bytes, digest) in enumerate(meta["shards"])
        ]
        metadata = decode_metadata(content["metadata"])
        extras = {name: bytes(memoryview(data)) for name, data in content["extras"].items()}
        save, saved_s = SaveId.parse(meta["checkpoint"]), float(meta["saved_s"])
        commit = Commit(save, tuple(records), metadata, extras, str(meta["run_id"]), saved_s)
        if meta_of(commit) != {key: meta[key] for key in meta_of(commit)}:
            raise ValueError("its header is that of another shard")
        return commit
    except _NONSENSE as error:
        raise CorruptCheckpointError(f"its commit is damaged: {error!r}") from error


def storage_data_of(results: Iterable[Iterable[Any]]) -> dict[MetadataIndex, StoredItem]:
    """Where everything lies, out of the `WriteResult`s of all ranks."""
    stored = (result for each in results for result in each)
    return {result.index: result.storage_data for result in stored if isinstance(result.storage_data, StoredItem)}


def records_of(results: Iterable[Iterable[Any]]) -> tuple[ShardRecord, ...]:
    """The records of the shards that were written, which lie among the same results; in the order of the ranks."""
    found = (result.storage_data for each in results for result in each)
    return tuple(sorted((one for one in found if isinstance(one, ShardRecord)), key=lambda record: record.rank))


def encode_metadata(metadata: Metadata) -> bytes:
    """DCP's metadata as JSON.

    Raises:
        TypeError: a planner has put something into it that is no plain value.
    """
    files: dict[str, int] = {}
    stored = [
        [
            index.fqn,
            None if index.offset is None else list(index.offset),
            files.setdefault(item.file, len(files)),
            item.entry,
        ]
        for index, item in (metadata.storage_data or {}).items()
    ]
    extra = {name: value for name, value in vars(metadata).items() if name not in _FIELDS}
    document = {
        "state": [[fqn, *_encode_item(fqn, item)] for fqn, item in metadata.state_dict_metadata.items()],
        "files": list(files),
        "stored": stored,
        "planner": _structure(metadata.planner_data, "planner_data"),
        "meta": _structure(None if metadata.storage_meta is None else vars(metadata.storage_meta), "storage_meta"),
        "version": getattr(metadata, "version", None),  # torch 2.9 and later have it
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
    if hasattr(metadata, "version"):  # pragma: no branch - as above
        metadata.version = document["version"]
    for name, value in unflatten(document["extra"], {}).items():
        setattr(metadata, name, value)
    return metadata


def _structure(value: Any, what: str) -> Any:
    flat = flatten(value, allow_pickles=None)
    if flat.tensors:
        raise TypeError(f"{what} of the checkpoint holds tensors ({flat.tensors[0].name}): use plain values there")
    return flat.structure


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
