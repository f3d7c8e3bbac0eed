"""Files of safetensors, and folders of several that hold one state.

They hold named tensors and text. What `convert` writes also says, in the text, how the state was built of them, so the
way back gives the same state; of the files of others it makes a flat dict.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from torchelastic.checkpoint.command.command_error import CheckpointCommandError
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError, explained
from torchelastic.checkpoint.format.structures import from_json, leaf_paths, to_json
from torchelastic.checkpoint.format.tensor_parts import dtype_name
from torchelastic.checkpoint.format.tree import Flat, NamedTensor, tensor_names, unflatten

#: The name in the file's text under which the structure is.
STRUCTURE_KEY = "torchelastic.structure"
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


def is_one(path: Path) -> bool:
    """Whether it is such a file, by its first bytes, or a folder with such files."""
    if path.is_dir():
        return any(map(_is_file, files_of(path)))
    return _is_file(path)


def files_of(folder: Path) -> list[Path]:
    """The files of a folder, in the order of their names."""
    with explained("list the files", folder):
        return sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")


def read(path: Path, *, allow_pickles: bool = False) -> Any:
    """The state in a file or folder, on the CPU.

    Raises:
        CorruptCheckpointError: a file is cut or damaged, or one that the index of the folder names is missing.
        CheckpointCommandError: two files have a tensor of the same name, or safetensors is not installed.
    """
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}  # as `save_model` of safetensors notes a tensor that has two names
    structure = None
    files = files_of(path) if path.is_dir() else [path]
    if path.is_dir():
        _require_all(path, files)
    for file in files:
        text, found = _read_file(file)
        twice = tensors.keys() & found.keys()
        if twice:
            raise CheckpointCommandError(
                f"{file} has {min(twice)!r}, and so has another file of {path}: convert one file"
            )
        tensors |= found
        structure = text.get(STRUCTURE_KEY, structure)
        aliases |= text
    if structure is not None:
        return _exact(path, structure, tensors, allow_pickles)
    return tensors | {name: tensors[kept] for name, kept in aliases.items() if name not in tensors and kept in tensors}


def check(flat: Flat) -> None:
    """Raises CheckpointCommandError if safetensors lacks a dtype of the state; names all of them."""
    save = _library().save
    by_dtype: dict[torch.dtype, str] = {}
    for named in flat.tensors:
        by_dtype.setdefault(named.tensor.dtype, named.name)
    lacking = [f"{dtype_name(dtype)} ({name!r})" for dtype, name in by_dtype.items() if not _takes(save, dtype)]
    if lacking:
        raise CheckpointCommandError(
            f"safetensors has no dtype for {', '.join(lacking)}: use --to torch, --to dcp or --to shard, or convert "
            "these tensors to another dtype first"
        )


def write(path: Path, flat: Flat) -> None:
    """Writes a state as one file. A tensor that is in two places is stored once, under the first."""
    text = {STRUCTURE_KEY: to_json(flat.structure), "format": "pt"}
    taken = {*text, *(named.name for named in flat.tensors)}
    text |= {name: kept for name, kept in _aliases(flat.structure) if name not in taken}
    library = _library()
    from safetensors import SafetensorError

    with explained("write the file", path):
        try:
            library.save_file(_independent(flat.tensors), path, metadata=text)
        except SafetensorError as error:
            raise OSError(str(error)) from error


def _exact(path: Path, text: str, tensors: Mapping[str, torch.Tensor], allow_pickles: bool) -> Any:
    try:
        structure = from_json(text)
        expected = tensor_names(structure)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptCheckpointError(f"{path}: its {STRUCTURE_KEY!r} is damaged: {error!r}") from error
    if expected != tensors.keys():
        some = min(expected ^ tensors.keys())
        raise CorruptCheckpointError(
            f"{path} does not hold the tensors that its {STRUCTURE_KEY!r} names (the first: {some!r}): it was changed "
            f"after it was written; remove {STRUCTURE_KEY!r} from its metadata to read it as a flat dict"
        )
    try:
        return unflatten(structure, tensors, allow_pickles=allow_pickles)
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from error


def _aliases(structure: Any) -> Iterable[tuple[str, str]]:
    """Names of tensors that are stored under another name, as safetensors' own `save_model` notes them."""
    for place, recipe in leaf_paths(structure):
        name = "/".join(token.replace("~", "~0").replace("/", "~1") for token in place)
        kept = recipe["names"].get("data", name)
        if kept != name:
            yield name, kept


def _independent(tensors: Iterable[NamedTensor]) -> dict[str, torch.Tensor]:
    """The tensors as safetensors wants them: each in memory of its own, which holds nothing else."""
    seen: set[int] = set()
    prepared = {}
    for named in tensors:
        tensor = named.tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        memory = tensor.untyped_storage()
        if memory.data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(memory.data_ptr())
        prepared[named.name] = tensor
    return prepared


def _is_file(path: Path) -> bool:
    if not path.is_file():
        return False
    with explained("read the file", path), path.open("rb") as file:
        start = file.read(9)
    length = int.from_bytes(start[:8], "little")
    return len(start) == 9 and start[8:] == b"{" and 2 <= length <= _MAX_HEADER_BYTES


def _read_file(path: Path) -> tuple[Mapping[str, str], dict[str, torch.Tensor]]:
    _library()
    from safetensors import SafetensorError, safe_open

    try:
        with explained("read the file", path), safe_open(path, framework="pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CorruptCheckpointError(f"{path} is no whole file of safetensors: {error}") from error


def _require_all(folder: Path, files: Iterable[Path]) -> None:
    """Compares the folder with its index, where it has one."""
    present = {file.name for file in files}
    for index in sorted(folder.glob("*.safetensors.index.json")):
        try:
            with explained("read the file", index):
                named = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CorruptCheckpointError(f"{index} is no index of safetensors files: {error!r}") from error
        missing = sorted(named - present)
        if missing:
            raise CorruptCheckpointError(f"{folder} lacks {', '.join(missing[:3])}, which {index.name} names")


def _takes(save: Any, dtype: torch.dtype) -> bool:
    try:
        save({"probe": torch.empty(0, dtype=torch.uint8).view(dtype)})
    except (KeyError, ValueError, TypeError, RuntimeError):
        return False
    return True


def _library() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError as error:
        raise CheckpointCommandError(
            "safetensors is not installed: python -m pip install safetensors (or torchelastic[convert])"
        ) from error
    return safetensors.torch
