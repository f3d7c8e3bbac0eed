"""CoordinatorP2P: process groups over a rendezvous, made anew in the same process whenever the membership changes."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from torchelastic.coordinator import Coordinator, NonRetryableException, StopException
from torchelastic.metrics import profile, publish_metric
from torchelastic.p2p.agreement import StepAgreement
from torchelastic.p2p.groups import ProcessGroups
from torchelastic.p2p.recovery_time import PHASES, Recovery, RecoveryTimer
from torchelastic.rendezvous import handler as rendezvous_handler
from torchelastic.rendezvous import wire
from torchelastic.rendezvous.handler import (
    RendezvousClosedException,
    RendezvousHandler,
    RendezvousNonRetryableError,
    RendezvousTimeoutException,
)
from torchelastic.rendezvous.records import Round, Standing
from torchelastic.rendezvous.url import RendezvousUrlError, parse_url
from torchelastic.rendezvous.worker_rules import is_replaced
from torchelastic.state import State
from torchelastic.worker_stats import WorkerStats

log = logging.getLogger(__name__)

#: A worker whose progress rate is below this share of the best one's is reported as a straggler.
STRAGGLER_THRESHOLD = 0.8
#: Beyond the time-out of collectives: how much later a live worker may get ready before it is taken for hung.
PATIENCE_MARGIN_S = 5.0
#: While rank 0 writes a checkpoint the others look this often whether they are still members.
SAVE_WAIT_S = 10.0

rendezvous_handler.register()


class CoordinatorP2P(Coordinator):
    """Workers as peers: whoever is there trains, without a master.

    Use one object per process, on the training thread.

    Args:
        c10d_backend: "gloo" or "nccl"; default: nccl where every worker of this host has its GPU, else gloo.
        init_method: rendezvous URL (`etcd://host:port/run_id?min_workers=..&max_workers=..`, or a scheme of your own);
            default: what `torchelastic run` has set.
        max_num_trainers: no group is larger; default: the URL's `max_workers`.
        process_group_timeout: of collectives, in milliseconds. A peer that dies is noticed within milliseconds all
            the same; the time-out is for those that hang.

    Raises:
        ValueError: an unknown backend, no rendezvous URL, or one that cannot be used.
    """

    MONITOR_PROGRESS_FREQ = 1000

    #: Relative progress rate of this worker, the best worker's being 1; not there until it was computed once.
    last_relative_prog_rate: float

    def __init__(
        self,
        c10d_backend: str | None = None,
        init_method: str | None = None,
        max_num_trainers: int | None = None,
        process_group_timeout: int = 10000,
    ) -> None:
        self.c10d_backend = _checked_backend(c10d_backend)
        self.init_method = _checked_init_method(init_method)
        self.rendezvous: RendezvousHandler = _open_rendezvous(self.init_method)
        self.max_num_trainers = _checked_max(max_num_trainers, self.init_method)
        self.process_group_timeout = process_group_timeout
        self.rank = -1
        self.world_size = 0
        self.store: Store | None = None
        self.is_worker_straggler = False
        self.stop_training = False
        self.monitor_progress_step = 0
        self._groups = ProcessGroups(
            self.c10d_backend, timedelta(milliseconds=process_group_timeout), self.rendezvous.serves_port
        )
        self._agreement = StepAgreement(None)
        self._committed_steps = 0
        self._standing = Standing.FRESH
        self._failed = False
        self._saves = 0
        self.last_recovery: Recovery | None = None
        self._timer = RecoveryTimer(time.monotonic)
        # what the agent's thread looks at to decide whether a change of the round concerns this worker
        self._joined_round = 0
        self._is_broken = threading.Event()
        self.rendezvous.on_round(self._on_round)
        _dump_stacks_on_request()

    @property
    def coordinator_process_group(self) -> dist.ProcessGroup | None:
        """The gloo group for control collectives; None outside a group."""
        return self._groups.control

    # --- getting into a group ---------------------------------------------------------------------

    @profile(group="torchelastic")
    def rendezvous_barrier(self) -> tuple[Store, int, int]:
        """Leave the present group and wait for the next one; see `Coordinator`."""
        self._joined_round = 0  # from here on no change of a round concerns a group of ours
        self._groups.destroy()
        self._is_broken.clear()
        timeout_s = self.process_group_timeout / 1000
        self.rendezvous.report(
            step=self._committed_steps,
            standing=self._standing,
            failed=self._failed,
            patience_s=timeout_s + PATIENCE_MARGIN_S,
        )
        try:
            self.store, self.rank, self.world_size = self.rendezvous.next_rendezvous()
        except RendezvousClosedException as error:
            if self._committed_steps < self.rendezvous.round.step:
                # the others have finished without this worker: who saves results where `rank == 0` must not save these
                log.warning(
                    "the run has ended at step %d; this worker had %d steps, its state is not the result",
                    self.rendezvous.round.step,
                    self._committed_steps,
                )
                self.rank, self.world_size = -1, 0
            self._finish()
            raise StopException(str(error)) from error
        except RendezvousTimeoutException as error:
            raise NonRetryableException(f"no group within the rendezvous time-out: {error}") from error
        except (RendezvousNonRetryableError, RendezvousUrlError) as error:
            raise NonRetryableException(str(error)) from error
        self._joined_round = self.rendezvous.joined.number
        self._saves = 0
        self._timer.reached("agree")
        self.is_worker_straggler = False
        self._failed = False
        log.info("round %d: rank %d of %d", self._joined_round, self.rank, self.world_size)
        return self.store, self.rank, self.world_size

    @profile(group="torchelastic")
    def init_process_group(self) -> None:
        """Make the default group of `torch.distributed` (and a gloo one beside NCCL) of this round's members."""
        assert self.store is not None, "init_process_group() comes after rendezvous_barrier()"
        self.monitor_progress_step = 0
        self._raise_if_broken()
        _choose_interface(self.rendezvous.address)
        self._groups.form(self.store, self.rank, self.world_size)
        self._agreement = StepAgreement(self._groups.control if self.world_size > 1 else None)
        self._timer.reached("re_form")

    def nobody_has_progress(self) -> bool | None:
        """Whether a checkpoint is wanted: the best state in this round is a fresh or a torn one."""
        round_ = self.rendezvous.joined
        return None if round_.number == 0 else round_.standing in (Standing.FRESH, Standing.TORN)

    def state_changed(self, state: State, *, synced: bool) -> None:
        """Remember what this worker's state is worth, for the choice of the next group's source."""
        if synced:
            self._committed_steps = max(self._committed_steps, self.rendezvous.joined.step)
            self._standing = Standing.WHOLE
            self._timer.reached("sync")
        elif self._standing is not Standing.FRESH:
            self._standing = state.standing

    # --- after each step --------------------------------------------------------------------------

    def may_commit(self) -> bool:
        """False where this host was without contact to etcd for so long that another group may be training by now."""
        return self.rendezvous.may_commit()

    def step_committed(self) -> None:
        """Count the step: the worker with the most is the source after a failure."""
        self._committed_steps += 1
        recovery = self._timer.reached("step")
        if recovery is not None:
            self._report_recovery(recovery)

    @profile(group="torchelastic")
    def should_save_checkpoint(self) -> bool:
        """False: the state decides, or a subclass."""
        return False

    def save_together(self, due: bool, rank: int, save: Callable[[], None]) -> None:
        """Rank 0 saves if it finds a checkpoint due; the others wait, however long it takes, and lose nothing by it.

        They wait for a key of the round's store and not in a collective, whose time-out a slow disk would exceed.
        """
        if self.world_size > 1:
            flag = torch.tensor([int(due)])
            dist.broadcast(flag, src=0, group=self._groups.control)
            due = bool(flag[0])
        if not due:
            return
        self._saves += 1
        key = f"saved/{self._saves}"
        if rank == 0:
            save()
            assert self.store is not None
            self.store.set(key, "1")
        else:
            self._wait_for_key(key)

    @profile(group="torchelastic")
    def should_rendezvous(self, state: State) -> bool:  # noqa: ARG002 - part of the contract
        """Whether all members leave now, after a committed step: a newcomer waits, or a member is lost."""
        if self._is_broken.is_set():
            return True
        if self.rendezvous.should_pause():
            log.warning("no contact to etcd for too long: training pauses, its state intact, until etcd is back")
            return True
        wish = self.world_size < self.max_num_trainers and self.rendezvous.num_nodes_waiting() > 0
        try:
            return self._agreement.leave(wish)
        except RuntimeError as error:
            # the step is committed: a peer that is lost now costs a new group, and nothing is undone
            log.info("a peer was lost after the step: %s", error)
            self._timer.noticed()
            self._groups.abort()
            return True

    @profile(group="torchelastic")
    def should_stop_training(self) -> bool:
        """Whether the run is over for this worker."""
        if not self.stop_training and self.rendezvous.is_over_for(self._committed_steps):
            self._finish()
        return self.stop_training

    @profile(group="torchelastic")
    def signal_training_done(self) -> None:
        """End the run for everybody and wait until all have heard of it.

        A peer that lost its last step to a failure at this very moment is brought level first, in one more group: then
        this returns with `should_stop_training()` still false.
        """
        self._finish()

    @profile(group="torchelastic")
    def monitor_progress(self, state: State, worker_stats: WorkerStats | None) -> None:  # noqa: ARG002 - part of the contract
        """Every MONITOR_PROGRESS_FREQ steps compare progress rates.

        A worker far behind the best is flagged and logged.
        """
        self.monitor_progress_step += 1
        if self.monitor_progress_step % self.MONITOR_PROGRESS_FREQ:
            return
        rate = None if worker_stats is None else worker_stats.get_progress_rate()
        rates = self._gather_rates(rate)
        if rate is None or not rates:
            return
        self.last_relative_prog_rate = rate / max(rates) if max(rates) > 0 else 1.0
        self.is_worker_straggler = self.last_relative_prog_rate < STRAGGLER_THRESHOLD
        if self.is_worker_straggler:
            log.warning("straggler: rank %d runs at %.0f %% of the best", self.rank, 100 * self.last_relative_prog_rate)

    @profile(group="torchelastic")
    def report_progress(self, state: State) -> None:
        """Nothing: for subclasses."""

    @profile(group="torchelastic")
    def on_error(self, e: BaseException) -> None:
        """Give the group up at once, so that every peer hears of the failure now and not after its time-out."""
        self._failed = True
        self._timer.noticed()
        cut = self._groups.abort()
        log.debug("%s: %d connections cut", type(e).__name__, cut)

    # --- inside -----------------------------------------------------------------------------------

    def _on_round(self, round_: Round) -> None:
        """On the agent's thread: if the group of this worker is no more, wake whoever waits in it."""
        if self._joined_round == 0:
            return
        if is_replaced(self.rendezvous.joined, round_):
            self._timer.noticed()
            self._is_broken.set()
            self._groups.abort()
            self.rendezvous.interrupt()

    def _report_recovery(self, recovery: Recovery) -> None:
        self.last_recovery = recovery
        log.info("recovered: %s", recovery)
        publish_metric("torchelastic", "recovery.duration.ms", recovery.total_ms)
        for phase in PHASES:
            publish_metric("torchelastic", f"recovery.{phase}.duration.ms", recovery.phases_ms[phase])

    def _raise_if_broken(self) -> None:
        round_ = self.rendezvous.round
        if self._joined_round > 0 and is_replaced(self.rendezvous.joined, round_):  # a handler may have no rounds
            self._is_broken.set()
        if self._is_broken.is_set():
            raise RuntimeError(f"round {self._joined_round} broke while its group was being formed: {round_.because}")

    def _finish(self) -> None:
        """Tell the others that this worker is done, free those who wait for it, and go when all are."""
        if self.stop_training:
            return
        self.rendezvous.signal_done(self._committed_steps)
        self._groups.abort()
        self.stop_training = self.rendezvous.wait_closed()
        if self.stop_training:
            self._joined_round = 0
            self._groups.destroy()
            self.rendezvous.close()

    def _gather_rates(self, rate: float | None) -> list[float]:
        """The known progress rates of all workers."""
        mine = torch.tensor([-1.0 if rate is None else rate], dtype=torch.float64)
        if self.world_size == 1:
            gathered = [mine]
        else:
            gathered = [torch.zeros_like(mine) for _ in range(self.world_size)]
            dist.all_gather(gathered, mine, group=self._groups.control)
        return [float(value) for value in gathered if float(value) >= 0]

    def _wait_for_key(self, key: str) -> None:
        assert self.store is not None
        while True:
            began_s = time.monotonic()
            try:
                self.store.wait([key], timedelta(seconds=SAVE_WAIT_S))
            except dist.DistStoreError:
                self._raise_if_broken()
                if time.monotonic() - began_s < SAVE_WAIT_S / 2:
                    raise  # no time-out: the connection is gone
            else:
                return


