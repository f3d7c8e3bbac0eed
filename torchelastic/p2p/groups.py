"""Process groups that can be given up at once: torch's default group and the one for control collectives.

All methods but `abort` are called on the training thread; `abort` from any.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import Store

from torchelastic.group import communicators
from torchelastic.group.backends import GLOO, require_fit
from torchelastic.group.store_mailbox import MAX_EXIT_S, leads_to
from torchelastic.p2p.abandoned import aborted_groups
from torchelastic.p2p.abortable import AbortableGroup
from torchelastic.processes.sockets import SocketSet, waits_are_bounded
from torchelastic.torch_internals import process_groups

log = logging.getLogger(__name__)

#: By so much, and twice, the time-out that torch knows for NCCL is longer than the one that `Watchdog` goes by.
LATER = timedelta(minutes=1)


class ProcessGroups:
    """The groups of one worker, one generation after the other.

    Args:
        backend: of the default group; a backend that is not for CPU tensors gets a gloo group beside it.
        timeout: of collectives.
        is_foreign: whether a server of somebody else in this process listens at that local port.

    Attributes:
        control: the group for control collectives; None: there is no group at present.
        is_forming: whether the default group is being made.
    """

    def __init__(
        self, backend: str, timeout: timedelta, is_foreign: Callable[[int], bool] = lambda _port: False
    ) -> None:
        self.backend = backend
        self.timeout = timeout
        self.control: dist.ProcessGroup | None = None
        self.is_forming = False
        self._is_foreign = is_foreign
        self._sockets = SocketSet(self._is_ours)
        self._knows_gloo_sockets = True
        self._is_aborted = False
        self._world: dist.ProcessGroup | None = None
        self._formation: Formation | None = None
        self._kind: type[dist.ProcessGroup] = AbortableGroup
        # to have a say in how every group of this process is made, the user's too; idempotent
        process_groups.replace_maker_of_groups("torchelastic_watches", _watched)

    def form(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        kind: type[dist.ProcessGroup] = AbortableGroup,
        connects: bool = True,
    ) -> None:
        """Make the default group and the one for control collectives. Raises RuntimeError if a peer does not come.

        Args:
            store: of the group.
            rank: of this process.
            world_size: of the group.
            kind: of the default group, where that is gloo's alone.
            connects: whether NCCL connects its ranks now, and not with the first collective.
        """
        global _in_use
        _in_use, self._kind = self, kind
        self._sockets.clear()
        communicators.begin()
        _set_what_torch_does_about_a_failure()
        excepthook = sys.excepthook
        self.is_forming = True
        try:
            # torch's watchdog of NCCL asks the store before it gives up, and that may be what hangs: ours comes first
            timeout = self.timeout if self.backend == GLOO else 2 * self.timeout + LATER
            dist.init_process_group(self.backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
            self._world = dist.group.WORLD
            assert self._world is not None
            require_fit(self._world)
        finally:
            self._kind = AbortableGroup
            # torch puts one more layer around it each time, and each prints its "[rankN]: " before every line
            sys.excepthook = excepthook
            self.is_forming = False
        if self.backend == GLOO:
            self.control = dist.group.WORLD
        else:
            self.control = dist.new_group(backend="gloo", timeout=self.timeout)
            if connects:
                self.connect_communicator(dist.group.WORLD)
        if world_size > 1 and self._knows_gloo_sockets and not len(self._sockets):
            self._knows_gloo_sockets = False
            log.info(
                "the connections of this release of torch cannot be distinguished from others: connections that other "
                "threads open while a group is formed are closed when it is aborted"
            )

    def _is_ours(self, connection: socket.socket) -> bool:
        """Whether a connection that was opened while a group was formed is the group's; raises OSError."""
        is_client_of_ours = self._is_foreign(int(connection.getsockname()[1]))
        return not is_client_of_ours and (waits_are_bounded(connection) or not self._knows_gloo_sockets)

    @property
    def are_present(self) -> bool:
        """Whether the groups of this process are these, or are just being made: not a world of the user's own."""
        return self.is_forming or (self._world is not None and dist.group.WORLD is self._world)

    @property
    def has_failed(self) -> bool:
        """Whether a collective of the present groups has failed on this rank."""
        return any(group.has_failed for group in _abortable_groups())

    def abort(self) -> int:
        """Make every operation of the present groups fail: here, and at the peers through the closed connections.

        Whoever waits in one is freed, and a group that is just being formed is given up. Returns how many connections
        were cut. Idempotent.
        """
        self._is_aborted = True
        formation = self._formation
        if formation is not None:
            formation.abort()
        cut = self._sockets.cut()
        for group in _abortable_groups():
            group.abort()
        if dist.is_initialized():
            communicators.abort()
        return cut

    def destroy(self) -> None:
        """Give the groups up. Whoever still holds one (an old DDP wrapper, a traceback) holds an aborted one."""
        # torch names groups by a counter, part of every key in the store, and counts failed formations too: a rank that
        # had one more of them would wait for keys that nobody ever writes
        process_groups.forget_group_names()
        if dist.is_initialized():
            self.abort()
            self.control = self._world = None
            groups = _abortable_groups()
            communicators.forget()
            try:
                dist.destroy_process_group()
            except (RuntimeError, ValueError, AssertionError) as error:
                log.debug("destroying an aborted group: %s", error)
            aborted_groups.add(groups)
            self._sockets.clear()
        self._is_aborted = False

    @contextmanager
    def making_group(self) -> Iterator[None]:
        """While torch makes a group, the user's with `new_group` too: record its connections, and let it be given up.

        Raises:
            RuntimeError: the present groups were given up.
        """
        with self._forming() as formation, self._sockets.recording(), formation.connecting():
            yield

    def connect_communicator(self, group: object) -> None:
        """Connect a group of NCCL that was made; raises RuntimeError as soon as the groups are given up."""
        if not isinstance(group, dist.ProcessGroup):  # made for other ranks
            return
        connect = communicators.connecting(group)
        if connect is not None:
            with self._forming() as formation:
                formation.run(connect, process_groups.store_of(group), self.timeout + LATER)

    @contextmanager
    def _forming(self) -> Iterator[Formation]:
        formation, outer = Formation(), self._formation
        self._formation = formation
        if self._is_aborted:
            formation.abort()
        try:
            yield formation
        finally:
            self._formation = outer


