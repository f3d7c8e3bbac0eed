"""The process group after `train()`: what a script does at its end with `torch.distributed`, as under torchrun.

Those that have finished form one more group, which stays until `destroy_process_group()` or the end of the process: so
`get_rank()`, `barrier()` and collectives work there. Nobody repeats anything any more. Where a process ends meanwhile,
a barrier goes on without it; a collective raises, for its result would lack a part. A worker that has left the run, or
that does not reach the others, is in no group: it has rank -1, or its own, and whatever needs the others raises.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from torchelastic.group.backends import GLOO
from torchelastic.group.store_mailbox import OwnConnection
from torchelastic.p2p.abortable import OPERATIONS, AbortableGroup, AbortableWork
from torchelastic.p2p.groups import ProcessGroups
from torchelastic.p2p.hangs import DEFAULT_TIMEOUT_MS
from torchelastic.p2p.heartbeat import Heartbeat
from torchelastic.text import listed
from torchelastic.torch_internals.c10d_types import HashStore, PrefixStore
from torchelastic.torch_internals.process_groups import GroupAround, replace_init

log = logging.getLogger(__name__)

#: Of collectives after `train()`, where the user has chosen none: torch's own. One rank may evaluate meanwhile.
TIMEOUT = timedelta(minutes=30)
#: The others have just learned, too, that the run is over: who does not come within so long is not waited for.
FORMING_S = 5.0
#: A rank that has given no sign of life for so long counts as ended, once a connection has shown that one has.
SILENT_AFTER_S = 10.0
_POLL_S = 0.02

_REMEDY = (
    "put what all ranks compute together into the step, or take this call out: each rank has the state that train() "
    "has returned, and coordinator.rank"
)


def last_timeout(process_group_timeout_ms: int) -> timedelta:
    """How long a collective after `train()` may take. Pure.

    >>> last_timeout(DEFAULT_TIMEOUT_MS) == TIMEOUT, last_timeout(60_000)
    (True, datetime.timedelta(seconds=60))
    """
    is_chosen = process_group_timeout_ms != DEFAULT_TIMEOUT_MS
    return timedelta(milliseconds=process_group_timeout_ms) if is_chosen else TIMEOUT


class Rollcall:
    """Where those that are left wait for each other when their connections are cut: the store of the last round.

    Args:
        store: a connection to that of the round, as it was when the last group was formed.
        members: of the last group, as ranks of the round.
        own: the rank of this process there.
        silent_s: for how long each rank of the round has given no sign of life, counted from the first call.
        timeout_s: for how long one that lives is waited for.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: OwnConnection,
        members: Sequence[int],
        own: int,
        silent_s: Callable[[], dict[int, float]],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._members, self._own = store, list(members), own
        self._silent_s, self._timeout_s, self._clock = silent_s, timeout_s, clock

    def wait(self, number: int) -> list[int]:
        """Wait until all members that live have come to the barrier with this number; returns who has ended.

        Raises:
            RuntimeError: somebody lives and does not come in time.
        """
        deadline_s = self._clock() + self._timeout_s
        while True:
            try:
                came = self._store.ask(lambda store: self._look(store, number))
            except RuntimeError as error:
                log.debug("the store of the last round is gone: %s", error)
                return [self._members[0]]
            ended = [rank for rank, s in self._silent_s().items() if s >= SILENT_AFTER_S and rank in self._members]
            missing = [rank for rank in self._members if rank not in came and rank not in ended]
            if not missing:
                return [rank for rank in ended if rank not in came]
            if self._clock() > deadline_s:
                raise RuntimeError(f"{listed(missing)} did not come to a barrier after train(): {_REMEDY}")
            time.sleep(_POLL_S)

    def _look(self, store: Store, number: int) -> list[int]:
        store.set(f"last/barrier/{self._own}", str(number))
        here = [rank for rank in self._members if store.check([f"last/barrier/{rank}"])]
        numbers = store.multi_get([f"last/barrier/{rank}" for rank in here])
        return [rank for rank, its in zip(here, numbers, strict=True) if int(its) >= number]


class LastGroup(AbortableGroup):
    """See the module's docstring; made by torch, in `form`."""

    rollcall: Rollcall | None = None
    give_up: Callable[[], object] = staticmethod(lambda: None)
    _barriers = 0

    def barrier(self, *args: Any, **kwargs: Any) -> AbortableWork:
        """As torch's; it goes on without those that have ended since `train()`."""
        self._barriers += 1
        return _LastBarrier(self, self._begin("barrier", args, kwargs), self._barriers)

    def _noting_failure(self, wait: Callable[[], Any]) -> Any:
        try:
            return super()._noting_failure(wait)
        except RuntimeError as error:
            self.give_up()  # the others may wait for what this rank does not do any more
            raise RuntimeError(_lost_after(error)) from error

    def _raise_if_aborted(self) -> None:
        if self.is_aborted:
            raise RuntimeError(_lost_after("another rank was lost"))


