"""Collectives on the default process group, for values that are not tensors and for whole models.

Every function that says "collective" must be called by all ranks, in the same order; a rank that does not is waited for
until the group's timeout, and then the others get a `torch.distributed.DistError` (a `RuntimeError`). Without a process
group, or in a world of one, they return their input and communicate nothing. Call them from the training thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from torchelastic.group.backends import device_names
from torchelastic.group.communicators import wait_for_collectives

# 8 chunks of 4 MiB in flight keep gloo's tree busy from the root to the leaves, and bound what is staged on a GPU.
_CHUNK_BYTES = 4 * 2**20
_CHUNKS_IN_FLIGHT = 8
_NO_DATA = -1


def is_distributed_training_run() -> bool:
    """Return True if the default process group is initialised and has more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def get_rank() -> int:
    """Return this process's rank in the default process group, 0 if there is none."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def convert_to_distributed_tensor(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Bring a tensor to a device that the default process group can send from.

    Args:
        tensor: on any device.

    Returns:
        The tensor itself, or a copy on this process's GPU if the group's backend needs that (nccl); and the kind of
        device that it came from, "cpu" or "gpu", for `convert_to_normal_tensor`.
    """
    origin = "cpu" if tensor.device.type == "cpu" else "gpu"
    return tensor.to(_device_for(tensor.device)), origin


def convert_to_normal_tensor(tensor: torch.Tensor, orig_device: str) -> torch.Tensor:
    """Bring a tensor back to where `convert_to_distributed_tensor` found it.

    Args:
        tensor: as returned by a collective.
        orig_device: "cpu" or "gpu", as returned by `convert_to_distributed_tensor`.
    """
    if orig_device == "cpu":
        return tensor.cpu()
    accelerator = torch.accelerator.current_accelerator()
    return tensor if accelerator is None or tensor.device.type != "cpu" else tensor.to(accelerator)


def broadcast_long(value: int, src_rank: int) -> int:
    """Return the source's integer on every rank. Collective.

    Args:
        value: fits 64 bits, signed; ignored except on the source.
        src_rank: the rank whose value counts.
    """
    if not is_distributed_training_run():
        return value
    tensor = torch.tensor([value if get_rank() == src_rank else 0], dtype=torch.int64)
    return int(_broadcast_small(tensor, src_rank).item())


def broadcast_bool(value: bool, src_rank: int) -> bool:
    """Return the source's truth value on every rank. Collective; `value` is ignored except on the source."""
    return broadcast_long(1 if value else 0, src_rank) == 1


def broadcast_float_list(float_list: Sequence[float], src_rank: int) -> list[float]:
    """Return the source's list on every rank, exactly (as 64-bit floats; 0.1 rounded to 32 bits). Collective.

    Args:
        float_list: any length; ignored, whatever its length, except on the source.
        src_rank: the rank whose list counts.
    """
    if not is_distributed_training_run():
        return list(float_list)
    length = broadcast_long(len(float_list), src_rank)
    values = list(float_list) if get_rank() == src_rank else [0.0] * length
    result: list[float] = _broadcast_small(torch.tensor(values, dtype=torch.float64), src_rank).tolist()
    return result


def all_gather_return_max_long(value: int) -> tuple[int, int]:
    """Return the rank that holds the largest value, and that value. Collective.

    Args:
        value: fits 64 bits, signed.

    Returns:
        (rank, value), equal on all ranks; among equal values the lowest rank.
    """
    if not is_distributed_training_run():
        return 0, value
    tensor, _ = convert_to_distributed_tensor(torch.tensor([value], dtype=torch.int64))
    gathered = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    wait_for_collectives()
    values: list[int] = torch.cat(gathered).tolist()
    best = max(range(len(values)), key=lambda rank: values[rank])
    return best, values[best]


def broadcast_model(src_rank: int, model: torch.nn.Module) -> None:
    """Overwrite a model's parameters and buffers with the source's. Collective.

    Buffers too (0.1 left out batch-norm statistics). All ranks must have built the same model; one that receives only
    part of it because the source died gets an error and must not use the model.

    Args:
        src_rank: the rank whose weights count.
        model: on any device, its tensors dense.
    """
    if is_distributed_training_run():
        _broadcast_all((tensor.detach() for tensor in (*model.parameters(), *model.buffers())), src_rank)