def _abortable_groups() -> list[AbortableGroup]:
    return [group for group, _, _ in process_groups.all_groups() if isinstance(group, AbortableGroup)]


#: Whose groups are those of `torch.distributed` at present; a process has one default group at a time.
_in_use: ProcessGroups | None = None


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        backend = kwargs["backend"] if "backend" in kwargs else args[3]
        with ExitStack() as stack:
            if _in_use is not None and _in_use.are_present:
                stack.enter_context(_in_use.making_group())
                if _is_gloo_alone(backend):
                    stack.enter_context(_groups_are(_in_use._kind))
                kwargs |= communicators.made_lazily(backend, kwargs.get("backend_options"))
            made = original(*args, **kwargs)
        if _in_use is not None and not _in_use.is_forming and _in_use.are_present:
            if isinstance(made[0], dist.ProcessGroup):  # else it is made for other ranks
                require_fit(made[0])
            _in_use.connect_communicator(made[0])
        return made

    return watched


#: What torch does about a collective of NCCL's that has failed or timed out: 1 and 3, its default, end the process; 2
#: gives the communicator up; 0 does nothing. Read when a group is made, by both engines; the first name wins.
_ERROR_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
#: How many collectives torch's flight recorder keeps; the first name wins. When a collective has failed, the default
#: engine of torch 2.15 writes them to a file, and nobody can abort the communicator for up to 15 seconds.
_FLIGHT_RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def _set_what_torch_does_about_a_failure() -> None:
    """Have torch leave the failure of a collective to us, except where the user has chosen what cannot do harm."""
    name, given = next(((name, os.environ[name]) for name in _ERROR_HANDLING if name in os.environ), ("", "2"))
    if given not in ("0", "2"):
        log.warning("%s=%s would have torch end every worker when one is lost: 2 is used; unset it", name, given)
    if given != "0":
        os.environ[_ERROR_HANDLING[0]] = "2"
    if not any(os.environ.get(name) for name in _FLIGHT_RECORDER):
        os.environ[_FLIGHT_RECORDER[0]] = "0"


