"""How the ranks agree that a call is done everywhere, has failed somewhere, or is not the same call on all of them.

A round is one maximum of four integers. It is begun in one poll and read in the next one, so that a poll
waits for nobody who is in step; and every rank begins and reads it in the same calls, so that it may share a group with
the collectives of training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchelastic.checkpoint.async_ckpt.errors import AsyncCheckpointError, failed_call
from torchelastic.checkpoint.async_ckpt.outcome import CallOutcome
from torchelastic.group.lagged_max import LaggedMax
from torchelastic.group.naming import describe_calls
from torchelastic.group.watched_group import RanksMissingError, WatchedGroup

#: As torch waits for a gloo collective if nobody says otherwise.
DEFAULT_TIMEOUT_S = 1800.0
_REASON_BYTES = 4096


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


def encode(call_idx: int, outcome: CallOutcome | None, rank: int, world_size: int) -> list[int]:
    """What one rank puts into a round: is it running, who failed, and its index both ways; `None` is still running."""
    failing = world_size - rank if outcome is not None and outcome.has_failed else 0
    return [int(outcome is None), failing, call_idx, -call_idx]


def decode(maximum: Sequence[float], world_size: int) -> CallVerdict:
    """What the maximum over all ranks says."""
    running, failing, highest, minus_lowest = maximum
    return CallVerdict(
        is_in_step=highest == -minus_lowest,
        is_done=not running and not failing,
        failing_rank=world_size - int(failing) if failing else None,
    )


def describe_out_of_step(indexes: Sequence[int]) -> str:
    """Say which ranks are at which call, the fewest first.

    >>> describe_out_of_step([3, 3, 2, 3])
    'rank 2 is at call 2; ranks 0, 1, 3 are at call 3'
    """
    return describe_calls([f"call {index}" for index in indexes], "is at", "are at")


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
        clock: monotonic seconds.
    """

    def __init__(self, timeout_s: float = DEFAULT_TIMEOUT_S, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._round = 0
        self._begun: tuple[LaggedMax, int] | None = None
        self._verdict: CallVerdict | None = None

    def begin(self, group: dist.ProcessGroup, call_idx: int, outcome: CallOutcome | None) -> None:
        """Begin a round about this call; `outcome` is None while its work goes on here. Waits for nobody."""
        self._round += 1
        self._verdict = None
        watched = self._watched(group)
        values = encode(call_idx, outcome, watched.rank, watched.world_size)
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
                with self._naming_the_missing(group, f"poll call {call_idx}"):
                    verdict = decode(maximum.finish(), maximum.group.world_size)
                if not verdict.is_in_step:
                    self._raise_out_of_step(maximum.group, call_idx)
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
        self,
        group: dist.ProcessGroup,
        verdict: CallVerdict,
        call_idx: int,
        outcome: CallOutcome | None,
        was_told: bool = False,
    ) -> AsyncCheckpointError:
        """The error for a call that failed somewhere; the failing rank tells the others why (one broadcast)."""
        failing = verdict.failing_rank or 0
        source = dist.get_global_rank(group, failing)
        watched = self._watched(group)
        own = outcome.reason if outcome is not None and watched.rank == failing else ""
        tensor = _text_tensor(own, watched.device)
        with self._naming_the_missing(group, f"say why call {call_idx} failed"):
            watched.wait(dist.broadcast(tensor, source, group, async_op=True), f"reason-{self._round}")
        error = failed_call(call_idx, source, _text_of(tensor), was_told=was_told)
        error.__cause__ = outcome.error if outcome is not None else None
        return error

    def require_success(self, group: dist.ProcessGroup | None, call_idx: int, outcome: CallOutcome) -> None:
        """Raise on every rank if this call's work failed on any rank, or if they are at different calls; waits."""
        if group is None:
            if outcome.has_failed:
                raise failed_call(call_idx, own_rank(), outcome.reason) from outcome.error
            return
        self.begin(group, call_idx, outcome)
        verdict = self.read(group, call_idx)
        self.clear()
        if verdict is not None and verdict.failing_rank is not None:
            raise self.failure(group, verdict, call_idx, outcome)

    def _watched(self, group: dist.ProcessGroup) -> WatchedGroup:
        return WatchedGroup(group, self._timeout_s, "async_ckpt", clock=self._clock)  # not kept: it may be formed anew

    def _raise_out_of_step(self, group: WatchedGroup, call_idx: int) -> None:
        own = torch.tensor([call_idx], dtype=torch.int64, device=group.device)
        gathered = [torch.empty_like(own) for _ in range(group.world_size)]
        with self._naming_the_missing(group.group, "say which call they are at"):
            group.wait(dist.all_gather(gathered, own, group.group, async_op=True), f"calls-{self._round}")
        where = describe_out_of_step([int(index.item()) for index in gathered])
        raise AsyncCheckpointError(
            f"the ranks finalise different checkpoint calls: {where}. Every rank has to schedule and finalise the same "
            "calls in the same order; nothing was finalised",
            call_idx=call_idx,
        )

    @contextmanager
    def _naming_the_missing(self, group: dist.ProcessGroup, what: str) -> Iterator[None]:
        try:
            yield
        except RanksMissingError as error:
            missing = RanksMissingError([dist.get_global_rank(group, rank) for rank in error.ranks])
            raise AsyncCheckpointError(
                f"{missing} within {self._timeout_s:g} s to {what}: every rank of the group has to call "
                "schedule_async_request, maybe_finalize_async_calls and close in step (or use no_dist=True)"
            ) from error


def own_rank() -> int:
    """This process's rank in the default group; 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _text_tensor(text: str, device: torch.device) -> torch.Tensor:
    encoded = text.encode()[:_REASON_BYTES]
    return torch.tensor(list(encoded.ljust(_REASON_BYTES, b"\0")), dtype=torch.uint8, device=device)


def _text_of(tensor: torch.Tensor) -> str:
    return bytes(tensor.tolist()).rstrip(b"\0").decode(errors="replace")
