"""Work that all ranks do at the same time, each its part, while they keep answering each other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch.distributed as dist

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.local.roll_call import RollCall, listed

Answer = TypeVar("Answer")


class Meetings:
    """A `RollCall` for calls of any thread (in the same order on all ranks), and for long work.

    Args:
        process_group: whose ranks meet; None: the default group.
        timeout_s: for how long a rank is waited for.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.roll = RollCall(process_group, timeout_s)
        self._lock = threading.Lock()

    def gather(self, call: str, payload: Any) -> list[Any]:
        """See `RollCall.gather`."""
        with self._lock:
            return self.roll.gather(call, payload)

    def together(self, call: str, work: Callable[[], Answer]) -> list[Answer]:
        """Does this rank's part of something, however long it takes, and returns what all parts returned. Collective.

        While a rank works, it still answers the others: only one that does not is missed.

        Args:
            call: see `gather`.
            work: JSON can hold what it returns; called on another thread.

        Raises:
            CheckpointError: another rank failed; names it. The own failure is raised as it is.
            OutOfStepError: see `gather`.
        """
        future = begun(work)
        while True:
            is_done = bool(wait([future], self.timeout_s / 4).done)
            failure = future.exception() if is_done else None
            told: dict[str, Any] = {"busy": True}
            if failure is not None:
                told = {"error": f"{type(failure).__name__}: {failure}"[:2000]}
            elif is_done:
                told = {"value": future.result()}
            answers = self.gather(call, told)
            if any("busy" in each for each in answers):
                continue
            if failure is not None:
                raise failure
            failed = {rank: each["error"] for rank, each in enumerate(answers) if "error" in each}
            if failed:
                raise CheckpointError(f"{call} failed on {listed(list(failed))}: {next(iter(failed.values()))}")
            return [each["value"] for each in answers]


def begun(work: Callable[[], Answer]) -> Future[Answer]:
    """Runs it on a thread of its own, which does not keep the program from ending."""
    future: Future[Answer] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name="replication-work", daemon=True).start()
    return future