def _is_gloo_alone(backend: Any) -> bool:
    """Whether all messages of a group with this backend go through gloo; NCCL's communicators can be aborted."""
    return set(c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map().values()) == {"gloo"}


@contextmanager
def _groups_are(kind: type[dist.ProcessGroup]) -> Iterator[None]:
    """Have torch construct groups of this class, wherever it keeps them."""
    usual = c10d.ProcessGroup
    c10d.ProcessGroup = kind  # type: ignore[misc]
    try:
        yield
    finally:
        c10d.ProcessGroup = usual  # type: ignore[misc]


class Formation:
    """One group being made: on the training thread; aborted from any.

    gloo and NCCL connect on a thread of their own, so that the training thread need not wait: for each peer's address
    and connection gloo waits up to the group's time-out, NCCL for ever, and while they wait for a peer that has
    published its address and died there is no connection yet that could be closed.
    """

    def __init__(self) -> None:
        self._changed = threading.Event()
        self._is_aborted = False

    def abort(self) -> None:
        """Have whoever makes the group raise RuntimeError now. Idempotent."""
        self._is_aborted = True
        self._changed.set()

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Have every gloo backend that is constructed inside connect on a thread that can be left behind."""
        backend: Any = c10d.ProcessGroupGloo
        original = backend.__init__

        def connect(self: object, store: Store, *args: Any, **kwargs: Any) -> None:
            # torch checks the type of what it constructs, so the construction itself is replaced, and not the class
            formation.run(lambda: original(self, store, *args, **kwargs), store)

        formation = self
        backend.__init__ = connect
        try:
            yield
        finally:
            backend.__init__ = original

    def run(self, connect: Callable[[], None], store: Store, within: timedelta | None = None) -> None:
        """Call `connect` on a thread of its own; raises what it raises, or RuntimeError when this is given up.

        Args:
            connect: may never return.
            store: in which it looks for the other ranks.
            within: give it up by itself after this time; None: it does so, as gloo.
        """
        errors: list[BaseException] = []
        has_ended = False

        def run() -> None:
            nonlocal has_ended
            try:
                connect()
            except BaseException as error:  # noqa: BLE001 - raised where the group is made
                errors.append(error)
            has_ended = True
            self._changed.set()

        self._raise_if_aborted()
        thread = threading.Thread(target=run, name="torchelastic-formation", daemon=True)
        thread.start()
        to_the_store = SocketSet(leads_to(store))  # and not the store: that of rank 0 has to end with its group
        _connecting[:] = [*(each for each in _connecting if each[0].is_alive()), (thread, to_the_store)]
        while not has_ended:
            self._raise_if_aborted()
            if not self._changed.wait(None if within is None else within.total_seconds()):
                raise RuntimeError(f"NCCL has not connected the group within {within}")
            self._changed.clear()
        if errors:
            raise errors[0]

    def _raise_if_aborted(self) -> None:
        if self._is_aborted:
            raise RuntimeError("the group was aborted while it was being formed: another worker was lost or hangs")


#: The threads on which gloo connects, and the connections to the store in which it looks for addresses; some threads
#: may have been left behind.
_connecting: list[tuple[threading.Thread, SocketSet]] = []


#: Within this time a thread of gloo's that waits for the interpreter has it, and has done what it wanted it for.
_RELEASE_S = 0.02


def _leave_no_thread_in_gloo() -> None:
    """At the end of the process: frees the threads that were left behind; see `store_mailbox`, as to why.

    Where an operation has just ended, a thread of gloo's releases its tensors, for which it needs the interpreter.
    """
    if _in_use is not None:
        time.sleep(_RELEASE_S)
    for thread, to_the_store in _connecting:
        if thread.is_alive():
            to_the_store.cut_all()
            thread.join(MAX_EXIT_S)


os.register_at_fork(after_in_child=_connecting.clear)
atexit.register(_leave_no_thread_in_gloo)
