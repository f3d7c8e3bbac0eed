"""Requests as bytes: everything is pickled, except that the contents of tensors are copied into shared memory, once.

The copy is the snapshot: what the trainer does to its tensors afterwards does not reach the worker. Tensors that share
storage still share it in the worker; those of a GPU arrive as CPU tensors. Both ends are this library's own processes.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torchelastic.checkpoint.async_ckpt.memory import MemoryPool, SharedMemory, aligned

if TYPE_CHECKING:
    from torchelastic.checkpoint.async_ckpt.request import AsyncRequest


@dataclass(frozen=True)
class Parcel:
    """A request on its way to a worker.

    Attributes:
        call_idx: of the request.
        pickled: the request, without the contents of its storages.
        places: offset and size in bytes of each storage in the memory.
        memory: where they are; None if all are empty.
    """

    call_idx: int
    pickled: bytes
    places: tuple[tuple[int, int], ...]
    memory: SharedMemory | None


class _Pickler(pickle.Pickler):
    """Leaves storages out and collects them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.storages: list[torch.UntypedStorage] = []
        self._number_of: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> tuple[int, torch.dtype] | None:
        if isinstance(obj, torch.storage.TypedStorage):
            return self._number(obj._untyped_storage), obj.dtype
        if isinstance(obj, torch.UntypedStorage):
            return self._number(obj), torch.uint8  # as torch.save has it
        return None

    def _number(self, storage: torch.UntypedStorage) -> int:
        number = self._number_of.setdefault(storage._cdata, len(self.storages))
        if number == len(self.storages):
            self.storages.append(storage)
        return number


class _Unpickler(pickle.Unpickler):
    """Puts the storages back in."""

    def __init__(self, file: io.BytesIO, storages: list[torch.UntypedStorage]) -> None:
        super().__init__(file)
        self._storages = storages

    def persistent_load(self, pid: Any) -> Any:
        number, dtype = pid
        return torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
            wrap_storage=self._storages[number], dtype=dtype, _internal=True
        )


def pack(request: AsyncRequest, pool: MemoryPool) -> Parcel:
    """Turn a request into a parcel; its tensors are copied when this returns. Finalize functions stay behind.

    Raises:
        TypeError: something in it cannot be pickled.
        OSError: there is no memory for the copy.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(request._replace(finalize_fns=[]))
    except Exception as error:
        raise TypeError(
            f"the checkpoint request cannot be sent to a worker process: {type(error).__name__}: {error}. Use "
            'functions and classes of a module (no lambdas, no process groups), or worker="thread"'
        ) from error
    places, end = [], 0
    for storage in pickler.storages:
        places.append((end, storage.nbytes()))
        end += aligned(storage.nbytes())
    memory = pool.take(end) if end else None
    for storage, (offset, size_bytes) in zip(pickler.storages, places, strict=True):
        if memory is not None and size_bytes:
            content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            memory.bytes_at(offset, size_bytes).copy_(content)
    return Parcel(request.call_idx, file.getvalue(), tuple(places), memory)


def unpack(parcel: Parcel) -> AsyncRequest:
    """The request of a parcel; its tensors lie in the parcel's memory."""
    storages = []
    for offset, size_bytes in parcel.places:
        if parcel.memory is None or not size_bytes:
            storages.append(torch.UntypedStorage(0))  # type: ignore[no-untyped-call]
        else:
            storages.append(parcel.memory.bytes_at(offset, size_bytes).untyped_storage())
    request: AsyncRequest = _Unpickler(io.BytesIO(parcel.pickled), storages).load()
    return request