def _checked_backend(backend: str | None) -> str:
    if backend is None:
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= local_world_size
        return "nccl" if has_gpus and dist.is_nccl_available() else "gloo"
    available = [name for name in ("gloo", "nccl") if dist.is_backend_available(name)]
    if backend not in available:
        raise ValueError(f"c10d_backend={backend!r}: this torch has {', '.join(available)}")
    return backend


def _checked_init_method(init_method: str | None) -> str:
    init_method = init_method or os.environ.get(wire.INIT_METHOD_VARIABLE)
    if not init_method:
        raise ValueError(
            "no rendezvous: start the script with `torchelastic run`, or give "
            "init_method='etcd://HOST:PORT/RUN_ID?min_workers=N&max_workers=M'"
        )
    return init_method


def _open_rendezvous(init_method: str) -> RendezvousHandler:
    opened = rendezvous(init_method)
    if not isinstance(opened, RendezvousHandler):
        raise ValueError(
            f"{init_method!r} leads to a {type(opened).__name__}, which is no torchelastic RendezvousHandler"
        )
    return opened


def _checked_max(max_num_trainers: int | None, init_method: str) -> int:
    if max_num_trainers is None:
        return parse_url(init_method).max_workers if init_method.startswith("etcd://") else sys.maxsize
    if max_num_trainers < 1:
        raise ValueError(f"max_num_trainers={max_num_trainers} must be at least 1")
    return max_num_trainers


def _choose_interface(address: str) -> None:
    """Have gloo use the network on which the others reach this host, unless the user has chosen one.

    Left alone it looks the host's own name up, which on many machines leads to another network or to none.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or not address:
        return
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return


def _dump_stacks_on_request() -> None:
    """The agent asks a worker that hangs for its stacks before it ends it; see `torchelastic.agent.supervisor`."""
    if threading.current_thread() is threading.main_thread():
        faulthandler.register(signal.SIGRTMIN + 5, file=sys.__stderr__ or sys.stderr, all_threads=True)
