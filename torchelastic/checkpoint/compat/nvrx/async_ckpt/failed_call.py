"""How a failed asynchronous call is reported."""

from __future__ import annotations

from traceback import TracebackException

from torchelastic.checkpoint.errors import CheckpointError


class AsyncCheckpointError(CheckpointError):
    """An asynchronous call failed, on this rank or on another one; its finalize functions ran on no rank.

    Raised once per failed call and rank. Where the work failed on this rank, `__cause__` is the original exception; one
    from a worker process has in turn a `multiprocessing.pool.RemoteTraceback` as its cause.

    Attributes:
        call_idx: the index that `schedule_async_request` gave the call; None if the error is of no single call.
        rank: the (lowest) rank whose work failed; None if it is not about the work.
        finalized_calls: the calls that the same `maybe_finalize_async_calls` had finalised before it raised.
    """

    def __init__(self, message: str, *, call_idx: int | None = None, rank: int | None = None) -> None:
        super().__init__(message)
        self.call_idx = call_idx
        self.rank = rank
        self.finalized_calls: tuple[int, ...] = ()


def failed_call(call_idx: int, rank: int, reason: str) -> AsyncCheckpointError:
    """The error that every rank raises for a call that failed somewhere."""
    return AsyncCheckpointError(
        f"asynchronous checkpoint call {call_idx} failed on rank {rank}: {reason}. It was finalised on no rank; the "
        "checkpoints before it are untouched, and the queue can be used on",
        call_idx=call_idx,
        rank=rank,
    )


def describe(error: BaseException) -> str:
    """The type and the text of an exception, in one line that can be sent, whatever the exception is."""
    said = str(TracebackException(type(error), error, None))  # also where its own `__str__` raises
    text = " ".join(said.encode(errors="backslashreplace").decode().split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
