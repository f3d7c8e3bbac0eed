"""CoordinatorP2P: process groups over a rendezvous, made anew in the same process whenever the membership changes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from torchelastic.coordinator import Coordinator
from torchelastic.errors import DrainedException, NonRetryableException, RetryableException, StopException
from torchelastic.group.communicators import wait_for_collectives
from torchelastic.group.peers import Alone, Peers
from torchelastic.join_rules import Dismissal, GroupChange, can_go_on_without, group_change, may_be_dismissed
from torchelastic.metrics import profile
from torchelastic.observe.ledger.meter import this_worker
from torchelastic.p2p import hang_location, last_group
from torchelastic.p2p.course_agreement import CourseAgreement
from torchelastic.p2p.dcp_leftovers import forget_last_group
from torchelastic.p2p.dismissals import dismiss, find_dismissal
from torchelastic.p2p.group_peers import GroupPeers
from torchelastic.p2p.groups import ProcessGroups
from torchelastic.p2p.hangs import DEFAULT_TIMEOUT_MS, HangPolicy
from torchelastic.p2p.heartbeat import Heartbeat
from torchelastic.p2p.options import (
    checked_backend,
    checked_init_method,
    checked_max,
    choose_gpu,
    choose_interface,
    dump_stacks_on_request,
    needs_gpu,
    open_rendezvous,
    smallest_group,
)
from torchelastic.p2p.recovery_time import Recovery, RecoveryTimer, report
from torchelastic.p2p.step_agreement import StepAgreement
from torchelastic.p2p.stragglers import StragglerPolicy, compare_rates
from torchelastic.p2p.termination import leave_on_sigterm
from torchelastic.p2p.watchdog import FORMING, Watchdog
from torchelastic.processes.script_import import check_not_importing
from torchelastic.rendezvous.client import AgentError
from torchelastic.rendezvous.handler import (
    RendezvousClosedException,
    RendezvousDrainedException,
    RendezvousHandler,
    RendezvousNonRetryableError,
    RendezvousTimeoutException,
)
from torchelastic.rendezvous.loss import LossWitness
from torchelastic.rendezvous.records import NO_ROUND, Round, RoundState, StateStatus
from torchelastic.rendezvous.url import RendezvousUrlError
from torchelastic.rendezvous.worker_rules import is_replaced
from torchelastic.state import State
from torchelastic.worker_stats import WorkerStats

log = logging.getLogger(__name__)

#: Beyond the bound for a step that hangs: how much later a live worker may get ready before it is taken for hung.
PATIENCE_MARGIN_S = 5.0


class CoordinatorP2P(Coordinator):
    """Workers as peers: whoever is there trains, without a master.

    Use one object per process, on the training thread.

    Args:
        c10d_backend: "gloo" or "nccl"; with torch 2.15 also one of its two by name, "nccl2" or "nccl-legacy"; or one
            for each kind of device, "cpu:gloo,cuda:nccl". Default: nccl where every worker of this host has its GPU,
            else gloo.
        init_method: rendezvous URL (`etcd://host:port/run_id?min_workers=..&max_workers=..`, or a scheme of your own);
            default: what `torchelastic run` has set; without the launcher this process trains alone, without etcd.
        max_num_trainers: no group is larger; default: the URL's `max_workers`.
        process_group_timeout: of collectives, in milliseconds. A peer that dies is noticed within milliseconds all
            the same; the time-out is for those that hang before it is known how long steps take, and the bound for
            work of one rank that the others wait for. One that you choose is kept: without a `hang_policy`, a rank in
            its own code is no hang before it, whatever it does there.
        hang_policy: how long a step may take, by those before it; default: `HangPolicy()`.
        straggler_policy: who is a straggler, and whether it has to go; default: `StragglerPolicy()`, which reports.

    Raises:
        ValueError: an unknown backend, a rendezvous URL that cannot be used, or none where another launcher (torchrun,
            srun) has started several processes.
    """

    MONITOR_PROGRESS_FREQ = 1000

    #: Relative progress rate of this worker, the best worker's being 1; not there until it was computed once.
    last_relative_prog_rate: float
    _courses: CourseAgreement | None = None

    def __init__(
        self,
        c10d_backend: str | None = None,
        init_method: str | None = None,
        max_num_trainers: int | None = None,
        process_group_timeout: int = 10000,
        hang_policy: HangPolicy | None = None,
        straggler_policy: StragglerPolicy | None = None,
    ) -> None:
        this_worker().set_up_log()
        self.c10d_backend = checked_backend(c10d_backend)
        self.init_method = checked_init_method(init_method)
        self.rendezvous: RendezvousHandler = open_rendezvous(self.init_method)
        self.max_num_trainers = checked_max(max_num_trainers, self.init_method)
        self.min_workers = smallest_group(self.init_method)
        self.process_group_timeout = process_group_timeout
        self.rank, self.world_size = -1, 0
        self.store: Store | None = None
        self.is_worker_straggler = self.stop_training = False
        self.monitor_progress_step = 0
        self._groups = ProcessGroups(
            self.c10d_backend, timedelta(milliseconds=process_group_timeout), self.rendezvous.serves_port
        )
        self._agreement = StepAgreement(None)
        self._peers: Peers = Alone()
        self._committed_steps = self._times_straggler = 0
        self._state_status = StateStatus.INITIAL
        self._failed = self._leaves_last = False
        self.last_recovery: Recovery | None = None
        self._timer = RecoveryTimer(time.monotonic)
        self._witness = LossWitness()
        self._watchdog = Watchdog(
            hang_policy or HangPolicy(),
            process_group_timeout / 1000,
            self._abort_group,
            times_out_itself=not needs_gpu(self.c10d_backend),
            keeps_timeout=hang_policy is None and process_group_timeout != DEFAULT_TIMEOUT_MS,
        )
        self._straggler_policy = straggler_policy or StragglerPolicy()
        # read by the agent's thread to decide whether a change of the round concerns this worker
        self._joined_round, self._last_joined, self._last_trained = 0, NO_ROUND, NO_ROUND
        self._is_broken = threading.Event()
        self.rendezvous.on_round(self._on_round)
        dump_stacks_on_request()
        leave_on_sigterm(self.rendezvous)

    @property
    def coordinator_process_group(self) -> dist.ProcessGroup | None:
        """The gloo group for control collectives; None outside a group."""
        return self._groups.control

    # --- getting into a group ---------------------------------------------------------------------

    @profile(group="torchelastic")
    def rendezvous_barrier(self) -> tuple[Store, int, int]:
        """Leave the present group and wait for the next one; see `Coordinator`."""
        check_not_importing("asks for a group")
        self._joined_round = 0  # from here on no change of a round concerns a group of ours
        if self._courses is not None:
            self._courses.end()
        self._watchdog.leave()
        self._groups.destroy()
        self._is_broken.clear()
        before = self._last_joined = self.rendezvous.joined
        self.rendezvous.report(
            step=self._committed_steps,
            state_status=self._state_status,
            failed=self._failed,
            patience_s=self._watchdog.patience_s + PATIENCE_MARGIN_S,
        )
        try:
            self.store, self.rank, self.world_size = self.rendezvous.next_rendezvous()
        except RendezvousDrainedException as error:
            self._go()
            raise DrainedException(str(error)) from error
        except RendezvousClosedException as error:
            if self._committed_steps < self.rendezvous.round.step:
                # the others have finished without this worker: who saves results where `rank == 0` must not save these
                missing = self.rendezvous.round.step - self._committed_steps
                log.warning("the run has ended, and this worker lacks %d of its steps: its state is no result", missing)
                self.rank, self.world_size = -1, 0
            self._finish()
            raise StopException(str(error)) from error
        except RendezvousTimeoutException as error:
            raise NonRetryableException(f"no group within the rendezvous time-out: {error}") from error
        except (RendezvousNonRetryableError, RendezvousUrlError) as error:
            raise NonRetryableException(str(error)) from error
        self._joined_round = self.rendezvous.joined.number
        self.rendezvous.need(0)
        lost = self._witness.explains(before, self.rendezvous.joined)
        self._witness.begins(self.rendezvous.joined)
        self._groups.timeout = self._watchdog.came_back(lost)
        self._timer.because(lost, was_spare=this_worker().is_spare)
        self._timer.reached("agree")
        self.is_worker_straggler, self._times_straggler = False, 0
        self._failed = False
        log.info("round %d: rank %d of %d", self._joined_round, self.rank, self.world_size)
        return self.store, self.rank, self.world_size

    @profile(group="torchelastic")
    def init_process_group(self) -> None:
        """Make the default group of `torch.distributed` (and a gloo one beside NCCL) of this round's members."""
        assert self.store is not None, "init_process_group() comes after rendezvous_barrier()"
        self.monitor_progress_step = 0
        self._raise_if_broken()
        choose_interface(self.rendezvous.address)
        if needs_gpu(self.c10d_backend):
            choose_gpu()
        heartbeat = Heartbeat(self.store, self.rank, self.world_size)
        self._watchdog.enter(FORMING, heartbeat)
        self._watchdog.publish(self.store, self.rank)
        forget_last_group()
        self._groups.form(self.store, self.rank, self.world_size)
        if self.rank == 0:
            hang_location.log_outliers(hang_location.collect(self.store, self.world_size))
        self._watchdog.new_round()
        self._watchdog.enter("bringing the states in sync")
        group, number = (self._groups.control if self.world_size > 1 else None), self._joined_round
        self._agreement = StepAgreement(group)
        self._courses = None
        if group is not None:
            self._courses = CourseAgreement(
                self.store, self.rank, self.world_size, self._raise_if_ended, self._abort_group
            )
            heartbeat.also = self._courses.look
        self._peers = (
            Alone(number)
            if group is None
            else GroupPeers(
                group, self.store, self.rank, self.world_size, number, self._raise_if_broken, self.rendezvous.address,
                heartbeat,
            )
        )  # fmt: skip
        self._timer.reached("re_form")

    def nobody_has_progress(self) -> bool | None:
        """Whether a checkpoint is wanted: the best state in this round is a fresh or a torn one."""
        round_ = self.rendezvous.joined
        return None if round_.number == 0 else round_.state_status in (StateStatus.INITIAL, StateStatus.PARTIAL)

    def state_changed(self, state: State, *, synced: bool) -> None:
        """Remember how complete this worker's state is, for the choice of the next group's source."""
        if synced:
            if state.step_course is not None:
                state.step_course.enter(self._courses)
            joined = self.rendezvous.joined
            if joined.step > self._committed_steps and joined.state_status is StateStatus.COMPLETE:
                self._last_trained = self._last_joined  # others have committed a step in it
            steps = max(self._committed_steps, joined.step)
            may_go_back = state.loads_parts or (state.step_course is not None and state.step_course.goes_back)
            self._committed_steps = getattr(state, "step", steps) if may_go_back else steps
            self._state_status = StateStatus.COMPLETE
            self._timer.reached("sync")
            self._watchdog.begin(self.rank, self.world_size, self._committed_steps)
        elif self._state_status is not StateStatus.INITIAL:
            self._state_status = state.status

    # --- after each step --------------------------------------------------------------------------

    def may_commit(self) -> bool:
        """False where this host was without contact to etcd for so long that another group may be training by now.

        Where the group is NCCL's, waits for the GPU, and raises RetryableException if its results cannot be trusted.
        So it does if a collective has failed, and the step has caught the error.
        """
        wait_for_collectives()
        if self._groups.has_failed:
            raise RetryableException("a collective has failed, and the step has caught that error: it is repeated")
        return self.rendezvous.may_commit()

    def why_failed(self, error: Exception) -> Exception:
        """Another rank may have done something else in the step, which has cut this one's collective."""
        return error if self._courses is None else self._courses.cause_of(error)

    def step_committed(self) -> None:
        """Count the step: the worker with the most is the source after a failure."""
        self._committed_steps += 1
        self._last_trained = self.rendezvous.joined
        self._watchdog.step_ended()
        recovery = self._timer.reached("step")
        if recovery is not None:
            self.last_recovery = recovery
            report(recovery)

    @profile(group="torchelastic")
    def should_save_checkpoint(self) -> bool:
        """False: the state decides, or a subclass."""
        return False

    @contextmanager
    def saving(self) -> Iterator[None]:
        """No step is timed meanwhile, and the ledger counts the time as a save."""
        with self._watchdog.resting(), this_worker().saving():
            yield

    def peers(self) -> Peers:
        """The present group, for collective saves and restores; one object per group."""
        return self._peers

    def slow_section(self) -> AbstractContextManager[None]:
        """Whoever is in it is waited for until the time-out of collectives; see `Coordinator`."""
        return self._watchdog.slow_section()

    def somebody_leaves(self) -> bool:
        """Whether a member of the present group was asked to leave the run."""
        return self.rendezvous.somebody_leaves()

    @profile(group="torchelastic")
    def should_rendezvous(self, state: State) -> bool:
        """Whether all members leave now, after a committed step: a newcomer waits, a member leaves, or one is lost."""
        if self._is_broken.is_set():
            return True
        if self.rendezvous.should_pause():
            log.warning("no contact to etcd for too long: training pauses, its state intact, until etcd is back")
            return True
        makes_room = self.world_size < self.max_num_trainers and self.rendezvous.num_nodes_waiting() > 0
        try:
            return self._agreement.leave(makes_room or self.rendezvous.somebody_leaves(), state)
        except RuntimeError as error:
            # the step is committed: a peer that is lost now costs a new group, and nothing is undone
            log.info("a peer was lost after the step: %s", error)
            self._failed_by(error)
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
        """End the run for all workers and wait until all know.

        A peer that lost its last step to a failure at this very moment is synchronized first, in one more group: then
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
        comparison = compare_rates(self._straggler_policy, rate, self._times_straggler, self._peers)
        if comparison is None:
            return
        self.last_relative_prog_rate = comparison.relative
        self.is_worker_straggler = comparison.is_straggler
        self._times_straggler = comparison.times
        may_go = self.world_size - comparison.stragglers >= self.min_workers and self.rendezvous.can_leave()
        if comparison.has_to_go and may_go:
            log.warning("rank %d is a straggler: it leaves the run, by the policy", self.rank)
            self.rendezvous.leave()

    @profile(group="torchelastic")
    def report_progress(self, state: State) -> None:
        """Nothing: for subclasses."""

    @profile(group="torchelastic")
    def on_error(self, e: BaseException) -> None:
        """Abort the group at once, so that every peer is notified of the failure now and not after its time-out."""
        self._failed = True
        self._failed_by(e)
        log.debug("%s: %d connections cut", type(e).__name__, self._groups.abort())

    def fails_for_good(self) -> None:
        """Have the agent start no other process in this one's place."""
        self.rendezvous.fail_for_good()

    def computes_wrong(self, step: int, why: str) -> None:
        """Have the agent and the ledger know it; see `Coordinator`."""
        this_worker().computes_wrong(why)
        self.rendezvous.computes_wrong(step, why)

    def group_change(self, *, in_sync: bool) -> GroupChange | None:
        """As the rendezvous knows it; see `Coordinator`."""
        if self._joined_round == 0:
            return None
        return group_change(self._last_trained, self.rendezvous.joined, self.rank, in_sync=in_sync)

    def go_on_without(self, change: GroupChange, error: str) -> None:
        """Leave a note for the newcomers in the store of the round; see `Coordinator`."""
        is_for_good = can_go_on_without(change, self.min_workers)
        dismiss(self.rendezvous.joined, change.newcomers, Dismissal(error, is_for_good))

    def dismissal(self, *, may_wait: bool) -> Dismissal | None:
        """Look for such a note, if others of the group hold the state of the run; see `Coordinator`."""
        joined = self.rendezvous.joined
        if self._joined_round == 0 or not may_be_dismissed(self._last_trained, joined, self.rank):
            return None
        return find_dismissal(joined, self.rank, may_wait=may_wait, now=lambda: self.rendezvous.round)

    def wait_for_as_many(self, change: GroupChange) -> None:
        """Ask for no smaller group the next time; see `Coordinator`."""
        self.rendezvous.need(change.former_size)

    def leaves_last(self) -> bool:
        """Whether this worker was asked to leave, those who stay are too few, and its state is the best there is."""
        return self._leaves_last

    def deadline_is_near(self, own: bool) -> bool:
        """Exchanged with the agreement on leaving the group; see `Coordinator`."""
        return self._agreement.deadline_is_near(own)

    def leave(self) -> None:
        """Ask the agent to let this worker leave at an agreed step, as `torchelastic drain` does."""
        try:
            self.rendezvous.leave()
        except AgentError as error:
            log.warning("could not ask to leave, so this worker goes on: %s", error)

    def stop_early(self) -> None:
        """Give the group up and hang up on the agent, which does not start this worker again; waits for nobody."""
        self.rendezvous.stop()
        self._hang_up()

    def loop_was_left(self) -> None:
        """Give the group up and hang up on the agent, as this process's end would: the others go on at once."""
        if not self.stop_training:
            self._hang_up()

    # --- inside -----------------------------------------------------------------------------------

    def _hang_up(self) -> None:
        self._joined_round, self.stop_training = 0, True
        self._watchdog.end()
        self._groups.destroy()
        self.rendezvous.close()

    def _go(self) -> None:
        """This worker was asked to leave the run, and has left it: it is no rank of it any more."""
        self._leaves_last = self._state_status is StateStatus.COMPLETE and self.rendezvous.leaves_last()
        is_over = self._leaves_last or self.rendezvous.round.state is RoundState.BROKEN
        others = "too few workers are left to go on" if is_over else "the others go on"
        log.warning("drained; %s", others)  # lines of the log say after which step of the state
        self.rank, self.world_size = -1, 0
        self._hang_up()
        last_group.be_absent(self._groups, self.rank, self.world_size, "this worker has left the run")

    def _on_round(self, round_: Round) -> None:
        """On the agent's thread: if the group of this worker is no more, wake whoever waits in it."""
        self._witness.sees(round_)
        if self._joined_round > 0 and is_replaced(self.rendezvous.joined, round_):
            self._is_broken.set()
            self._abort_group()

    def _failed_by(self, error: BaseException) -> None:
        """The step, or what followed it, has failed; an error of our own abort says nothing of a peer."""
        self._timer.noticed()
        self._watchdog.failed(error)
        if not self._is_broken.is_set() and not self._watchdog.has_cut:
            self._witness.sees_error(error)

    def _abort_group(self) -> None:
        """On the watchdog's thread, or the agent's."""
        self._timer.noticed()
        self._groups.abort()
        self.rendezvous.interrupt()

    def _raise_if_broken(self) -> None:
        round_ = self.rendezvous.round
        if self._joined_round > 0 and is_replaced(self.rendezvous.joined, round_):  # a handler may have no rounds
            self._is_broken.set()
        if self._is_broken.is_set():
            raise RuntimeError(f"round {self._joined_round} broke while its group was being formed: {round_.because}")

    def _raise_if_ended(self) -> None:
        """For who waits for the others in a step: they come no more where one has finished, either."""
        self._raise_if_broken()
        if self.rendezvous.round.state in (RoundState.CLOSING, RoundState.CLOSED):
            raise RuntimeError("another worker has ended the run")

    def _finish(self) -> None:
        """Publish that this worker is done, release those that wait for it, and leave when all are done."""
        if self.stop_training:
            return
        self._watchdog.leave(is_over=True)
        self.rendezvous.signal_done(self._committed_steps)
        self._groups.abort()
        self.stop_training = self.rendezvous.wait_closed()
        if self.stop_training:
            self._hang_up()
            self._form_last_group()

    def _form_last_group(self) -> None:
        """After the run: what `torch.distributed` is asked for by the rest of the script; see `last_group`."""
        joined = self.rendezvous.joined
        if joined is NO_ROUND or self.store is None:  # a handler may have no rounds
            return
        is_in_it = self.rank >= 0 and joined.number == self.rendezvous.round.number
        last_group.form_if_all_come(
            self._groups, self.store, self.rank, self.world_size, self.process_group_timeout, is_in_it=is_in_it
        )
