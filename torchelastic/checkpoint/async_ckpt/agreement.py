"""How the ranks agree that a call is done everywhere, has failed somewhere, or is not the same call on all of them.

A round is one all-reduce of four integers (maximum). It is begun in one poll and read in the next one, so that a poll
waits for nobody who is in step; and every rank begins and reads it in the same calls, so that it may share a group with
the collectives of training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torchelastic.checkpoint.async_ckpt.errors import AsyncCheckpointError, failed_call
from torchelastic.checkpoint.async_ckpt.outcome import Outcome

#: As torch waits for a gloo collective if nobody says otherwise.
DEFAULT_TIMEOUT_S = 1800.0
#: A rank that waits for longer than this says so in the store, for those who ask who is missing.
_MARK_AFTER_S = 1.0
_POLL_S = 0.0005
_REASON_BYTES = 4096
_NAMED_RANKS = 8


@dataclass(frozen=True)
class Verdict:
    """What one round has found.

    Attributes:
        is_in_step: whether all ranks spoke of the same call; nothing else counts if they did not.
        is_done: whether the work of all ranks is done.
        failing_rank: the lowest rank of the group whose work failed.
    """

    is_in_step: bool
    is_done: bool
    failing_rank: int | None


def encode(call_idx: int, outcome: Outcome | None, rank: int, world_size: int) -> list[int]:
    """What one rank puts into a round: is it running, who failed, and its index both ways; `None` is still running."""
    failing = world_size - rank if outcome is not None and outcome.has_failed else 0
    return [int(outcome is None), failing, call_idx, -call_idx]


def decode(maximum: Sequence[int], world_size: int) -> Verdict:
    """What the maximum over all ranks says."""
    running, failing, highest, minus_lowest = maximum
    return Verdict(
        is_in_step=highest == -minus_lowest,
        is_done=not running and not failing,
        failing_rank=world_size - failing if failing else None,
    )


def describe_out_of_step(indexes: Sequence[int]) -> str:
    """Say which ranks are at which call, the fewest first.

    >>> describe_out_of_step([3, 3, 2, 3])
    'rank 2 is at call 2; ranks 0, 1, 3 are at call 3'
    """
    ranks_at: dict[int, list[int]] = {}
    for rank, index in enumerate(indexes):
        ranks_at.setdefault(index, []).append(rank)
    parts = []
    for index, ranks in sorted(ranks_at.items(), key=lambda item: (len(item[1]), item[0])):
        names = ", ".join(map(str, ranks[:_NAMED_RANKS])) + (", .." if len(ranks) > _NAMED_RANKS else "")
        parts.append(f"rank {names} is at call {index}" if len(ranks) == 1 else f"ranks {names} are at call {index}")
    return "; ".join(parts)


def group_in_use(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group whose ranks have to agree: the given one, else the default one; None if this rank acts alone."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    group = process_group if process_group is not None else dist.group.WORLD
    return group if group is not None and dist.get_world_size(group) > 1 else None


class Agreement:
    """The rounds of one queue. Used by one thread at a time, by all ranks of the group in step.

    Args:
        timeout_s: for how long to wait for ranks that do not come to a round, in seconds.
        clock: monotonic seconds.
        sleep: blocks for so many seconds.
    """

    def __init__(
        self,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._sleep = sleep
        self._round = 0
        self._begun: tuple[dist.ProcessGroup, int, dist.Work, torch.Tensor] | None = None
        self._verdict: Verdict | None = None

    def begin(self, group: dist.ProcessGroup, call_idx: int, outcome: Outcome | None) -> None:
        """Begin a round about this call; `outcome` is None while its work goes on here. Waits for nobody."""
        self._round += 1
        values = encode(call_idx, outcome, dist.get_rank(group), dist.get_world_size(group))
        tensor = torch.tensor(values, dtype=torch.int64, device=_device(group))
        self._verdict = None
        self._begun = group, call_idx, _started(dist.all_reduce(tensor, dist.ReduceOp.MAX, group, True)), tensor

    def read(self, group: dist.ProcessGroup, call_idx: int) -> Verdict | None:
        """What the last round has found; None if it was not about this call, not in this group, or was used up.

        Raises:
            AsyncCheckpointError: the ranks are not in step; it names those that are not, or that did not come in time.
            RuntimeError: the group is broken, for example because a rank died.
        """
        if self._begun is None or self._begun[0] is not group or self._begun[1] != call_idx:
            self.clear()  # it tells nothing: the group was formed anew, or the call was finalised without asking
            return None
        if self._verdict is None:
            _, _, work, tensor = self._begun
            try:
                self._wait(group, work, f"poll call {call_idx}")
                verdict = decode(tensor.tolist(), dist.get_world_size(group))
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
        self, group: dist.ProcessGroup, verdict: Verdict, call_idx: int, outcome: Outcome | None, was_told: bool = False
    ) -> AsyncCheckpointError:
        """The error for a call that failed somewhere; the failing rank tells the others why (one broadcast)."""
        failing = verdict.failing_rank or 0
        source = dist.get_global_rank(group, failing)
        is_source = dist.get_rank(group) == failing
        own = outcome.reason if outcome is not None else ""
        tensor = _text_tensor(own if is_source else "", _device(group))
        self._wait(group, _started(dist.broadcast(tensor, source, group, True)), f"say why call {call_idx} failed")
        error = failed_call(call_idx, source, _text_of(tensor), was_told=was_told)
        error.__cause__ = outcome.error if outcome is not None else None
        return error

    def require_success(self, group: dist.ProcessGroup | None, call_idx: int, outcome: Outcome) -> None:
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

    def _raise_out_of_step(self, group: dist.ProcessGroup, call_idx: int) -> None:
        own = torch.tensor([call_idx], dtype=torch.int64, device=_device(group))
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        self._wait(group, _started(dist.all_gather(gathered, own, group, True)), "say which call they are at")
        where = describe_out_of_step([int(index.item()) for index in gathered])
        raise AsyncCheckpointError(
            f"the ranks finalise different checkpoint calls: {where}. Every rank has to schedule and finalise the same "
            "calls in the same order; nothing was finalised",
            call_idx=call_idx,
        )

    def _wait(self, group: dist.ProcessGroup, work: dist.Work, what: str) -> None:
        """Wait until a collective is over, but no longer than `timeout_s`; then name the ranks that did not come."""
        start_s = self._clock()
        has_marked = False
        while not work.is_completed():
            waited_s = self._clock() - start_s
            if not has_marked and waited_s >= min(_MARK_AFTER_S, self._timeout_s / 2):
                has_marked = True
                _mark_as_waiting(group, self._round)
            if waited_s >= self._timeout_s:
                missing = _missing(group, self._round)
                raise AsyncCheckpointError(
                    f"{missing} did not come within {self._timeout_s:g} s to {what}: every rank of the group has to "
                    "call schedule_async_request, maybe_finalize_async_calls and close in step (or use no_dist=True)"
                )
            self._sleep(_POLL_S)
        work.wait()  # raises what went wrong


def own_rank() -> int:
    """This process's rank in the default group; 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _device(group: dist.ProcessGroup) -> torch.device:
    # such as "cpu:gloo,cuda:nccl"; nccl alone reduces no CPU tensors
    kinds = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])  # without an index: this process's current device


