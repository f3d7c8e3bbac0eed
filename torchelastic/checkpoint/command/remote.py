"""Checkpoints at a URL, for commands that read files: a copy of them in a temporary folder, whole or as far as needed.

`ls` needs names, sizes, manifests and the headers of shards: of large files the header alone is downloaded, into a file
of the same length.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import tenacity

from torchelastic.checkpoint.command.command_error import CheckpointCommandError
from torchelastic.checkpoint.command.format import FoundCheckpoint
from torchelastic.checkpoint.command.screen import shown_as
from torchelastic.checkpoint.command.stored_saves import StoredSaves
from torchelastic.checkpoint.errors import CorruptCheckpointError, is_full
from torchelastic.checkpoint.format.header import PREAMBLE_BYTES, decode_preamble
from torchelastic.checkpoint.store.durable_tier import DurableTier
from torchelastic.checkpoint.store.removing import remove_objects
from torchelastic.console import complain
from torchelastic.text import bytes_text, without_credentials, without_secrets

#: What is no longer is downloaded whole.
_SMALL_BYTES = 2**20

#: Storage that does not answer can take its package many minutes: so long is nothing said about it.
SAY_AFTER_S = 10.0


class _NothingThereError(CheckpointCommandError):
    """There is nothing at the place."""


class _RemovedError(CheckpointCommandError):
    """A run at work has removed it meanwhile, and has saved a newer one."""


def _looks() -> tenacity.Retrying:
    """Looks again, but not for ever: a store may list for good what it has not."""
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(_RemovedError),
        stop=tenacity.stop_after_attempt(20),
        wait=tenacity.wait_random(0.0, 0.1),
        reraise=True,
    )


@contextmanager
def newest_at(url: str) -> Iterator[Path]:
    """The newest complete checkpoint there; errors as `newest_complete`."""
    with ExitStack() as stack:
        yield _looks()(_copy_newest, url, stack)


def _copy_newest(url: str, stack: ExitStack) -> Path:
    with copied(url, heads_only=True) as path:
        saves = StoredSaves(path)
        chosen = Path() if saves.foreign_kind() is not None else saves.newest_complete().path.relative_to(path)
    place = url if chosen == Path() else f"{url.rstrip('/')}/{chosen}"
    try:
        return stack.enter_context(copied(place, heads_only=False))
    except _NothingThereError as error:
        raise _RemovedError(str(error)) from None


@contextmanager
def copied(url: str, *, heads_only: bool) -> Iterator[Path]:
    """A folder with what is there, or as much as `ls` needs. Raises: CheckpointCommandError: it cannot be read."""
    where = without_credentials(url)
    with tempfile.TemporaryDirectory(prefix="torchelastic-copy-") as folder:
        try:
            files, root = fsspec.url_to_fs(url)
            root = str(root).rstrip("/")
            target = Path(folder) / (root.rpartition("/")[2] or "root")
            with _said_if_slow(where):
                _looks()(_copy_all, files, root, target, heads_only=heads_only)
        except (FileNotFoundError, _RemovedError):
            raise _NothingThereError(
                f"{where} holds nothing: give the place of checkpoints, or of one of them"
            ) from None
        except OSError as error:
            if not is_full(error):
                raise CheckpointCommandError(f"could not read {where}: {without_secrets(error, url)}") from None
            raise CheckpointCommandError(
                f"there is no room for a copy of {where} while it is read, in {Path(folder).parent}: "
                f"{without_secrets(error, url)}; set TMPDIR to a folder on a larger file system"
            ) from None
        except Exception as error:  # noqa: BLE001 - each protocol's package has its own errors
            raise CheckpointCommandError(f"could not read {where}: {without_secrets(error, url)}") from None
        with shown_as(str(target), where.rstrip("/")):
            yield target


@dataclass(frozen=True)
class RemoteSaves(StoredSaves):
    """What is stored at a URL, found in a copy of it, or of as much as is needed.

    Attributes:
        url: of the place.
    """

    url: str
    has_all_hosts = True

    def remove(self, one: FoundCheckpoint) -> None:
        """See `StoredSaves`."""
        where, below = without_credentials(self.url), one.path.relative_to(self.path).as_posix()
        try:
            files, root = fsspec.url_to_fs(self.url)
            folder = f"{str(root).rstrip('/')}/{below}"

            def names_in() -> list[str]:
                files.invalidate_cache()
                try:
                    return [str(name).rstrip("/").rpartition("/")[2] for name in files.ls(folder, detail=False)]
                except FileNotFoundError:
                    return []

            with _said_if_slow(where):
                remove_objects(files, folder, names_in)
        except Exception as error:  # noqa: BLE001 - each protocol's package has its own errors
            text = f"could not remove {below} at {where}: {without_secrets(error, self.url)}"
            raise CheckpointCommandError(text) from None

    def rewind(self, step: int, owner: str) -> str:
        """See `StoredSaves`."""
        tier = DurableTier(self.url)
        return f"{tier.where.rstrip('/')}/{tier.rewind(step, owner).file_name}"


@contextmanager
def _said_if_slow(where: str) -> Iterator[None]:
    timer = threading.Timer(SAY_AFTER_S, complain, [f"still reading {where}: it is large, or does not answer"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _copy_all(files: Any, root: str, target: Path, *, heads_only: bool) -> None:
    """Copies what is there, but no checkpoint of which something is removed meanwhile.

    Raises:
        FileNotFoundError: there is nothing.
        _RemovedError: all were removed.
    """
    files.invalidate_cache()
    files.ls(root)  # `find` would take what does not answer for nothing
    found = files.find(root, detail=True)
    _require_room(
        target.parent, [item["size"] for name, item in found.items() if _is_whole(item["size"], name, heads_only)]
    )
    kept, removed = set[str](), set[str]()
    for name, item in found.items():
        below = os.path.relpath(str(name), root)
        if below.split("/")[0] == "..":
            raise ValueError(f"{name} would be written outside of the copy")
        checkpoint = os.path.dirname(below)  # noqa: PTH120 - of a name, and "" for none
        if checkpoint in removed:
            continue
        kept.add(checkpoint)
        try:
            _copy(files, str(name), item["size"], target / below, heads_only=heads_only)
        except FileNotFoundError:
            if not checkpoint:
                raise
            kept.discard(checkpoint)
            removed.add(checkpoint)
            shutil.rmtree(target / checkpoint)
    if not found:
        raise FileNotFoundError(root)
    if removed and not kept - {""}:
        raise _RemovedError(root)


def _is_whole(size_bytes: int | None, name: str, heads_only: bool) -> bool:
    return not heads_only or size_bytes is None or size_bytes <= _SMALL_BYTES or not name.endswith(".shard")


def _require_room(folder: Path, sizes_bytes: list[int | None]) -> None:
    """Nothing is downloaded that does not fit. Raises: OSError."""
    needed_bytes, free_bytes = sum(size or 0 for size in sizes_bytes), shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise OSError(errno.ENOSPC, f"it needs {bytes_text(needed_bytes)}, and {bytes_text(free_bytes)} are free")


def _copy(files: Any, name: str, size_bytes: int | None, target: Path, *, heads_only: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if size_bytes is None or _is_whole(size_bytes, name, heads_only):
        files.get_file(name, str(target))
        return
    head = files.cat_file(name, 0, PREAMBLE_BYTES)
    try:
        head += files.cat_file(name, PREAMBLE_BYTES, decode_preamble(head).data_offset_bytes)
    except CorruptCheckpointError:
        pass  # whoever reads the file says so
    target.write_bytes(head)
    os.truncate(target, size_bytes)