def broadcast_binary(data: npt.NDArray[Any] | bytes | None, src_rank: int) -> npt.NDArray[np.uint8] | None:
    """Return the source's bytes on every rank. Collective.

    The source's memory is sent from and the result's memory is received into directly, in chunks that overlap.

    Args:
        data: an array of any type and shape (only its bytes travel; a non-contiguous one is copied first), bytes, or
            None for "nothing"; ignored except on the source.
        src_rank: the rank whose data counts.

    Returns:
        A flat uint8 array, on the source a read-only view of `data`; None if the source passed None.

    Raises:
        TypeError: this rank's `data` is of another type.
    """
    payload = None if data is None else _as_bytes(data)
    if not is_distributed_training_run():
        return payload
    is_source = get_rank() == src_rank
    size = broadcast_long(_NO_DATA if payload is None else payload.size, src_rank)
    if size == _NO_DATA:
        return None
    if not is_source or payload is None:
        payload = np.empty(size, dtype=np.uint8)
    if size:
        _broadcast_all(torch.split(_tensor_over(payload), _CHUNK_BYTES), src_rank)
    return payload


def _broadcast_all(tensors: Iterable[torch.Tensor], src_rank: int) -> None:
    """Broadcast into these, a few at a time."""
    window: deque[tuple[dist.Work, torch.Tensor, torch.Tensor]] = deque()
    for tensor in tensors:
        if len(window) == _CHUNKS_IN_FLIGHT:
            _finish(*window.popleft())
        window.append(_start_broadcast(tensor, src_rank))
    while window:
        _finish(*window.popleft())
    wait_for_collectives()


def _start_broadcast(target: torch.Tensor, src_rank: int) -> tuple[dist.Work, torch.Tensor, torch.Tensor]:
    """Begin to broadcast into `target`; `_finish` waits for it. Returns (work, sent, target)."""
    sent = target.to(_device_for(target.device)).contiguous()  # `target` itself if it is fit to be sent
    work = dist.broadcast(sent, src=src_rank, async_op=True)
    assert work is not None, "this process is in the default group"
    return work, sent, target


def _finish(work: dist.Work, sent: torch.Tensor, target: torch.Tensor) -> None:
    work.wait()
    if sent is not target:
        target.copy_(sent)


def _broadcast_small(tensor: torch.Tensor, src_rank: int) -> torch.Tensor:
    sent, origin = convert_to_distributed_tensor(tensor)
    dist.broadcast(sent, src=src_rank)
    wait_for_collectives()
    return convert_to_normal_tensor(sent, origin)


def _device_for(device: torch.device) -> torch.device:
    """Return `device` if the default group has a backend for it, else a device that it has one for."""
    if not (dist.is_available() and dist.is_initialized()):
        return device
    kinds = list(device_names())
    if device.type in kinds or "cpu" in kinds:
        return device if device.type in kinds else torch.device("cpu")
    return torch.device(kinds[0])  # without an index: this process's current device


def _as_bytes(data: object) -> npt.NDArray[np.uint8]:
    """View an array or bytes as a flat, read-only uint8 array."""
    if isinstance(data, bytes):
        return np.frombuffer(data, dtype=np.uint8)
    if not isinstance(data, np.ndarray):
        raise TypeError(f"broadcast_binary takes a numpy array, bytes or None, got {type(data).__name__}")
    view = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    view.flags.writeable = False
    return view


class _Writable:
    """Shows an array's memory as writable, so that torch wraps it without a copy and without its warning."""

    def __init__(self, array: npt.NDArray[np.uint8]) -> None:
        self._array = array  # keeps the memory alive as long as torch refers to it
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def _tensor_over(array: npt.NDArray[np.uint8]) -> torch.Tensor:
    """Wrap an array without copying. The source's may be read-only: broadcasting only reads there."""
    return torch.from_numpy(np.asarray(_Writable(array)))
