"""A number that tells samples apart: equal samples have equal ones in every process, different ones hardly ever."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import xxhash


def fingerprint(sample: object) -> int:
    """A 32-bit digest of a sample.

    Tensors, arrays, numbers, strings, bytes, and dicts, lists and tuples of them count with their content; of anything
    else only the type does, because two equal objects may well print, or pickle, differently.
    """
    digest = xxhash.xxh32()
    for part in _parts(sample):
        digest.update(part)
    return int(digest.intdigest())


def _parts(value: object) -> Iterator[bytes]:
    yield type(value).__name__.encode()
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode()
        if not value.dtype.hasobject:
            yield value.tobytes()
    elif isinstance(value, (bytes, bytearray)):
        yield bytes(value)
    elif isinstance(value, (bool, int, float, complex, str, np.generic)):
        yield str(value).encode(errors="surrogatepass")
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _parts(key)
            yield from _parts(inner)
    elif isinstance(value, (list, tuple)):
        yield str(len(value)).encode()
        for inner in value:
            yield from _parts(inner)
