"""What DCP's planners pickle with `torch.save`, read without running anything."""

from __future__ import annotations

import io
import pickle
from typing import Any, BinaryIO, NoReturn

import torch

#: How the archive of `torch.save` begins: a zip file, whose first member is the pickle, not compressed.
_ZIP, _ZIP_HEADER_BYTES, _FIRST_MEMBER = b"PK\x03\x04", 30, b"/data.pkl"


class _PlainUnpickler(pickle.Unpickler):
    """Builds numbers, strings, lists, tuples and dicts: whatever else a pickle asks for, it would have to look up."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        """See `pickle.Unpickler`."""
        raise pickle.UnpicklingError(f"{module}.{name} is no plain value")


def load_safely(content: BinaryIO) -> Any:
    """What `torch.load(content, map_location="cpu", weights_only=True)` returns, with its errors.

    Of plain values there are thousands in an optimizer's state, and torch's archives take ten times as long as what is
    in them.

    Args:
        content: at the beginning of what `torch.save` has written.
    """
    try:
        return _plain_value(content.read())
    except Exception:  # noqa: BLE001 - damaged, or more than plain values: torch tells these
        content.seek(0)
    return torch.load(content, map_location="cpu", weights_only=True)


def _plain_value(archive: bytes) -> Any:
    name_bytes, extra_bytes = int.from_bytes(archive[26:28], "little"), int.from_bytes(archive[28:30], "little")
    begin = _ZIP_HEADER_BYTES + name_bytes
    is_compressed = archive[8:10] != b"\0\0"
    if archive[:4] != _ZIP or is_compressed or not archive[_ZIP_HEADER_BYTES:begin].endswith(_FIRST_MEMBER):
        raise pickle.UnpicklingError("this is not how torch.save begins an archive")
    return _PlainUnpickler(io.BytesIO(archive[begin + extra_bytes :])).load()