class _LastBarrier(AbortableWork):
    def __init__(self, group: LastGroup, inner: AbortableWork, number: int) -> None:
        super().__init__(group, inner)
        self._last, self._barrier, self._number = group, inner, number

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all that live."""
        try:
            return self._barrier.wait(timeout)
        except RuntimeError:
            if self._last.rollcall is None:
                raise
            self._last.give_up()
            ended = self._last.rollcall.wait(self._number)
            if ended:
                log.warning("%s ended after train(): this barrier has not waited for it", listed(ended))
            return True


class AbsentGroup(GroupAround):
    """In place of a group, for a worker that is in none after `train()`; made by torch, in `be_absent`."""

    its_rank, its_size, why = -1, -1, ""

    def rank(self) -> int:
        """The worker's; -1: it has none."""
        return self.its_rank

    def size(self) -> int:
        """How many workers the last group had; -1: it was in none."""
        return self.its_size

    def barrier(self, *_args: Any, **_kwargs: Any) -> None:  # type: ignore[override]  # torch takes None, too
        """Nothing, for one that has left the run: nobody waits for it. For another one it raises."""
        if self.its_rank >= 0:
            self._raise_absent()
        log.warning("a barrier after train() waits for nobody: %s", self.why)

    def _raise_absent(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise RuntimeError(f"no process group after train(): {self.why}; {_REMEDY}")


for _name in OPERATIONS:
    if _name not in vars(AbsentGroup):
        setattr(AbsentGroup, _name, AbsentGroup._raise_absent)


def form(
    groups: ProcessGroups,
    store: Store,
    rank: int,
    world_size: int,
    timeout: timedelta,
) -> None:
    """Form the group of those that have finished. On the training thread of all of them, within `FORMING_S`.

    Args:
        groups: of this worker; there is none at present.
        store: of the last round.
        rank: of this worker in it.
        world_size: of the round.
        timeout: of its collectives.

    Raises:
        RuntimeError: the others are not reached.
    """
    members, connection = [0], OwnConnection(store, answer_s=FORMING_S)
    if world_size > 1:
        members = connection.ask(lambda own: _gathered(own, rank, world_size))
        if rank not in members:
            raise RuntimeError("the others did not wait for this rank")
    groups.timeout, own_store = timeout, PrefixStore("last", store)
    giving_up = threading.Timer(FORMING_S, groups.abort)
    giving_up.start()
    try:
        groups.form(own_store, members.index(rank), len(members), kind=LastGroup, connects=False)
        if world_size > 1:  # who goes home at once must not cut what another one is still connecting
            with suppress(RuntimeError):
                connection.ask(lambda own: _all_formed(own, rank, members))
    finally:
        giving_up.cancel()
    _stays(groups)
    group = dist.group.WORLD
    if isinstance(group, LastGroup):
        group.give_up = groups.abort
        group.rollcall = Rollcall(
            connection, members, rank, Heartbeat(own_store, rank, world_size).silent_s, timeout.total_seconds()
        )
    if len(members) < world_size:
        missing = [each for each in range(world_size) if each not in members]
        log.warning("%s ended before train() returned: the process group after it is without it", listed(missing))


def form_if_all_come(
    groups: ProcessGroups,
    store: Store,
    rank: int,
    world_size: int,
    process_group_timeout_ms: int,
    *,
    is_in_it: bool,
) -> None:
    """The same, or a rank that is alone and says why: a run that has finished does not fail for this.

    Args:
        groups: as for `form`.
        store: the same.
        rank: the same.
        world_size: the same.
        process_group_timeout_ms: of the coordinator.
        is_in_it: whether this worker was in the group in which the run has ended.
    """
    why = "this worker was in no group when the run ended"
    if is_in_it:
        try:
            form(groups, store, rank, world_size, last_timeout(process_group_timeout_ms))
        except Exception as error:  # noqa: BLE001 - see above
            why = f"its ranks did not all come ({error})"
        else:
            return
    be_absent(groups, rank, world_size, why)


def be_absent(groups: ProcessGroups, rank: int, world_size: int, why: str) -> None:
    """Have `torch.distributed` say of this worker that it is in no group; see `AbsentGroup`."""
    groups.destroy()
    absent = ProcessGroups(GLOO, groups.timeout)  # whatever the backend was: nothing is sent
    absent.form(HashStore(), 0, 1, kind=AbsentGroup)
    _stays(absent)
    group = dist.group.WORLD
    assert isinstance(group, AbsentGroup)
    group.its_rank, group.its_size, group.why = rank, world_size if rank >= 0 else -1, why


def _gathered(store: Store, rank: int, world_size: int) -> list[int]:
    """Who has come: rank 0, which has the store, waits for all and says who they are."""
    store.set(f"last/here/{rank}", "1")
    deadline_s = time.monotonic() + FORMING_S / 2 if rank == 0 else time.monotonic() + FORMING_S
    while True:
        if rank > 0 and store.check(["last/members"]):
            return [int(word) for word in store.get("last/members").split()]
        here = [each for each in range(world_size) if store.check([f"last/here/{each}"])] if rank == 0 else []
        is_late = time.monotonic() > deadline_s
        if rank == 0 and (is_late or len(here) == world_size):
            store.set("last/members", " ".join(map(str, here)))
            return here
        if is_late:
            raise RuntimeError("rank 0 does not say who is in the group after train()")
        time.sleep(_POLL_S / 4)


def _all_formed(store: Store, rank: int, members: Sequence[int]) -> None:
    """Wait until all are connected to all; raises RuntimeError if that is not known in time."""
    deadline_s = time.monotonic() + FORMING_S / 2
    store.set(f"last/formed/{rank}", "1")
    while not store.check([f"last/formed/{each}" for each in members]):
        if time.monotonic() > deadline_s:
            raise RuntimeError("not all say that they are connected")
        time.sleep(_POLL_S / 4)


def _lost_after(error: object) -> str:
    return f"a process of this group has ended, or did not come, after train() ({error}): {_REMEDY}"


#: Whose last group there is in this process.
_last: ProcessGroups | None = None


def _stays(groups: ProcessGroups) -> None:
    """Keep the present group until the process ends, or the script makes one of its own."""
    global _last
    if _last is None:
        atexit.register(end_last_group)
        replace_init(end_last_group)
    _last = groups


def end_last_group() -> None:
    """Nobody waits for this process any more, nor it for anybody. Not where the script has made a group of its own."""
    if _last is not None and not _last.is_forming and _last.are_present:
        _last.destroy()
