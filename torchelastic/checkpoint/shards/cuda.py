"""Copying a state from a GPU while training goes on: only what changes the state waits, and only for the copy.

A copy runs on a stream of its own, into pinned memory. It begins behind what the training stream was given before, and
the next forward and backward pass run beside it, since they change no parameter. What changes them is the optimizer's
step: the training thread waits for the end of the copy before that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from torchelastic.checkpoint.shards.stage import Stage, copy_all
from torchelastic.checkpoint.shards.tensors import copyable

NOTHING: Mapping[torch.device, torch.cuda.Event] = MappingProxyType({})


class Pending:
    """A copy that may still be running; made by `copy_beside`.

    Args:
        events: what marks the end of the copy on each GPU, by device; none if it is complete already.
        sources: the tensors that are read, kept alive until the copy is complete.
    """

    def __init__(
        self, events: Mapping[torch.device, torch.cuda.Event] = NOTHING, sources: Sequence[torch.Tensor] = ()
    ) -> None:
        self._events = dict(events)
        self._sources: tuple[torch.Tensor, ...] = tuple(sources)

    def done(self) -> bool:
        """Whether the copy is complete; never waits."""
        return all(event.query() for event in self._events.values())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Returns when all bytes are in the slot; on any thread, before the state changes or the slot is sealed.

        It waits for the copy alone, not for the device, and lets the interpreter lock go.
        """
        for event in self._events.values():
            event.synchronize()
        self._sources = ()


def copy_beside(stage: Stage, sources: Sequence[torch.Tensor]) -> Pending:
    """Begins to copy a state into a slot and returns at once; tensors on the CPU are copied before it returns.

    Call it on the training thread between two steps, and `Pending.wait` before anything changes the sources. Batch
    norm's running statistics change in the forward pass: wait before that, or accept those of the next step.

    Args:
        stage: of a slot with `pinned=True`; from other memory the copies would not run beside anything.
        sources: as `Stage.copy`.

    Raises:
        ValueError: a source is not what the entry says; nothing was copied.
    """
    stage.require_fitting(sources)
    stage.invalidate()
    pairs = list(zip(stage.places, sources, strict=True))
    on_cpu = [(place, source) for place, source in pairs if not source.is_cuda]
    copy_all([place for place, _ in on_cpu], [source for _, source in on_cpu])
    on_gpu = [(place, source) for place, source in pairs if source.is_cuda]
    events = {
        device: _copy_from(device, [pair for pair in on_gpu if pair[1].device == device])
        for device in {source.device for _, source in on_gpu}
    }
    return Pending(events, [source for _, source in on_gpu])


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
