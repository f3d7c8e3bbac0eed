"""What a worker process and its trainer say to each other, over a pair of connected sockets that only they have."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Literal

from torchelastic.checkpoint.async_ckpt.errors import WorkerTraceback
from torchelastic.checkpoint.async_ckpt.outcome import CallOutcome, describe

if TYPE_CHECKING:
    from torchelastic.checkpoint.async_ckpt.shipping import Parcel


@dataclass(frozen=True)
class Message:
    """From the worker.

    Attributes:
        kind: it is ready for work; it has run the call's `preload_fn`; the call has ended.
        call_idx: which call.
        reason: why the call failed, in one line; empty if it is done.
        traceback: where it failed.
        pickled_error: the exception; None if it cannot be pickled.
        duration_s: how long the work took.
    """

    kind: Literal["ready", "staged", "ended"]
    call_idx: int = 0
    reason: str = ""
    traceback: str = ""
    pickled_error: bytes | None = None
    duration_s: float = 0.0


def failure_message(call_idx: int, error: BaseException, duration_s: float) -> Message:
    """Tell that a call raised `error`."""
    try:
        pickled = pickle.dumps(error)
    except Exception:  # noqa: BLE001 - a user's exception fails in its own ways; the text is enough then
        pickled = None
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Message("ended", call_idx, describe(error), text, pickled, duration_s)


def outcome_of(message: Message) -> CallOutcome:
    """How the call ended that the message tells the end of."""
    if not message.reason:
        return CallOutcome(duration_s=message.duration_s)
    origin = WorkerTraceback(message.traceback)
    error: BaseException = origin
    if message.pickled_error is not None:
        try:
            error = pickle.loads(message.pickled_error)  # noqa: S301 - from our own worker
            error.__cause__ = origin
        except Exception:  # noqa: BLE001 - many exceptions can be pickled and not be read; the text says it all
            error = origin
    return CallOutcome(message.reason, error, message.duration_s)


def send_parcel(connection: Connection, parcel: Parcel, pid: int) -> None:
    """Send a request to the worker with this process id; blocks while it does not read."""
    memory = parcel.memory
    size_bytes = memory.size_bytes if memory is not None else 0
    connection.send_bytes(pickle.dumps((parcel.call_idx, parcel.pickled, parcel.places, size_bytes)))
    if memory is not None:
        reduction.send_handle(connection, memory.descriptor, pid)


def send_stop(connection: Connection) -> None:
    """Have the worker end after what it was sent."""
    connection.send_bytes(pickle.dumps(None))


def receive_parcel(connection: Connection) -> Parcel | None:
    """The next request; None: there are no more.

    Raises:
        EOFError, OSError: the trainer is gone.
    """
    from torchelastic.checkpoint.async_ckpt.memory import SharedMemory  # torch is loaded when it is needed
    from torchelastic.checkpoint.async_ckpt.shipping import Parcel

    content = pickle.loads(connection.recv_bytes())  # noqa: S301 - from the process that has started this one
    if content is None:
        return None
    call_idx, pickled, places, size_bytes = content
    memory = SharedMemory(reduction.recv_handle(connection), size_bytes) if size_bytes else None
    return Parcel(call_idx, pickled, places, memory)