def _started(work: dist.Work | None) -> dist.Work:
    if work is None:  # torch returns None to ranks outside the group
        raise ValueError("this rank is not a member of the queue's process_group: give it a group that it belongs to")
    return work


def _text_tensor(text: str, device: torch.device) -> torch.Tensor:
    encoded = text.encode()[:_REASON_BYTES]
    return torch.tensor(list(encoded.ljust(_REASON_BYTES, b"\0")), dtype=torch.uint8, device=device)


def _text_of(tensor: torch.Tensor) -> str:
    return bytes(tensor.tolist()).rstrip(b"\0").decode(errors="replace")


def _mark(group: dist.ProcessGroup, round_number: int, rank: int) -> str:
    return f"torchelastic.async_ckpt/{group.group_name}/{round_number}/{rank}"


def _mark_as_waiting(group: dist.ProcessGroup, round_number: int) -> None:
    try:
        c10d._get_default_store().set(_mark(group, round_number, dist.get_rank(group)), "1")
    except (RuntimeError, ValueError):
        pass  # it would only have made an error's message better


def _missing(group: dist.ProcessGroup, round_number: int) -> str:
    ranks = range(dist.get_world_size(group))
    try:
        store = c10d._get_default_store()
        missing = [rank for rank in ranks if not store.check([_mark(group, round_number, rank)])]
    except (RuntimeError, ValueError):
        missing = []
    if not missing:
        return "the other ranks"
    names = ", ".join(str(dist.get_global_rank(group, rank)) for rank in missing[:_NAMED_RANKS])
    return f"rank{'s' if len(missing) > 1 else ''} {names}" + (", .." if len(missing) > _NAMED_RANKS else "")
