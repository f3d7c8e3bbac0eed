"""How the ranks agree that a call is done everywhere, has failed somewhere, or is not the same call on all of them.

A round is one maximum of four integers. It is begun in one poll and read in the next one, so that a poll
waits for nobody who is in step; and every rank begins and reads it in the same calls, so that it may share a group with
the collectives of training.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import torch.distributed as dist

from torchelastic.checkpoint.compat.nvrx.async_ckpt.failed_call import AsyncCheckpointError, describe, failed_call
from torchelastic.group.messages import LaggedMax, all_gather_texts
from torchelastic.group.watched_group import RanksMissingError, WatchedGroup
from torchelastic.text import describe_calls

#: As torch waits for a gloo collective if nobody says otherwise.
DEFAULT_TIMEOUT_S = 1800.0
_MOST_BYTES = 4096


@dataclass(frozen=True)
class CallVerdict:
    """What one round has found.

    Attributes:
        is_in_step: whether all ranks spoke of the same call; nothing else counts if they did not.
        is_done: whether the work of all ranks is done.
        failing_rank: the lowest rank of the group whose work failed.
    """

    is_in_step: bool
    is_done: bool
    failing_rank: int | None


def encode(call_idx: int, work: Future[float], rank: int, world_size: int) -> list[int]:
    """What one rank puts into a round: is its work going on, who failed, and its index both ways."""
    is_running = not work.done()
    failing = 0 if is_running or failure_of(work) is None else world_size - rank
    return [int(is_running), failing, call_idx, -call_idx]


def decode(maximum: Sequence[float], world_size: int) -> CallVerdict:
    """What the maximum over all ranks says."""
    running, failing, highest, minus_lowest = maximum
    return CallVerdict(
        is_in_step=highest == -minus_lowest,
        is_done=not running and not failing,
        failing_rank=world_size - int(failing) if failing else None,
    )


def group_in_use(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group whose ranks have to agree: the given one, else the default one; None if this rank acts alone."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    group = process_group if process_group is not None else dist.group.WORLD
    return group if group is not None and dist.get_world_size(group) > 1 else None


class CallAgreement:
    """The rounds of one queue. Used by one thread at a time, by all ranks of the group in step.

    Args:
        timeout_s: for how long to wait for ranks that do not come to a round, in seconds.
    """

    def __init__(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._round = 0
        self._more_s = 0.0
        self._begun: tuple[LaggedMax, int] | None = None
        self._verdict: CallVerdict | None = None

    def begin(self, group: dist.ProcessGroup, call_idx: int, work: Future[float], more_s: float = 0.0) -> None:
        """Begin a round about this call and its work here. Waits for nobody.

        Args:
            group: whose ranks do.
            call_idx: the call.
            work: of this rank.
            more_s: the ranks that do not come to this round are waited for this much longer, in seconds.
        """
        self._round += 1
        self._verdict = None
        self._more_s = more_s
        watched = self._watched(group, more_s)
        values = encode(call_idx, work, watched.rank, watched.world_size)
        self._begun = LaggedMax(watched, self._round, values), call_idx

    def read(self, group: dist.ProcessGroup, call_idx: int) -> CallVerdict | None:
        """What the last round has found; None if it was not about this call, not in this group, or was used up.

        Raises:
            AsyncCheckpointError: the ranks are not in step; it names those that are not, or that did not come in time.
            RuntimeError: the group is broken, for example because a rank died.
        """
        if self._begun is None or self._begun[0].group.group is not group or self._begun[1] != call_idx:
            self.clear()  # it tells nothing: the group was formed anew, or the call was finalised without asking
            return None
        if self._verdict is None:
            maximum, _ = self._begun
            try:
                with self._naming_the_missing(group, f"poll call {call_idx}", self._more_s):
                    verdict = decode(maximum.finish(), maximum.group.world_size)
                if not verdict.is_in_step:
                    self._raise_out_of_step(group, call_idx)
            except BaseException:
                self.clear()
                raise
            self._verdict = verdict
        return self._verdict

    def clear(self) -> None:
        """Forget the round that was begun, and what it has found."""
        self._begun = None
        self._verdict = None

    def failure(
        self, group: dist.ProcessGroup, failing_rank: int, call_idx: int, work: Future[float]
    ) -> AsyncCheckpointError:
        """The error for a call that failed somewhere; the failing rank tells the others why."""
        own = failure_of(work) if work.done() else None
        reasons = self._reports(group, describe(own) if own is not None else "", f"say why call {call_idx} failed")
        source = dist.get_global_rank(group, failing_rank)
        error = failed_call(call_idx, source, reasons[failing_rank])
        error.__cause__ = own
        return error

    def require_success(self, group: dist.ProcessGroup | None, call_idx: int, work: Future[float]) -> None:
        """Raise on every rank if this call's work failed on any rank, or if they are at different calls; waits."""
        if group is None:
            own = failure_of(work)
            if own is not None:
                raise failed_call(call_idx, own_rank(), describe(own)) from own
            return
        self.begin(group, call_idx, work)
        verdict = self.read(group, call_idx)
        self.clear()
        if verdict is not None and verdict.failing_rank is not None:
            raise self.failure(group, verdict.failing_rank, call_idx, work)

    def _watched(self, group: dist.ProcessGroup, more_s: float = 0.0) -> WatchedGroup:
        return WatchedGroup(group, self._timeout_s + more_s, "async_ckpt")  # not kept: it may be formed anew

    def _raise_out_of_step(self, group: dist.ProcessGroup, call_idx: int) -> NoReturn:
        reports = self._reports(group, f"call {call_idx}", "say where they are")
        where = describe_calls(reports, "is at", "are at")
        raise AsyncCheckpointError(
            f"the ranks finalise different checkpoint calls: {where}. Every rank has to schedule and finalise the same "
            "calls in the same order; nothing was finalised",
            call_idx=call_idx,
        )

    def _reports(self, group: dist.ProcessGroup, text: str, what: str) -> list[str]:
        """What each rank has to say; `what` says what for."""
        watched, numbers = self._watched(group), itertools.count()

        def wait(work: dist.Work | None) -> None:
            watched.wait(work, f"text-{self._round}-{next(numbers)}")

        with self._naming_the_missing(group, what):
            texts = all_gather_texts(group, text.encode()[:_MOST_BYTES], wait, watched.device)
        return [each.decode(errors="replace") for each in texts]

    @contextmanager
    def _naming_the_missing(self, group: dist.ProcessGroup, what: str, more_s: float = 0.0) -> Iterator[None]:
        try:
            yield
        except RanksMissingError as error:
            missing = RanksMissingError([dist.get_global_rank(group, rank) for rank in error.ranks])
            raise AsyncCheckpointError(
                f"{missing} within {self._timeout_s + more_s:g} s to {what}: every rank of the group has to call "
                "schedule_async_request, maybe_finalize_async_calls and close in step (or use no_dist=True)"
            ) from error


def own_rank() -> int:
    """This process's rank in the default group; 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def failure_of(ended: Future[float]) -> BaseException | None:
    """Why work that has ended has failed; None if it is done."""
    return CancelledError("it was aborted") if ended.cancelled() else ended.exception()
