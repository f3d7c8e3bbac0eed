"""Requests as bytes: everything is pickled, except that the contents of tensors are copied into shared memory, once.

The copy is the snapshot: what the trainer does to its tensors afterwards does not reach the worker. Tensors that share
storage still share it in the worker; those of a GPU arrive as CPU tensors. Both ends are this library's own processes.

The memory needs neither a name nor space in /dev/shm: it is an anonymous file (`memfd_create(2)`) whose descriptor is
sent to the worker, so one descriptor per request, however many tensors it holds, and gone when both processes are.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import socket
import weakref
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch

from torchelastic.torch_internals.tensors import identity_of_storage, storage_around, storage_within

if TYPE_CHECKING:
    from torchelastic.checkpoint.compat.nvrx.async_ckpt.request import AsyncRequest

#: What lies in the memory begins at multiples of this: aligned for every type of element.
_ALIGNMENT_BYTES = 64
#: A descriptor goes with a byte.
_WITH_DESCRIPTOR = b"m"


class SharedMemory:
    """A mapped anonymous file.

    Args:
        descriptor: of the file; owned by this object from now on.
        size_bytes: how large it is, more than 0.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.descriptor = descriptor
        self.size_bytes = size_bytes
        weakref.finalize(self, os.close, descriptor)
        self._mapping = mmap.mmap(descriptor, size_bytes)  # unmapped when the last tensor in it is gone

    @classmethod
    def allocate(cls, size_bytes: int) -> SharedMemory:
        """New memory, all zeros; pages are taken from the host when they are first written.

        Raises:
            OSError: the host gives none.
        """
        descriptor = os.memfd_create("async-checkpoint", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size_bytes)
        except OSError:
            os.close(descriptor)
            raise
        return cls(descriptor, size_bytes)

    def bytes_at(self, offset: int, size_bytes: int) -> torch.Tensor:
        """A part of it (more than 0 bytes), as a tensor of bytes that keeps the mapping alive."""
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=size_bytes, offset=offset)


class MemoryPool:
    """Hands out shared memory, and with `reuse` the same again once it was released.

    Pages that are there already need not be zeroed and mapped again, which takes longer than the copy itself.
    """

    def __init__(self, reuse: bool) -> None:
        self.reuse = reuse
        self._free: list[SharedMemory] = []

    def take(self, size_bytes: int) -> SharedMemory:
        """Memory of at least this size, that nobody else uses."""
        for memory in sorted(self._free, key=lambda free: free.size_bytes):
            if memory.size_bytes >= size_bytes:
                self._free.remove(memory)
                return memory
        self._free.clear()  # all too small: a larger one takes their place
        return SharedMemory.allocate(size_bytes)

    def release(self, memory: SharedMemory) -> None:
        """The worker is done with it."""
        if self.reuse:
            self._free.append(memory)


@dataclass(frozen=True)
class Parcel:
    """A request on its way to a worker.

    Attributes:
        pickled: the request, without the contents of its storages.
        places: offset and size in bytes of each storage in the memory.
        memory: where they are; None if all are empty.
    """

    pickled: bytes
    places: tuple[tuple[int, int], ...]
    memory: SharedMemory | None

    def send(self, connection: Connection) -> None:
        """Sends it to the worker; blocks while it does not read."""
        memory = self.memory
        connection.send((self.pickled, self.places, memory.size_bytes if memory is not None else 0))
        if memory is not None:
            # not by `multiprocessing.reduction`: since Python 3.14 that waits for an answer in the same connection, and
            # takes for it whatever the worker has said meanwhile
            with socket.socket(fileno=os.dup(connection.fileno())) as passing:
                socket.send_fds(passing, [_WITH_DESCRIPTOR], [memory.descriptor])

    @classmethod
    def received(
        cls, connection: Connection, pickled: bytes, places: tuple[tuple[int, int], ...], size_bytes: int
    ) -> Parcel:
        """The parcel of which `send` has sent these, and then the memory."""
        memory = None
        if size_bytes:
            with socket.socket(fileno=os.dup(connection.fileno())) as passing:
                _, descriptors, _, _ = socket.recv_fds(passing, len(_WITH_DESCRIPTOR), 1)
            if not descriptors:
                raise EOFError("the trainer has ended before it had sent the memory")
            memory = SharedMemory(descriptors[0], size_bytes)
        return cls(pickled, places, memory)


class _Pickler(pickle.Pickler):
    """Leaves storages out and collects them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.storages: list[torch.UntypedStorage] = []
        self._number_of: dict[object, int] = {}

    def persistent_id(self, obj: Any) -> tuple[int, torch.dtype] | None:
        if isinstance(obj, torch.storage.TypedStorage):
            return self._number(storage_within(obj)), obj.dtype
        if isinstance(obj, torch.UntypedStorage):
            return self._number(obj), torch.uint8  # as torch.save has it
        return None

    def _number(self, storage: torch.UntypedStorage) -> int:
        number = self._number_of.setdefault(identity_of_storage(storage), len(self.storages))
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
        return storage_around(self._storages[number], dtype)


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
        end += -(-storage.nbytes() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    memory = pool.take(end) if end else None
    for storage, (offset, size_bytes) in zip(pickler.storages, places, strict=True):
        if memory is not None and size_bytes:
            content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            memory.bytes_at(offset, size_bytes).copy_(content)
    return Parcel(file.getvalue(), tuple(places), memory)


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
