"""What is to be done in the background, and what on the trainer once all ranks have done it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchelastic.checkpoint.compat.nvrx.async_ckpt.call_agreement import CallAgreement, group_in_use
from torchelastic.processes.background import done_here

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CollectiveFinalize:
    """A finalize function in which the ranks wait for each other, with what takes its place where none may.

    Attributes:
        together: called by all ranks.
        alone: called by a rank that finalizes without the others (`no_dist`); it waits for nobody.
        given_up: called in place of them by a rank whose queue reports that the call has failed, here or on another
            rank, to take back what was begun. The work may still be at it. Waits for nobody.
    """

    together: Callable[[], object]
    alone: Callable[[], object]
    given_up: Callable[[], object] = lambda: None

    def __call__(self) -> None:
        """As the ranks do it together."""
        self.together()


class AsyncRequest(NamedTuple):
    """One checkpoint to be written in the background. Field names and methods are those of NVRx.

    Attributes:
        async_fn: the work; None if this rank has nothing to do.
        async_fn_args: its positional arguments.
        finalize_fns: called without arguments on the trainer, in this order, after the work of *all* ranks is done.
        async_fn_kwargs: its keyword arguments; None means none.
        preload_fn: called without arguments before the work; what it returns takes the place of `async_fn_args[1]`. The
            trainer waits for it. It runs on the calling thread for a worker thread, and in the worker for a worker
            process.
        is_frozen: whether it was scheduled, and takes no more finalize functions.
        call_idx: its number among the calls of its queue, from 1; set when it is scheduled.
    """

    async_fn: Callable[..., object] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], object]]
    async_fn_kwargs: dict[str, Any] | None = None
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], object]) -> None:
        """Have `fn` called after the finalize functions that are there already.

        Raises:
            RuntimeError: the request is frozen.
        """
        if self.is_frozen:
            raise RuntimeError(
                f"call {self.call_idx} is scheduled and takes no more finalize functions: add them before that"
            )
        self.finalize_fns.append(fn)

    def freeze(self) -> AsyncRequest:
        """Return the request as one that takes no more finalize functions.

        The list is shared with the original: what is added to that one later is run too, rather than lost.
        """
        return self._replace(is_frozen=True)

    def staged_args(self) -> tuple[Any, ...]:
        """Run `preload_fn`, if there is one, and return the positional arguments for `async_fn`.

        Raises:
            ValueError: there is a `preload_fn`, and no second argument that its result could take the place of.
        """
        args = tuple(self.async_fn_args)
        if self.preload_fn is None:
            return args
        self.check()
        return (args[0], self.preload_fn(), *args[2:])

    def check(self) -> None:
        """Raise ValueError if the request cannot be run as it is."""
        if self.preload_fn is not None and len(self.async_fn_args) < 2:
            raise ValueError(
                "what preload_fn returns takes the place of async_fn_args[1], and there are only "
                f"{len(self.async_fn_args)} arguments: give async_fn a second one (None will do), or stage inside it"
            )

    def work(self) -> float:
        """Run `preload_fn` and `async_fn` here and now; returns how long that took, in seconds."""
        start_s = time.monotonic()
        if self.async_fn is not None:
            self.async_fn(*self.staged_args(), **(self.async_fn_kwargs or {}))
        return time.monotonic() - start_s

    def execute_sync(self) -> None:
        """Do all of it here and now: the work, and the finalize functions once all ranks have done theirs.

        Called on every rank of the default process group, if there is one; alone otherwise.

        Raises:
            AsyncCheckpointError: the work failed on some rank, or the ranks do not run the same call; the finalize
                functions were called on no rank. Where it failed here, the original exception is the cause.
        """
        CallAgreement().require_success(group_in_use(None), self.call_idx, done_here(self.work))
        self.execute_finalize_fns(validate_matching_call_idx=False)

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True, *, alone: bool = False) -> int:
        """Call the finalize functions, in order, on the calling thread.

        Args:
            validate_matching_call_idx: first compare the indexes of the calls over the ranks of the default process
                group (two integers, one all-reduce); every rank calls this then, and waits at most 30 minutes.
            alone: the other ranks do not finalize it now; see `CollectiveFinalize`.

        Returns:
            `call_idx`.

        Raises:
            AsyncCheckpointError: the ranks are about to finalise different calls; it names them. Nothing was called.
            BaseException: what a finalize function raised; those after it were not called.
        """
        if validate_matching_call_idx:
            CallAgreement().require_success(group_in_use(None), self.call_idx, done_here(lambda: 0.0))
        for finalize_fn in self.finalize_fns:
            if alone and isinstance(finalize_fn, CollectiveFinalize):
                finalize_fn.alone()
            else:
                finalize_fn()
        return self.call_idx

    def take_back(self) -> None:
        """The call has failed on some rank: take back what was begun (`CollectiveFinalize.given_up`). Never raises."""
        for finalize_fn in self.finalize_fns:
            if isinstance(finalize_fn, CollectiveFinalize):
                try:
                    finalize_fn.given_up()
                except Exception:
                    log.exception("what was begun by the failed checkpoint call %d is not taken back", self.call_idx)
