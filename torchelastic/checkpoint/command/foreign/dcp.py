"""Folders of `torch.distributed.checkpoint` (DCP), as one process writes and reads them.

DCP joins nested keys with dots, makes them all text and forgets tuples and empty containers. What `convert` writes
also holds the exact structure, as one more value under `STRUCTURE_KEY`; `dcp.load` into a state passes it over.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader

from torchelastic.checkpoint.command.command_error import CheckpointCommandError, underlying
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError, explained
from torchelastic.checkpoint.format.structures import from_json, leaf_paths, places_of, to_json
from torchelastic.checkpoint.format.tree import unflatten
from torchelastic.torch_internals.checkpoints import load_all

METADATA_FILE = ".metadata"
STRUCTURE_KEY = "torchelastic_structure"

_NOT_STRIDED = ("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "per_tensor", "per_channel")


def is_one(path: Path) -> bool:
    """Whether a folder is one."""
    return (path / METADATA_FILE).is_file()


def read(path: Path, *, allow_pickles: bool = False) -> Any:
    """The state in a folder, whole, on the CPU.

    Raises:
        CheckpointCommandError: without `allow_pickles`; or torch cannot read the folder.
        CorruptCheckpointError: it lacks what it says it has.
    """
    if not allow_pickles:
        raise CheckpointCommandError(
            f"{path} is a folder of torch.distributed.checkpoint, and its {METADATA_FILE} is a pickle, which can run "
            "any code when torch reads it: use --allow-pickles if you trust whoever wrote it"
        )
    return read_through(FileSystemReader(path), path)


def read_through(reader: StorageReader, path: Path) -> Any:
    """The state that a reader of DCP's finds at a path, whole, on the CPU; raises as `read`, and as the reader."""
    try:
        with explained("read the checkpoint", path), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group
            tree = load_all(reader)
    except NotImplementedError as error:
        raise CheckpointCommandError(f"{path} cannot be read: {error}; use an older torch") from error
    except CheckpointException as error:
        cause = _cause(error)
        if not isinstance(cause, Exception) or isinstance(cause, CheckpointError):
            raise cause from None  # Ctrl-C, or explained already
        raise CheckpointCommandError(f"torch.distributed.checkpoint cannot read {path}: {cause!r}") from error
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, EOFError, RuntimeError) as error:
        raise CheckpointCommandError(f"torch.distributed.checkpoint cannot read {path}: {error!r}") from error
    return _exact(path, tree, tree.pop(STRUCTURE_KEY)) if STRUCTURE_KEY in tree else tree


def check(tree: Any, structure: Any) -> None:
    """Raises CheckpointCommandError if DCP cannot hold a state."""
    if not isinstance(tree, dict):
        raise CheckpointCommandError(
            f"the state is a {type(tree).__name__}, and torch.distributed.checkpoint stores dicts only: use --to torch "
            "or --to shard"
        )
    found = [place for place, _ in places_of(structure, _NOT_STRIDED)]
    if found:
        raise CheckpointCommandError(
            f"torch.distributed.checkpoint does not store sparse and quantised tensors ({', '.join(found[:3])}): use "
            "--to torch or --to shard"
        )


def write(path: Path, tree: dict[str, Any], structure: Any) -> None:
    """Writes a state into a new folder.

    Raises:
        CheckpointCommandError: two names become one when they are joined with dots.
        CheckpointError: the disk refuses.
    """
    try:
        with explained("write the checkpoint", path), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group
            state = {**tree, STRUCTURE_KEY: to_json(structure)}
            save(state, storage_writer=FileSystemWriter(path))
    except CheckpointException as error:
        cause = _cause(error)
        if isinstance(cause, OSError):
            raise CheckpointError(f"could not write {path}: {cause}") from error
        if not isinstance(cause, Exception):
            raise cause from None  # Ctrl-C
        why = " (it joins nested keys with dots)" if isinstance(cause, ValueError) else ""
        raise CheckpointCommandError(
            f"torch.distributed.checkpoint cannot store this state: {cause}{why}; use --to torch or --to shard"
        ) from error


def _cause(error: CheckpointException) -> BaseException:
    """What went wrong, out of what torch wraps around it."""
    failures = list(error.failures.values())
    return underlying(failures[0][0]) if failures else error


def _exact(path: Path, tree: Mapping[str, Any], text: Any) -> Any:
    """The state as it was converted: with its tuples, its numbers as keys, its empty containers and shared tensors."""
    try:
        structure = from_json(text)
        tensors: dict[str, torch.Tensor] = {}
        for place, recipe in leaf_paths(structure):
            tensors.setdefault(recipe["names"]["data"], _as_tensor(_at(tree, place)))
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise CorruptCheckpointError(
            f"{path} does not hold what its {STRUCTURE_KEY!r} says ({error!r}): it was changed after it was written"
        ) from error
    return unflatten(structure, tensors, allow_pickles=True)


def _at(tree: Any, place: tuple[str, ...]) -> Any:
    for token in place:
        tree = tree[token] if isinstance(tree, Mapping) else tree[int(token)]
    return tree


def _as_tensor(value: Any) -> torch.Tensor:
    """`flatten` makes tensors of arrays and of long bytes, and DCP keeps them as they are."""
    if isinstance(value, (bytes, bytearray)):
        return torch.frombuffer(bytearray(value), dtype=torch.uint8)
    if isinstance(value, (np.ndarray, np.generic)):
        return torch.from_numpy(np.array(value))
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"a {type(value).__name__} where a tensor was")
    return value
