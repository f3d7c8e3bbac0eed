"""A number that tells samples apart: equal samples have equal ones in every process, different ones hardly ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import xxhash

#: Others go byte by byte: numpy does not know them.
_OF_NUMPY = frozenset(
    (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64, torch.bool)
)


def fingerprint(sample: object) -> int:
    """A 32-bit digest of a sample.

    Tensors, arrays, numbers, strings, bytes, and dicts, lists and tuples of them count with their content; of anything
    else only the type does, because two equal objects may well print, or pickle, differently.
    """
    digest = xxhash.xxh32()
    _add(sample, digest.update)
    return int(digest.intdigest())


def _add(value: object, update: Callable[[Any], None]) -> None:
    update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        update(f"{value.dtype}{tuple(value.shape)}".encode())
        plain = value.detach()
        if plain.dtype not in _OF_NUMPY or plain.device.type != "cpu" or plain.is_conj() or plain.is_neg():
            plain = plain.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        update(np.ascontiguousarray(plain.numpy()))
    elif isinstance(value, np.ndarray):
        update(f"{value.dtype}{value.shape}".encode())
        if not value.dtype.hasobject:
            update(np.ascontiguousarray(value))
    elif isinstance(value, (bytes, bytearray)):
        update(bytes(value))
    elif isinstance(value, (bool, int, float, complex, str, np.generic)):
        update(str(value).encode(errors="surrogatepass"))
    elif isinstance(value, dict):
        for key, inner in value.items():
            _add(key, update)
            _add(inner, update)
    elif isinstance(value, (list, tuple)):
        update(str(len(value)).encode())
        for inner in value:
            _add(inner, update)
