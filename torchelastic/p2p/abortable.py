"""A gloo process group whose waits can be given up: `abort` frees whoever waits in it, whatever its messages do.

gloo cannot do that. When a connection fails it wakes those whose message was still queued, but not the operation that
was half sent or half received at that moment (gloo/transport/tcp/pair.cc, `Pair::signalException`, as of torch 2.13):
its waiter stays for the time-out of the collective. So nobody waits in there alone:

* A collective runs on a thread of gloo's; its waiter waits for that thread in slices and checks between two of them
  whether the group was aborted. A slice that times out harms nothing.
* A message from rank to rank (send, recv) is waited for in gloo itself, where a time-out would end the whole group. A
  small one is, on the calling thread: it is taken or given by the kernel in one piece. A large one is waited for on a
  thread of the group's own.
* A reduce-scatter of torch's is an all-reduce of a copy, but its wait has no slices and ends with gloo's. So ours makes
  that all-reduce itself, a collective like the others, and each rank takes its part of the result.
* A future of a collective (DDP's own reduction of gradients waits for those, in C++) is one of ours, which the end of
  the operation or the abort completes, whichever comes first.

`abort` shuts no connection: see `torchelastic.p2p.groups`, which also cuts those, so that the peers are freed too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from torchelastic.p2p.waiter import Waiter
from torchelastic.torch_internals.process_groups import (
    ALL_GATHER_OF_TENSOR,
    REDUCE_SCATTER_OF_TENSOR,
    GroupAround,
    WorkAround,
)

#: An aborted group frees whoever waits within this time. A slice that times out costs 0.2 ms of processor time.
SLICE = timedelta(milliseconds=20)
#: A message of at most this many bytes fits the smallest send buffer of a Linux socket as a whole.
SMALL_MESSAGE_BYTES = 16 * 2**10
#: So many operations are remembered before those are looked for that have ended without anybody having waited for them.
FORGET_AFTER = 32

_COLLECTIVES = (
    ALL_GATHER_OF_TENSOR, "all_gather_single", "all_gather_single_coalesced", "all_to_all_single",
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced",
    "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "reduce", "scatter",
)  # fmt: skip
_REDUCE_SCATTERS = (
    REDUCE_SCATTER_OF_TENSOR, "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
)  # fmt: skip
_MESSAGES = ("recv", "recv_anysource", "send")
#: What a group does by these names, in one version of torch or another.
OPERATIONS = (*_COLLECTIVES, *_REDUCE_SCATTERS, *_MESSAGES)


class GroupAbortedError(RuntimeError):
    """The group was given up while, or before, this operation was under way."""


class AbortableGroup(GroupAround):
    """A group of torch's, around another one that does the work; torch's code is given this one.

    Constructed as `torch.distributed.ProcessGroup` is, by torch itself (see `torchelastic.p2p.groups`). All methods but
    `abort`, `is_idle` and `held_bytes` are for the threads that use the group.

    Args:
        store: of the group alone.
        rank: of this process in the group.
        size: of the group.

    Attributes:
        has_failed: whether somebody was told that an operation has failed, or was given up.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        super().__init__(store, rank, size)
        self._lock = threading.Lock()
        self._aborted = threading.Event()
        #: this process has gone on to another group
        self._is_left = False
        self._operations: dict[int, tuple[dist.Work, object]] = {}
        self._forget_at = FORGET_AFTER
        self._futures: set[torch.futures.Future[Any]] = set()
        # one for each thread of the user's that waits for a message at the same time
        self._waiters: list[Waiter] = []
        self._free_waiters: list[Waiter] = []
        self._has_large_messages = False
        self.has_failed = False

    @property
    def is_aborted(self) -> bool:
        """Whether the group was given up."""
        return self._aborted.is_set()

    def abort(self) -> None:
        """Free every thread that waits for an operation of this group, within `SLICE`. From any thread; idempotent.

        What waits raises GroupAbortedError, unless the operation has failed, or succeeded, by itself. No further
        operation begins: waiting for one raises, as for one that has failed. Those that are under way go on in the
        background until gloo ends them: see `is_idle`.
        """
        if self._aborted.is_set():
            return
        self._aborted.set()
        with self._lock:
            futures, self._futures = self._futures, set()
            waiters = list(self._waiters)
        for future in futures:
            future.set_result(GroupAbortedError(_ABORTED))
        for waiter in waiters:
            waiter.wake()

    def is_idle(self) -> bool:
        """Whether no operation is under way any more, so that nothing stays for whoever releases the group."""
        with self._lock:
            self._forget_ended()
            return not self._operations and not any(waiter.is_busy for waiter in self._waiters)

    def held_bytes(self) -> int:
        """How large the tensors are that operations under way hold."""
        with self._lock:
            held = [arguments for _, arguments in self._operations.values()]
        tensors = {tensor.data_ptr(): tensor for arguments in held for tensor in _tensors_in(arguments)}
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())

    def shutdown(self) -> None:
        """As torch's; an aborted group's connections are cut already, and must not be waited for."""
        self._is_left = True
        for waiter in self._waiters:
            waiter.end()
        if not self.is_aborted:
            self._inner.shutdown()

    # --- for torch's code: what it asks of a group comes from the inner one -------------------------------------------

    def get_group_store(self) -> Store:
        """As torch's."""
        return self._inner.get_group_store()

    def split_group(self, *args: Any, **kwargs: Any) -> dist.ProcessGroup | None:
        """As torch's; what it returns is a group of torch's own."""
        return self._inner.split_group(*args, **kwargs)

    def merge_remote_group(self, *args: Any, **kwargs: Any) -> dist.ProcessGroup:
        """As torch's; what it returns is a group of torch's own."""
        return self._inner.merge_remote_group(*args, **kwargs)

    def set_timeout(self, timeout: timedelta) -> None:
        """As torch's."""
        self._inner.set_timeout(timeout)

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        """As torch's, which waits for messages from all ranks."""
        self._raise_if_aborted()
        inner: Any = self._inner  # torch's types lack it
        self._on_waiter(lambda: inner.monitored_barrier(*args, **kwargs))

    # --- operations ---------------------------------------------------------------------------------------------------

    def _begin(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbortableWork:
        if self.is_aborted:
            return NeverBegun(self)
        inner = getattr(self._inner, name)(*args, **kwargs)
        with self._lock:
            if len(self._operations) >= self._forget_at:
                self._forget_ended()
                self._forget_at = max(FORGET_AFTER, 2 * len(self._operations))
            self._operations[id(inner)] = inner, args
        return AbortableWork(self, inner)

    def _begin_reduce_scatter(self, _name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbortableWork:
        outputs, inputs, *options = *args, *kwargs.values()
        given: Any = options[0] if options else dist.ReduceScatterOptions()
        of_each = dist.AllreduceOptions()
        of_each.reduceOp, of_each.timeout = given.reduceOp, given.timeout
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        parts = [one.chunk(self.size()) if isinstance(one, torch.Tensor) else one for one in inputs]
        copies = [torch.cat([part.reshape(-1) for part in of_ranks]) for of_ranks in parts]
        own = [
            torch.split(copy, [part.numel() for part in of_ranks])[self.rank()].view_as(output)
            for output, of_ranks, copy in zip(outputs, parts, copies, strict=True)
        ]
        return AbortableReduceScatter(
            self, [self._begin("allreduce", ([copy], of_each), {}) for copy in copies], own, outputs
        )

    def _begin_message(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbortableWork:
        if self.is_aborted:
            return NeverBegun(self)
        # from then on a small message too: it may have to wait behind a large one
        self._has_large_messages |= any(tensor.nbytes > SMALL_MESSAGE_BYTES for tensor in _tensors_in(args))
        return AbortableMessage(self, getattr(self._inner, name)(*args, **kwargs))

    def _forget(self, inner: dist.Work) -> None:
        with self._lock:
            self._operations.pop(id(inner), None)

    def _forget_ended(self) -> None:
        ended = [key for key, (inner, _) in self._operations.items() if inner.is_completed()]
        for key in ended:
            del self._operations[key]

    def _raise_if_aborted(self) -> None:
        if self._aborted.is_set():
            self.has_failed = True
            raise self._error()

    def _error(self) -> GroupAbortedError:
        return GroupAbortedError(_LEFT if self._is_left else _ABORTED)

    def _noting_failure(self, wait: Callable[[], Any]) -> Any:
        try:
            return wait()
        except RuntimeError:
            self.has_failed = True
            raise

    def _future_of(self, inner: dist.Work) -> torch.futures.Future[Any]:
        """A future that the end of an operation completes, or the abort of the group."""
        first: torch.futures.Future[Any] = torch.futures.Future()
        # errors reach waiters in C++ only as those of a callback: an exception that Python sets is a value there
        result = first.then(lambda future: self._noting_failure(lambda: _value_or_raise(future)))
        with self._lock:
            is_aborted = self._aborted.is_set()
            if not is_aborted:
                self._futures.add(first)
        if is_aborted:
            first.set_result(self._error())
            return result

        def ended(future: torch.futures.Future[Any]) -> None:
            with self._lock:
                is_first = first in self._futures
                self._futures.discard(first)
            self._forget(inner)
            if is_first:
                first.set_result(_outcome(future))

        inner.get_future().add_done_callback(ended)
        return result

    def _on_waiter(self, wait: Callable[[], object]) -> None:
        """Have `wait` called on a thread of the group's own, and wait for it or for the abort."""
        with self._lock:
            if not self._free_waiters:
                self._free_waiters.append(Waiter())
                self._waiters.append(self._free_waiters[-1])
            waiter = self._free_waiters.pop()
        try:
            waiter.wait(wait, self._raise_if_aborted)
        finally:
            if not waiter.is_busy:
                self._free_waiters.append(waiter)


class AbortableWork(WorkAround):
    """A collective of an `AbortableGroup`. Everything but waiting is the inner operation's."""

    def __init__(self, group: AbortableGroup, inner: dist.Work) -> None:
        super().__init__(inner)
        self._group = group
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end of the operation. Raises RuntimeError if it failed, GroupAbortedError if it was given up.

        Args:
            timeout: raise RuntimeError after this time, and leave the operation as it is; 0: that of the group.
        """
        inner, left = self._inner, timeout or None
        while True:
            try:
                inner.wait(SLICE if left is None else min(SLICE, left))
            except RuntimeError:
                if inner.is_completed():  # failed, or ended just after the slice
                    self._group._forget(inner)
                    return bool(self._group._noting_failure(inner.wait))
                self._group._raise_if_aborted()
                if left is not None:
                    left -= SLICE
                    if left <= timedelta(0):
                        raise
            else:
                self._group._forget(inner)
                return True

    def is_completed(self) -> bool:
        """Whether `wait` returns, or raises, without waiting."""
        return self._inner.is_completed() or self._group.is_aborted

    def is_success(self) -> bool:
        """Whether the operation has succeeded."""
        return self._inner.is_completed() and self._inner.is_success()

    def exception(self) -> Any:
        """Why the operation failed."""
        if not self._inner.is_completed() and self._group.is_aborted:
            return GroupAbortedError(_ABORTED)
        return self._inner.exception()

    def get_future(self) -> torch.futures.Future[Any]:
        """Completed with the operation, or with the abort of the group."""
        if self._future is None:
            self._future = self._group._future_of(self._inner)
        return self._future

    def synchronize(self) -> None:
        """As torch's: makes the current stream of a GPU wait; nothing without one."""
        self._inner.synchronize()

    def result(self) -> list[torch.Tensor]:
        """The tensors of an operation that has ended."""
        return self._inner.result()

    def source_rank(self) -> int:
        """Who has sent what was received."""
        return self._inner.source_rank()


class NeverBegun(AbortableWork):
    """An operation of a group that was given up before.

    Not refused where it would begin: in a backward pass that would cost the gradients that this rank has yet to
    compute, and that count in the next group.
    """

    def __init__(self, group: AbortableGroup) -> None:
        super().__init__(group, dist.Work())

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002 - as torch's
        """Raises GroupAbortedError."""
        self._group._raise_if_aborted()
        return False


class AbortableReduceScatter(AbortableWork):
    """An all-reduce, of whose result this rank takes its part when it is waited for. As torch's, it has no future."""

    def __init__(
        self,
        group: AbortableGroup,
        reductions: Sequence[AbortableWork],
        own: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(group, dist.Work())
        self._reductions, self._own, self._outputs = reductions, own, outputs

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """As `AbortableWork.wait`."""
        for reduction in self._reductions:
            reduction.wait(timeout)
        for output, part in zip(self._outputs, self._own, strict=False):
            output.copy_(part)
        self._own = ()  # a second wait changes nothing
        return True

    def is_completed(self) -> bool:
        """Whether `wait` returns, or raises, without waiting."""
        return all(reduction.is_completed() for reduction in self._reductions)

    def is_success(self) -> bool:
        """Whether the operation has succeeded."""
        return all(reduction.is_success() for reduction in self._reductions)

    def exception(self) -> Any:
        """Why the operation failed."""
        return next(filter(None, (reduction.exception() for reduction in self._reductions)), None)

    def get_future(self) -> torch.futures.Future[Any]:
        """As torch's, which has none."""
        return self._inner.get_future()

    def result(self) -> list[torch.Tensor]:
        """This rank's part, once it was waited for."""
        return list(self._outputs)


class AbortableMessage(AbortableWork):
    """A message to or from one rank. No thread of gloo's works at it: whoever waits for it does."""

    _has_ended = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """As `AbortableWork.wait`, but a time-out ends the whole group, as gloo has it."""
        if not self._has_ended:
            self._group._raise_if_aborted()
            if self._group._has_large_messages:
                self._group._noting_failure(lambda: self._group._on_waiter(lambda: self._inner.wait(timeout)))
            else:
                self._group._noting_failure(lambda: self._inner.wait(timeout))
            self._has_ended = True
        return True

    def is_completed(self) -> bool:
        """Whether it was waited for; gloo tells no more."""
        return self._has_ended or self._group.is_aborted

    def is_success(self) -> bool:
        """Whether it was waited for, and arrived."""
        return self._has_ended

    def get_future(self) -> torch.futures.Future[Any]:
        """As torch's, which has none for messages."""
        return self._inner.get_future()


_ABORTED = "the process group was aborted while this operation was under way: another worker was lost or hangs"

_LEFT = (
    "this operation is one of an earlier group, which is over: make DistributedDataParallel, and what dist.new_group "
    "returns, anew in each sync() of the State"
)


def _value_or_raise(future: torch.futures.Future[Any]) -> Any:
    outcome = future.value()
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def _outcome(future: torch.futures.Future[Any]) -> Any:
    try:
        return future.value()
    except Exception as error:  # noqa: BLE001 - handed on
        return error


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)


def _delegated(name: str, begin: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
    def operation(self: AbortableGroup, *args: Any, **kwargs: Any) -> dist.Work:
        return begin(self, name, args, kwargs)

    operation.__name__ = name
    operation.__doc__ = "As torch's, but waiting for it ends with the group."
    return operation


for _names, _begin in (
    (_COLLECTIVES, AbortableGroup._begin),
    (_REDUCE_SCATTERS, AbortableGroup._begin_reduce_scatter),
    (_MESSAGES, AbortableGroup._begin_message),
):
    for _name in _names:
        if hasattr(dist.ProcessGroup, _name):  # not in every version of torch
            setattr(AbortableGroup, _name, _delegated(_name, _begin))
