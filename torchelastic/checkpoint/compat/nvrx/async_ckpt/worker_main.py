"""The program of a worker process. It does what it is sent, one request after the other, and dies with its trainer.

It answers in pairs: ("ready", None) once all is imported that it needs for any request; of each request
("staged", None) when its `preload_fn` is through, and ("done", seconds) or ("failed", exception) at its end.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]  # typeshed does not know it
from typing import TYPE_CHECKING, Any

from torchelastic.checkpoint.compat.nvrx.async_ckpt.executors import lower_priority
from torchelastic.checkpoint.compat.nvrx.async_ckpt.failed_call import describe

if TYPE_CHECKING:
    from torchelastic.checkpoint.compat.nvrx.async_ckpt.shipping import Parcel


def work(connection: Connection, parent_pid: int, cpu_priority: int, io_priority: int | None) -> None:
    """Do what comes over the connection until there is no more; called on the main thread of a process of its own."""
    die_with_parent(parent_pid)
    # Ctrl-C reaches all processes of a terminal; whether the worker ends then is for the trainer to decide
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    from torchelastic.checkpoint.compat.nvrx.async_ckpt.shipping import (
        Parcel,  # torch: if the trainer ends meanwhile, so does this
    )

    # not before: on a host whose processors are all taken, the import would take a minute instead of seconds
    lower_priority(cpu_priority, io_priority)
    _answer(connection, "ready")
    with suppress(EOFError, OSError):  # the trainer has closed its end
        while (sent := connection.recv()) is not None:
            _serve(connection, [Parcel.received(connection, *sent)])


def die_with_parent(parent_pid: int) -> None:
    """Have this process killed as soon as the process that started it has ended, however it went.

    Not by PR_SET_PDEATHSIG, which means the parent's thread: requests may be scheduled from one that ends before. And
    not by the pipe of `multiprocessing.parent_process()`, which other children of the parent may hold open.
    """
    try:
        descriptor = os.pidfd_open(parent_pid)
    except ProcessLookupError:  # it has ended before this one was ready
        raise SystemExit(1) from None
    if os.getppid() != parent_pid:
        _die()
    ended = select.poll()
    ended.register(descriptor, select.POLLIN)

    def wait() -> None:
        ended.poll()
        _die()

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _serve(connection: Connection, parcels: list[Parcel]) -> None:
    """Takes the only parcel out of the list, so that its memory is freed before the trainer learns of the end."""
    from torchelastic.checkpoint.compat.nvrx.async_ckpt.shipping import unpack

    try:
        request = unpack(parcels.pop())
        if request.preload_fn is not None:
            request = request._replace(async_fn_args=request.staged_args(), preload_fn=None)
            _answer(connection, "staged")
        answer: tuple[str, Any] = "done", request.work()
    except Exception as error:  # noqa: BLE001 - whatever it is, the trainer has to know of it
        answer = "failed", _portable(error)
    request = None  # type: ignore[assignment]  # the memory is the trainer's again once it has the answer
    _answer(connection, *answer)


def _portable(error: Exception) -> ExceptionWithTraceback:
    """An exception that arrives with its traceback; as text, if it cannot be pickled, or not be read again."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - what was written here
        sent = error
    except Exception:  # noqa: BLE001 - a user's exception fails in its own ways
        sent = RuntimeError(describe(error))
    return ExceptionWithTraceback(sent, error.__traceback__)


def _answer(connection: Connection, kind: str, content: Any = None) -> None:
    with suppress(OSError):  # nobody listens any more: the trainer has closed the queue, or ends this process soon
        connection.send((kind, content))
