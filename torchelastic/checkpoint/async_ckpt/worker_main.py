"""The program of a worker process. It does what it is sent, one request after the other, and dies with its trainer."""

from __future__ import annotations

import os
import pickle
import select
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from torchelastic.checkpoint.async_ckpt.messages import Message, failure_message, receive_parcel
from torchelastic.checkpoint.async_ckpt.priority import lower_process_priority

if TYPE_CHECKING:
    from torchelastic.checkpoint.async_ckpt.shipping import Parcel


def work(connection: Connection, parent_pid: int, cpu_priority: int, io_priority: int | None) -> None:
    """Do what comes over the connection until there is no more; called on the main thread of a process of its own."""
    die_with_parent(parent_pid)
    # Ctrl-C reaches all processes of a terminal; whether the worker ends then is for the trainer to decide
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    lower_process_priority(cpu_priority, io_priority)
    _send(connection, Message("ready"))
    while (parcel := _next(connection)) is not None:
        _serve(connection, parcel)
        del parcel  # its memory


def die_with_parent(parent_pid: int) -> None:
    """Have this process killed as soon as the process that started it has ended, however it went.

    Not by PR_SET_PDEATHSIG, which means the parent's thread: requests may be scheduled from one that ends before.
    """
    if hasattr(os, "pidfd_open"):
        descriptor = os.pidfd_open(parent_pid)  # raises if there is no such process any more, which ends this one
        if os.getppid() != parent_pid:
            _die()
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        wait: Callable[[], object] = ended.poll
    else:  # macOS, or an interpreter built without it
        parent = parent_process()
        wait = parent.join if parent is not None else _die
    threading.Thread(target=_die_after, args=(wait,), name="lifeline", daemon=True).start()


def _die_after(wait: Callable[[], object]) -> None:
    wait()
    _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _next(connection: Connection) -> Parcel | None:
    try:
        return receive_parcel(connection)
    except (EOFError, OSError):
        return None  # the trainer has closed its end


def _serve(connection: Connection, parcel: Parcel) -> None:
    from torchelastic.checkpoint.async_ckpt.shipping import unpack

    call_idx = parcel.call_idx
    start_s = time.monotonic()
    try:
        request = unpack(parcel)
        if request.preload_fn is not None:
            request = request._replace(async_fn_args=request.staged_args(), preload_fn=None)
            _send(connection, Message("staged", call_idx))
        start_s = time.monotonic()
        request.work()
        answer = Message("ended", call_idx, duration_s=time.monotonic() - start_s)
    except Exception as error:  # noqa: BLE001 - whatever it is, the trainer has to hear of it
        answer = failure_message(call_idx, error, time.monotonic() - start_s)
    request = None  # type: ignore[assignment]  # the memory is the trainer's again once it has the answer
    _send(connection, answer)


def _send(connection: Connection, message: Message) -> None:
    try:
        connection.send_bytes(pickle.dumps(message))
    except OSError:
        pass  # nobody listens any more: the trainer has closed the queue, or ends this process soon
