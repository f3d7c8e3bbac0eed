"""How adapters store what is no tensor: nested values as JSON in a tensor of bytes, a folder as one zip file. Pure.

Nothing is pickled.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.torch_internals.tensors import metadata_of, set_metadata

#: The context of a run of NeMo (what model and tokenizer are made from): an extra file of its checkpoints in memory.
#: NeMo has a folder of this name without the suffix.
CONTEXT_FILE = "context.zip"


def mapped(value: Any, leaf: Callable[[Any], Any] = lambda value: value) -> Any:
    """A copy of nested dicts, lists and tuples, with `leaf` of each value in them; subclasses of dict become dicts.

    An `OrderedDict` stays one, with the versions of modules, if it is what a `state_dict` gave.
    """
    if isinstance(value, dict):
        items = {key: mapped(item, leaf) for key, item in value.items()}
        return items if type(value) is not OrderedDict else _ordered_like(value, items)
    if type(value) in (list, tuple):
        return type(value)(mapped(item, leaf) for item in value)
    return leaf(value)


def _ordered_like(value: OrderedDict[Any, Any], items: dict[Any, Any]) -> OrderedDict[Any, Any]:
    ordered = OrderedDict(items)
    if (versions := metadata_of(value)) is not None:
        set_metadata(ordered, mapped(versions))
    return ordered


def json_tensor(value: Any, block_bytes: int = 1) -> torch.Tensor:
    """A value as JSON in a tensor of bytes, whose length is a multiple of a block."""
    content = json.dumps(value, separators=(",", ":")).encode()
    content = content.ljust(-(-len(content) // block_bytes) * block_bytes)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def from_json_tensor(tensor: torch.Tensor, what: str) -> Any:
    """The inverse of `json_tensor`. Raises CorruptCheckpointError: it is damaged; names what it is."""
    try:
        return json.loads(tensor.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"the checkpoint is damaged, in {what}: {error!r}") from error


def packed(folder: Path) -> bytes:
    """A folder, with the folders in it, as a zip file without compression. Raises OSError: a file cannot be read."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for path in sorted(folder.rglob("*")):
            archive.write(path, path.relative_to(folder))
    return content.getvalue()


def unpack(file: Path, folder: Path) -> None:
    """The inverse: into a folder, and never out of it, whatever names are in the file.

    Raises:
        OSError: it cannot be written.
        zipfile.BadZipFile: the file is damaged.
    """
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder)  # drops drives, leading slashes and '..'
