"""How adapters store what is no tensor: nested values as JSON, also in a tensor of bytes, a folder as one zip. Pure.

Nothing is pickled.
"""

from __future__ import annotations

import collections
import datetime
import enum
import io
import json
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.checkpoint.format.places import place_text, token
from torchelastic.checkpoint.format.plain_objects import content_of
from torchelastic.torch_internals.tensors import metadata_of, set_metadata

#: The context of a run of NeMo (what model and tokenizer are made from): an extra file of its checkpoints in memory.
#: NeMo has a folder of this name without the suffix.
CONTEXT_FILE = "context.zip"
#: In place of what JSON has nothing for.
_NOTHING = object()
_JSON_KEYS = (int, float, bool, type(None))


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


def json_like(value: Any, skip: Callable[[str, Any], None], path: tuple[str, ...] = ()) -> Any:
    """A copy of nested values of any kind as JSON has them: numbers of numpy and of tensors, texts for dates and paths.

    Args:
        value: plain values, numpy's, tensors, and containers of them.
        skip: called with the place and the value of what JSON has nothing for; it is not in the copy.
        path: of the value, by `places.token`.
    """
    found = _json_like(value, skip, path)
    return None if found is _NOTHING else found


def _json_like(value: Any, skip: Callable[[str, Any], None], path: tuple[str, ...]) -> Any:
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        pairs = [(_json_key(key), _json_like(item, skip, (*path, token(key)))) for key, item in value.items()]
        return {key: item for key, item in pairs if item is not _NOTHING}
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        in_order = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return [json_like(item, skip, (*path, str(place))) for place, item in enumerate(in_order)]
    simpler = _simpler(value)
    if simpler is _NOTHING:
        skip(place_text(path), value)
        return _NOTHING
    return _json_like(simpler, skip, path)


def _simpler(value: Any) -> Any:
    """A value that is no container, as JSON has it."""
    if isinstance(value, torch.Tensor):
        try:
            return value.tolist()
        except (RuntimeError, NotImplementedError, TypeError):  # of a kind without elements that can be had
            return _NOTHING
    if isinstance(value, np.ndarray):
        return value.tolist()
    for plain in (str, bool, int, float):
        if isinstance(value, plain):  # a subclass of it
            return plain(value)
    if isinstance(value, np.generic):
        return float(value) if isinstance(value, np.floating) else value.item()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    is_text = isinstance(value, complex | torch.dtype | torch.device | PurePath) or content_of(value) is not None
    return str(value) if is_text else _NOTHING


def _json_key(key: Any) -> str:
    """As `json.dumps` writes the keys that it takes: `true` for True."""
    plain = key.item() if isinstance(key, np.generic) else key
    return plain if type(plain) is str else json.dumps(plain) if type(plain) in _JSON_KEYS else str(plain)


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
