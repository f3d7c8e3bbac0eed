"""Tells whether a file that torchelastic 0.1 wrote is complete.

0.1 wrote in place, without a manifest, so the only witness of completeness is the file's own format. 0.1's `State.save`
calls `torch.save`, which writes a zip archive (torch 1.6 and later) or pickles followed by raw storages (before).
Nothing that the file names is imported or called here.
"""

from __future__ import annotations

import pickle
import zipfile
from typing import BinaryIO

_TORCH_MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle of a file that torch wrote before 1.6
_NUMEL_BYTES = 8  # each storage is preceded by its number of elements as a 64-bit integer
_ITEM_BYTES = {
    "BFloat16Storage": 2,
    "ComplexDoubleStorage": 16,
    "ComplexFloatStorage": 8,
    "DoubleStorage": 8,
    "FloatStorage": 4,
    "HalfStorage": 2,
    "IntStorage": 4,
    "LongStorage": 8,
    "QInt32Storage": 4,
    "ShortStorage": 2,
}  # every other storage has items of one byte


def damage_of_legacy_file(file: BinaryIO, *, read_all: bool) -> str | None:
    """Tells what shows that a file of 0.1 is incomplete, or None if it is complete as far as its format can tell.

    Args:
        file: the stream `default`, open for reading and seekable; its position is moved.
        read_all: also compare the checksums of a zip archive's members, which reads all of it. (The older format has no
            checksums: there, only what is missing at the end is noticed.)
    """
    if zipfile.is_zipfile(file):
        return _damage_of_zip(file, read_all)
    file.seek(0)
    try:
        missing_bytes = _missing_bytes_of_pickled(file)
    except Exception as error:  # noqa: BLE001 - arbitrary bytes fail in arbitrary ways; all of them mean "not complete"
        return f"it is neither a complete zip archive nor a complete file of torch.save ({type(error).__name__})"
    return f"its last {missing_bytes} bytes are missing" if missing_bytes > 0 else None


def _damage_of_zip(file: BinaryIO, read_all: bool) -> str | None:
    try:
        with zipfile.ZipFile(file) as archive:
            broken_member = archive.testzip() if read_all else None
    except Exception as error:  # noqa: BLE001 - as above
        return f"its zip archive cannot be read: {str(error) or type(error).__name__}"
    return f"the checksum of its member {broken_member} does not match" if broken_member else None


def _missing_bytes_of_pickled(file: BinaryIO) -> int:
    """How many bytes the file is short of what its pickles announce."""
    if _InertUnpickler(file).load() != _TORCH_MAGIC:
        raise ValueError("not written by torch.save")
    for _ in ("protocol version", "system information"):
        _InertUnpickler(file).load()
    saved_object = _InertUnpickler(file)
    saved_object.load()
    storage_keys = _InertUnpickler(file).load()
    announced_bytes = sum(_NUMEL_BYTES + saved_object.storage_bytes[key] for key in storage_keys)
    start = file.tell()
    return announced_bytes - (file.seek(0, 2) - start)


class _Inert:
    """Stands for any class or function that a pickle names: takes everything, does nothing."""

    def __init__(self, *_args: object, **_kwargs: object) -> None: ...

    def __call__(self, *_args: object, **_kwargs: object) -> _Inert:
        return self

    def __setstate__(self, _state: object) -> None: ...

    def __setitem__(self, _key: object, _value: object) -> None: ...

    def append(self, _item: object) -> None: ...

    def extend(self, _items: object) -> None: ...

    def add(self, _item: object) -> None: ...


class _InertUnpickler(pickle.Unpickler):
    """Walks over one pickle without running anything of it, and collects the sizes of the storages it refers to."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.storage_bytes: dict[str, int] = {}

    def find_class(self, _module_name: str, global_name: str, /) -> type[_Inert]:
        return type(global_name, (_Inert,), {})

    def persistent_load(self, pid: tuple[object, ...]) -> object:
        match pid:
            case ("module", module_class, *_):
                return module_class
            # The last part, about views of another storage, is absent in the oldest files.
            case ("storage", type() as storage_type, str() as key, _, int() as numel, *_):
                self.storage_bytes.setdefault(key, numel * _ITEM_BYTES.get(storage_type.__name__, 1))
        return _Inert()
