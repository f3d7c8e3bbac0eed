"""Copying a state into a slot; from a GPU also while training goes on.

From a GPU a copy runs on a stream of its own, into pinned memory. It begins behind what the training stream was given
before. What changes the state has to wait for it: on the GPU (`PendingCopy.hold`), which stops no thread, or on the
training thread, as late as before the optimizer's step where nothing else changes what is copied (`PendingCopy.wait`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from torchelastic.checkpoint.format.tensor_parts import copyable
from torchelastic.torch_internals.tensors import copy_each

NOTHING: Mapping[torch.device, torch.cuda.Event] = MappingProxyType({})


class PendingCopy:
    """A copy that may still be running; made by `begin_copy`.

    Args:
        events: what marks the end of the copy on each GPU, by device; none if it is complete already.
        sources: the tensors that are read, kept alive until the copy is complete.
    """

    def __init__(
        self, events: Mapping[torch.device, torch.cuda.Event] = NOTHING, sources: Sequence[torch.Tensor] = ()
    ) -> None:
        self._events = dict(events)
        self._sources: tuple[torch.Tensor, ...] = tuple(sources)

    def hold(self) -> None:
        """Have each GPU begin nothing of what its current stream is given from now on before the copy is complete."""
        for device, event in self._events.items():
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Returns when all bytes are in the slot; on any thread, before the state changes or the slot is sealed.

        It waits for the copy alone, not for the device, and lets the interpreter lock go.
        """
        for event in self._events.values():
            event.synchronize()
        self._sources = ()


def is_on_gpu(sources: Sequence[torch.Tensor]) -> bool:
    """Whether any of these tensors is."""
    return torch.cuda.is_initialized() and any(source.is_cuda for source in sources)  # type: ignore[no-untyped-call]


def begin_copy(places: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> PendingCopy:
    """Begins to copy each source into its place and returns at once; those on the CPU are copied before it returns."""
    if not is_on_gpu(sources):
        copy_all(places, sources)
        return PendingCopy()
    pairs = list(zip(places, sources, strict=True))
    on_cpu = [(place, source) for place, source in pairs if not source.is_cuda]
    copy_all([place for place, _ in on_cpu], [source for _, source in on_cpu])
    on_gpu = [(place, source) for place, source in pairs if source.is_cuda]
    events = {
        device: _copy_from(device, [pair for pair in on_gpu if pair[1].device == device])
        for device in {source.device for _, source in on_gpu}
    }
    return PendingCopy(events, [source for _, source in on_gpu])


def copy_all(places: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies each source into its place; many small tensors cost half of what a loop of copies would."""
    with torch.no_grad():
        try:
            is_copied = copy_each(places, sources)
        except (RuntimeError, NotImplementedError):  # dtypes without a kernel, such as int4
            is_copied = False
        if not is_copied:
            for place, source in zip(places, sources, strict=True):
                copyable(place).copy_(copyable(source))


def _copy_from(device: torch.device, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.cuda.Event:
    stream = _side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # behind the step that made these values
    with torch.no_grad(), torch.cuda.stream(stream):
        for place, source in pairs:
            copyable(place).copy_(copyable(source), non_blocking=True)
            source.record_stream(stream)  # its memory is not given to another tensor before the copy has read it
    ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    ended.record(stream)
    return ended


_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One per device and process: copies of two saves must not fight for the same bus."""
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _STREAMS[device]
