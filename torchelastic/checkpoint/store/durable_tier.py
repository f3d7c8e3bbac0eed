"""Checkpoints in durable storage through fsspec: an object store (S3, GCS, Azure), a file system, or any other.

An object store has no rename and no lock. So the shards are uploaded first and the manifest last, as one object: it is
the commit. Removing goes the other way round. A writer that was replaced is refused when it looks at the fence, which
is an object too; one that is paused between this look and its upload can still publish, but only a checkpoint that
counts as older than all of its successors, by its name. For the same reason nobody can tell here whether another run
is alive.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import fsspec.asyn  # type: ignore[import-untyped]

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.format.partial import PartialCopy, Ranges
from torchelastic.checkpoint.format.shard_reader import ShardReader
from torchelastic.checkpoint.policy import KeepLast, KeepPolicy, SavePolicy
from torchelastic.checkpoint.store.inventory import CheckpointInfo, info_of, prunable_checkpoints
from torchelastic.checkpoint.store.kinds import Kind, kind_of, require_own
from torchelastic.checkpoint.store.manifest import (
    MANIFEST_NAME,
    Manifest,
    ShardRecord,
    decode_manifest,
    encode_manifest,
)
from torchelastic.checkpoint.store.owner import FENCE_NAME, FenceState, decode_fence, encode_fence
from torchelastic.checkpoint.store.reading import recorded
from torchelastic.checkpoint.store.removing import Removals, left_overs, remove_objects
from torchelastic.checkpoint.store.rewinds import Rewind, highest_epoch
from torchelastic.checkpoint.store.save_id import SaveId, parse_shard_file_name
from torchelastic.checkpoint.store.tier import SealedShard, Tier, TierContext, TierEntry
from torchelastic.text import without_credentials, without_secrets

#: How much is handed over per call; object stores upload parts of at least 5 MiB.
PART_BYTES = 16 * 2**20

_LARGER = "a `download_folder=` on a larger file system, or set TMPDIR to one"
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss"}


class DurableTier(Tier):
    """Checkpoints below a URL.

    Args:
        url: for example `s3://bucket/run` or `file:///mnt/store/run`; of this run alone. The protocol's own package
            must be installed (s3fs, gcsfs, adlfs).
        keep: which checkpoints stay.
        every: how rarely it takes part; None: in each save.
        name: for logs and metrics.
        storage_options: what the protocol's file system is made with; put credentials here or, better, where its
            package finds them by itself.
        download_folder: where what is read of shards is downloaded to, one after the other on each rank; None: the
            system's temporary folder (TMPDIR).

    Raises:
        ValueError: the URL is empty or of an unknown protocol.
        CheckpointError: the protocol's package is missing, or the storage cannot be reached.
    """

    is_shared = True

    def __init__(
        self,
        url: str,
        keep: KeepPolicy | None = None,
        every: SavePolicy | None = None,
        *,
        name: str = "durable",
        storage_options: Mapping[str, Any] | None = None,
        download_folder: str | os.PathLike[str] | None = None,
    ) -> None:
        if not url:
            raise ValueError("the URL of the durable tier is empty: name a place, for example s3://bucket/run")
        self.name = name
        self.keep = keep if keep is not None else KeepLast(3)
        self.every = every
        self.where = without_credentials(url)
        self._url = url
        self._download_folder = download_folder
        self._kinds: dict[str, Kind] = {}
        self._manifest: Manifest | None = None
        self._removals = Removals()
        self._storage_options = dict(storage_options or {})
        self._opened_files, self._root = self._open_files()

    def _open_files(self) -> tuple[Any, str]:
        self._pid = os.getpid()
        try:
            files, root = fsspec.url_to_fs(self._url, **self._storage_options)
        except ValueError as error:
            raise ValueError(f"{self.where} is no URL for fsspec: {without_secrets(error, self._url)}") from None
        except Exception as error:  # noqa: BLE001 - each protocol's package has its own errors
            raise self._error("reach the storage", error) from None
        return files, str(root)

    @property
    def _files(self) -> Any:
        """The protocol's file system. Its thread and connections are not in a child of fork, which makes its own."""
        if self._pid != os.getpid():
            getattr(fsspec.asyn, "reset_lock", lambda: None)()  # newer ones do so themselves
            self._opened_files, self._root = self._open_files()
        return self._opened_files

    def require_own(self) -> None:
        """See `Tier`; lists each folder there."""
        require_own(self.kind, self._sizes(self._root), self._kind_of, self.where)

    def known_epoch(self, run_id: str) -> int:
        """See `Tier`."""
        state = self._read_fence()
        epoch = max(state.epoch, highest_epoch(self._sizes(self._root)))
        return epoch + 1 if epoch and state.run_id != run_id else epoch

    def prepare(self, context: TierContext) -> None:
        """See `Tier`; rank 0 writes."""
        state = self._read_fence()
        state.check(*context.token, self.where)
        if context.rank != 0:
            return
        with self._explained("write the fence"):
            self._make_folder(self._root)
            written = FenceState(*context.token, context.run_id, "rank 0", socket.gethostname(), os.getpid())
            self._files.pipe_file(f"{self._root}/{FENCE_NAME}", encode_fence(written))
        for name in self._names():
            if name.token < context.token and not self._is_committed(name):
                self._remove(name)

    def put(self, shard: SealedShard) -> ShardRecord:
        """See `Tier`."""
        record = shard.record
        path = f"{self._folder(shard.name)}/{record.file}"
        with self._explained("upload a shard"):
            self._make_folder(self._folder(shard.name))
            with self._files.open(path, "wb", block_size=PART_BYTES) as target:
                for begin in range(0, record.size_bytes, PART_BYTES):
                    target.write(shard.data[begin : begin + PART_BYTES])
        return record

    def commit(self, manifest: Manifest) -> None:
        """See `Tier`."""
        folder = self._folder(manifest.name)
        for record in manifest.shards:
            path = f"{folder}/{record.file}"
            with self._explained("look at a shard"):
                size_bytes = self._files.size(path) if self._exists(path) else None
            if size_bytes != record.size_bytes:
                raise CorruptCheckpointError(
                    f"{self._shown(path)} cannot be published: it has {size_bytes} bytes of {record.size_bytes}"
                    if size_bytes is not None
                    else f"{self._shown(path)}, the shard of rank {record.rank}, is missing: nothing is published"
                )
        self._read_fence().check(*manifest.name.token, self.where)
        with self._explained("upload the manifest"):
            self._files.pipe_file(f"{folder}/{MANIFEST_NAME}", encode_manifest(manifest))

    def abandon(self, name: SaveId) -> None:
        """See `Tier`."""
        if not self._is_committed(name):
            self._remove(name)

    def inventory(self) -> list[TierEntry]:
        """See `Tier`; one small download per checkpoint."""
        return [TierEntry.of(info) for info in self._infos()]

    def rewinds(self) -> list[Rewind]:
        """See `Tier`."""
        return Rewind.all_in(self._sizes(self._root))

    def rewind(self, step: int, owner: str) -> Rewind:
        """See `Tier`; nobody can tell here whether a run is alive."""
        state = self._read_fence()
        rewind = Rewind(max(state.epoch, highest_epoch(self._sizes(self._root))) + 1, step)
        raised = FenceState(rewind.epoch, 0, state.run_id, owner, socket.gethostname(), os.getpid())
        with self._explained("rewind the run"):
            self._files.pipe_file(f"{self._root}/{FENCE_NAME}", encode_fence(raised))
        self.keep_rewind(rewind)
        return rewind

    def keep_rewind(self, rewind: Rewind) -> None:
        """See `Tier`."""
        with self._explained("write that the run was rewound"):
            self._files.pipe_file(f"{self._root}/{rewind.file_name}", rewind.data)

    def open(self, name: SaveId, shard_rank: int) -> ShardReader:
        """What is read of the shard is downloaded, into a temporary file without a name. See `Tier`."""
        place = self._shown(self._folder(name))
        missing = CorruptCheckpointError(f"the shard of rank {shard_rank} is not in {place}")
        manifest = self._manifest
        if manifest is None or manifest.name != name:  # what is published does not change, and has many shards
            try:
                self._manifest = manifest = self._read_manifest(name)
            except FileNotFoundError:
                raise missing from None
        if shard_rank >= manifest.world_size:
            raise missing
        record = manifest.shards[shard_rank]

        def fetch(ranges: Ranges) -> bytes:
            try:
                return self._read_parts(f"{self._folder(name)}/{record.file}", ranges)
            except FileNotFoundError:
                raise missing from None

        copy = PartialCopy(fetch, self._downloads(), remedy=f"give {type(self).__name__} {_LARGER}")
        return recorded(ShardReader(copy.path, f"{place}/{record.file}", copy), place, record)

    def _downloads(self) -> Path:
        """Raises CheckpointError where there is no folder for temporary files."""
        try:
            return Path(self._download_folder or tempfile.gettempdir())
        except FileNotFoundError as error:  # it tries to write into each
            text = (
                f"there is no temporary folder with room to download a shard to: give {type(self).__name__} {_LARGER}"
            )
            raise CheckpointError(f"{text} ({error})") from error

    def prune(self) -> list[SaveId]:
        """See `Tier`; the manifest goes first, so nobody takes what is left for a checkpoint.

        What is left of older saves, by a writer that died or a store that refused to remove it, goes, too.
        """
        infos = self._infos()
        committed = {info.name for info in infos if info.manifest is not None or info.damage is not None}
        without = [name for name in self._own_names() if name not in committed]
        unwanted = [info.name for info in prunable_checkpoints(self.keep, infos, self.all_rewinds())]
        removed = self._removals.run([*unwanted, *left_overs(without, committed)], self._remove)
        self.keep_rewinds()
        return removed

    def close(self) -> None:
        """See `Tier`; there is nothing to give back."""

    def _infos(self) -> list[CheckpointInfo]:
        """Own checkpoints, newest first; those without a manifest are being written, or their writers are dead."""
        return [info for name in self._own_names() if (info := self._info(name)) is not None]

    def _own_names(self) -> list[SaveId]:
        return [name for name in self._names() if self._kind_of(name.folder_name) in (self.kind, None)]

    def _info(self, name: SaveId) -> CheckpointInfo | None:
        """None if there is nothing of it. Of one without a manifest no shard can be read."""
        manifest: Manifest | CheckpointError
        is_whole = True
        try:
            manifest = self._read_manifest(name)
        except FileNotFoundError:
            manifest, is_whole = CorruptCheckpointError("it has no manifest"), False
        except CorruptCheckpointError as error:
            manifest = error
        sizes, shown = self._sizes(self._folder(name)), self._shown(self._folder(name))
        empty = sorted(file for file, size in sizes.items() if size == 0 and parse_shard_file_name(file) is not None)
        if sizes.get(MANIFEST_NAME) == 0 and empty:  # shards come first: no writer that died has left it so
            manifest = CorruptCheckpointError(f"{shown}/{empty[0]} has 0 bytes, and so has the manifest")
            is_whole = True
        if not is_whole:
            sizes.pop(MANIFEST_NAME, None)  # an empty one
        info = info_of(name, Path(shown), manifest, sizes, whole=is_whole, shown=shown)
        return info if is_whole else replace(info, shards={}) if info.shards else None

    def _kind_of(self, folder: str) -> Kind | None:
        """The kind of checkpoint in a folder; asked once, since what is published does not change."""
        if folder not in self._kinds:
            place = f"{self._root}/{folder}"
            kind = kind_of(folder, self._sizes(place), lambda name: self._opened(f"{place}/{name}"))
            if kind is None:
                return None  # nothing yet
            self._kinds[folder] = kind
        return self._kinds[folder]

    @contextmanager
    def _opened(self, path: str) -> Iterator[BinaryIO]:
        with self._explained("read the header of a shard", missing_ok=True), self._files.open(path, "rb") as file:
            yield file

    def _folder(self, name: SaveId) -> str:
        return f"{self._root}/{name.folder_name}"

    def _names(self) -> list[SaveId]:
        names = {SaveId.find(file) for file in self._sizes(self._root)}
        return sorted((name for name in names if name is not None), reverse=True)

    def _sizes(self, folder: str) -> dict[str, int | None]:
        """What is directly in a folder, and how long it is."""
        with self._explained("list the checkpoints"):
            self._files.invalidate_cache()
            try:
                found = self._files.ls(folder, detail=True)
            except FileNotFoundError:
                return {}
        return {str(item["name"]).rstrip("/").rpartition("/")[2]: item.get("size") for item in found}

    def _read_manifest(self, name: SaveId) -> Manifest:
        """Raises: FileNotFoundError if there is none; CorruptCheckpointError; CheckpointError."""
        path = f"{self._folder(name)}/{MANIFEST_NAME}"
        data = self._read(path)
        if not data:  # begun by a writer that has died since, on storage where an object is not there at once
            raise FileNotFoundError(path)
        try:
            manifest = decode_manifest(data)
            if manifest.name != name:
                raise CorruptCheckpointError(f"it is the manifest of {manifest.name}")
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{self._shown(path)}: {error}") from error
        return manifest

    def _read_fence(self) -> FenceState:
        try:
            return decode_fence(self._read(f"{self._root}/{FENCE_NAME}"))
        except (FileNotFoundError, CorruptCheckpointError):
            return FenceState()  # the names of what is stored tell the epoch as well

    def _read(self, path: str) -> bytes:
        with self._explained("read from the storage", missing_ok=True):
            return bytes(self._files.cat_file(path))

    def _read_parts(self, path: str, ranges: Ranges) -> bytes:
        """Parts of an object, joined; by several requests at once where the package can do so."""
        parts = [(at, min(at + PART_BYTES, end)) for begin, end in ranges for at in range(begin, end, PART_BYTES)]
        begins, ends = map(list, zip(*parts, strict=True))
        with self._explained("download a shard", missing_ok=True):
            return b"".join(self._files.cat_ranges([path] * len(begins), begins, ends, on_error="raise"))

    def _make_folder(self, path: str) -> None:
        """An object store needs none, and its package would make a bucket of a name that is misspelt."""
        protocols = self._files.protocol
        if _OBJECT_STORES.isdisjoint([protocols] if isinstance(protocols, str) else protocols):
            self._files.makedirs(path, exist_ok=True)

    def _exists(self, path: str) -> bool:
        self._files.invalidate_cache()
        return bool(self._files.exists(path))

    def _is_committed(self, name: SaveId) -> bool:
        with self._explained("look at a checkpoint"):
            return self._exists(f"{self._folder(name)}/{MANIFEST_NAME}")

    def _remove(self, name: SaveId) -> None:
        folder = self._folder(name)
        with self._explained("remove a checkpoint"):
            remove_objects(self._files, folder, lambda: self._sizes(folder))

    def _shown(self, path: str) -> str:
        return f"{self.where.rstrip('/')}{path.removeprefix(str(self._root))}"

    @contextmanager
    def _explained(self, action: str, *, missing_ok: bool = False) -> Iterator[None]:
        """What any of the many packages behind fsspec raises becomes an error that names the place, and no secret."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            if isinstance(error, FileNotFoundError) and missing_ok:
                raise
            raise self._error(action, error) from None

    def _error(self, action: str, error: Exception) -> CheckpointError:
        return CheckpointError(f"could not {action} at {self.where}: {without_secrets(error, self._url)}")
