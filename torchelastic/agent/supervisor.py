"""Starts the workers of this host, passes their output on, sees their death at once, starts them again.

Use it on one event loop, in the main thread: a worker's lifeline hangs on the thread that started it.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path

from torchelastic.agent import host_events as events
from torchelastic.agent.left_output import relay
from torchelastic.agent.plain_group import NOT_AGAIN, STANDS_IN, PlainGroup, misses_ranks, stand_in
from torchelastic.agent.signals import ORDERLY_SIGNALS, handlers
from torchelastic.agent.terminal import Terminal
from torchelastic.agent.worker import Own, Worker, exit_code_of, worker_stdin
from torchelastic.agent.worker_log import WorkerLines, WorkerLog, WorkerLogs
from torchelastic.log_lines import NOWHERE
from torchelastic.processes.exit_codes import STOPPED_EARLY, describe_exit
from torchelastic.processes.family import command_of, in_session
from torchelastic.processes.identity import Process
from torchelastic.processes.left_running import Sessions
from torchelastic.processes.lifeline import dies_with_parent, process_end, signal_main_thread
from torchelastic.processes.local_rank import LOCAL_RANK_VARIABLE
from torchelastic.rendezvous.view import Settings
from torchelastic.rendezvous.worker_rules import AfterLoss, after_loss
from torchelastic.text import shortlist

log = logging.getLogger(__name__)

#: torchrun's, in the arguments of a script.
_LOCAL_RANK = "${local_rank}"
#: Between two looks at what is to be shown of lines that were said again and again.
TICK_S = 1.0
#: Sent to a worker that hangs, before it is ended: `CoordinatorP2P` has registered a dump of all stacks for it.
DUMP_STACK_SIGNAL = signal.SIGRTMIN + 5
#: For a worker that has no coordinator yet: with PYTHONFAULTHANDLER, which the launcher sets, Python dumps all stacks
#: on SIGABRT, and the process ends by it.
ABORT_SIGNAL = signal.SIGABRT
#: A worker that hangs may take so long to write its stacks before it is ended.
DUMP_S = 1.0
#: So many workers are started before anything else is done; each takes some 20 ms.
STARTED_AT_ONCE = 16
#: So long after the end of a worker what it has started and is still there counts as left running.
SETTLED_S = 0.3
#: Of the command line of a process so many characters are shown.
_MOST_NAME = 80
#: Between SIGTERM and SIGKILL to a worker that did not end by itself.
KILL_GRACE_S = 5.0


def restart_delay_s(restarts: int) -> float:
    """Seconds to wait before the restart with this number (1, 2, ..): 0.2, 0.4, .. up to 30."""
    return float(min(0.1 * 2**restarts, 30.0))


class Supervisor:
    """Runs `nproc` workers.

    Args:
        command: argument list of one worker, without the lifeline; `${local_rank}` in it is the worker's number.
        nproc: how many.
        environment: for all of them; LOCAL_RANK and TORCHELASTIC_RESTART_COUNT are added for each.
        max_restarts: per worker.
        sizes: how many workers a group needs, of a run in which no other host takes part; None: others may.
        log_dir: where their output goes as files, None: only to the screen.
        run_is_over: whether the run is closed or closing, so that none is started again.
        publish: is called with each process that has ended, what has failed, and who is given up.
        terminal: shows what they say.
        hidden: (local rank, "stdout" or "stderr") of what it does not show.
        plain: the workers as a group of torchrun's kind; None: others may take part in the run, so they are none.
        own: what each worker has for itself, by its number; empty: nothing.
        sessions: are noted, for the next launcher if this one is killed; None: they are not.
    """

    def __init__(
        self,
        command: Sequence[str],
        nproc: int,
        *,
        environment: Mapping[str, str],
        max_restarts: int,
        sizes: Settings | None = None,
        log_dir: Path | None,
        run_is_over: Callable[[], bool],
        publish: events.Publish = events.ignore,
        terminal: Terminal | None = None,
        hidden: Set[tuple[int, str]] = frozenset(),
        plain: PlainGroup | None = None,
        own: Sequence[Own] = (),
        sessions: Sessions | None = None,
    ) -> None:
        self.workers = [Worker(local_rank) for local_rank in range(nproc)]
        for worker, its in zip(self.workers, own, strict=False):
            worker.own = its
        self.total_restarts = 0
        #: the slowest start-up so far, in seconds from the start of a process to its first request for a group
        self.slowest_start_s = 0.0
        self.all_over = asyncio.Event()
        #: those that are left wait for workers that will not come
        self.too_few = asyncio.Event()
        self._command, self._environment = list(command), dict(environment)
        self._max_restarts, self._sizes = max_restarts, sizes
        self._logs = None if log_dir is None else WorkerLogs(log_dir)
        self._run_is_over, self._publish = run_is_over, publish
        self.terminal = terminal or Terminal()
        self._lines = WorkerLines(self.terminal, hidden)
        self._plain, self._anyone_asked, self._sessions = plain, False, sessions
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watches: dict[int, asyncio.Task[None]] = {}

    def skip(self, wrong: Mapping[int, str]) -> None:
        """Do not start these workers, by their numbers: they were found to compute wrong, earlier in this run."""
        for worker in self.workers:
            if worker.local_rank in wrong:
                worker.computes_wrong, worker.gave_up = wrong[worker.local_rank], True
                log.error("worker %d is not started: earlier in this run %s", worker.local_rank, worker.computes_wrong)

    def start(self) -> None:
        """Start all workers; of many only the first at once, so that a request to stop does not wait for the rest."""
        for worker in self.workers[:STARTED_AT_ONCE]:
            if not worker.gave_up:
                self._spawn(worker)
        self._task(self._start_the_rest())
        self._task(self._tick())

    def on_event(self, event: events.Event) -> None:
        """Take note of what workers say of themselves; of others, nothing is noted."""
        match event:
            case events.WorkerLeaves(pid, local_rank):
                by = self._worker(pid, local_rank)
                if by is not None:
                    by.is_spoken_for_by(pid)
                    by.leaves = True
            case events.WorkerComputesWrong(pid, local_rank, found):
                by = self._worker(pid, local_rank)
                if by is not None:
                    by.computes_wrong = found.why
            case events.WorkerSaid(said, pid, local_rank):
                by = self._worker(pid, local_rank)
                if by is not None:
                    by.is_spoken_for_by(pid)
                    self._take_note(by, said)

    def _take_note(self, worker: Worker, said: events.Statement) -> None:
        match said:
            case events.Statement.ASKS:
                self._anyone_asked = True
                worker.has_finished = False  # it had, and one more round is needed
                if worker.asked_s is None:
                    worker.asked_s = time.monotonic()
                    self.slowest_start_s = max(self.slowest_start_s, worker.asked_s - worker.started_s)
            case events.Statement.FINISHED:
                worker.has_finished = True
            case events.Statement.CAME_LATE:  # while it was started again, if it was
                if worker.restarts:
                    worker.leaves = worker.came_late = True
            case events.Statement.FAILS_FOR_GOOD:
                worker.fails_for_good = True

    @property
    def starting(self) -> list[Worker]:
        """The workers whose processes have not asked for a group yet."""
        return [worker for worker in self.workers if worker.process is not None and worker.asked_s is None]

    @property
    def is_plain_group(self) -> bool:
        """Whether the workers have initialised a group by the environment, and none has asked the agent for one."""
        return self._plain is not None and self._plain.is_initialised and not self._anyone_asked

    @property
    def nobody_asked(self) -> bool:
        """Whether no worker has asked for a group, nor, as far as was seen, initialised one by the environment."""
        return self._plain is not None and not (self._anyone_asked or self._plain.is_initialised)

    def stop_starting(self) -> None:
        """Start none any more, and send SIGTERM to those whose processes have not asked for a group yet.

        A script that never asks for one may take it as a notice, and save: it still needs what it has started (data
        loaders), so that gets no signal, and is ended together with it.
        """
        self._stopping.set()
        for worker in self.starting:
            worker.signal(signal.SIGTERM, is_for_all=False)

    async def stop(self, grace_s: float) -> None:
        """End all workers: SIGTERM, then after `grace_s` SIGKILL, to them and to what they have started."""
        self._stopping.set()
        for worker in self.workers:
            worker.signal(signal.SIGTERM)
        if not await _is_set_within(self.all_over, grace_s):
            for worker in self.workers:
                worker.signal(signal.SIGKILL)
            await _is_set_within(self.all_over, 5.0)

    async def let_go(self) -> None:
        """The launcher ends: what the workers have left running may go on writing to its screen."""
        pipes = self._lines.let_go()
        await asyncio.sleep(0)
        relay(pipes)

    def end_hung(self, pid: int) -> None:
        """Have a worker that hangs write where it hangs, then end it; it is started again like any other."""
        worker = self._worker(pid)
        if worker is not None and worker.process is not None:
            log.error("worker %d (pid %d) did not get ready in time: %s", worker.local_rank, pid, _dump_stacks(pid))
            worker.is_hung = True
            self._task(worker.end(worker.process, (DUMP_S, signal.SIGKILL)))

    def end_idle(self, worker: Worker, why: str) -> None:
        """End a worker that nobody needs any more, and that does not end by itself: it has not failed.

        Args:
            worker: one that is in no group, and asks for none.
            why: for the log, after its name.
        """
        if worker.process is not None:
            pid = worker.speaker or worker.process.pid
            log.warning("worker %d (pid %d) %s: %s", worker.local_rank, pid, why, _dump_stacks(pid))
            worker.leaves = worker.was_idle = True
            ends = (DUMP_S, signal.SIGTERM), (KILL_GRACE_S, signal.SIGKILL)
            self._task(worker.end(worker.process, *ends))

    # --- inside -----------------------------------------------------------------------------------

    async def _start_the_rest(self) -> None:
        for worker in self.workers[STARTED_AT_ONCE:]:
            await asyncio.sleep(0)
            is_ending = self._plain is not None and self._plain.is_ending  # `_end_group` starts it, or nobody does
            if worker.started_s or worker.gave_up or is_ending:
                continue
            if self._stopping.is_set():
                worker.gave_up = True
                self._check_remaining(worker)
            else:
                self._spawn(worker)

    def _worker(self, pid: int, local_rank: int | None = None) -> Worker | None:
        """The worker with this process, or else the one with this number, if one is given."""
        by_pid = [worker for worker in self.workers if worker.process is not None and worker.has(pid)]
        by_number = [worker for worker in self.workers if worker.local_rank == local_rank]
        return next(iter((*by_pid, *by_number)), None)

    def _spawn(self, worker: Worker) -> None:
        environment = dict(self._environment)
        if self._plain is not None:
            environment |= self._plain.variables(worker.local_rank, may_meet=not self._anyone_asked)
        environment |= {
            "LOCAL_RANK": str(worker.local_rank),
            LOCAL_RANK_VARIABLE: str(worker.local_rank),
            "TORCHELASTIC_RESTART_COUNT": str(worker.restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(self._max_restarts),
            **worker.own.variables,
        }
        command = [word.replace(_LOCAL_RANK, str(worker.local_rank)) for word in self._command]
        command = stand_in(command) if worker.has_stand_in else command
        stdin = worker_stdin(len(self.workers))
        worker.process = subprocess.Popen(
            dies_with_parent(command, ORDERLY_SIGNALS, worker.own.cpus),
            env=environment,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that a worker is ended together with its data loaders
        )
        if self._sessions is not None:
            self._sessions.begun(worker.process.pid)
        worker.tail.clear()
        worker.is_hung, worker.position, worker.traceback_s = False, NOWHERE, None
        worker.started_s, worker.asked_s = time.monotonic(), None
        worker.has_finished = worker.fails_for_good = False
        worker.trainers.clear()
        file = None if self._logs is None else self._logs.opened(worker.local_rank, worker.restarts)
        worker.log_file = file
        assert worker.process.stdout is not None
        assert worker.process.stderr is not None
        readers = [
            self._task(
                self._lines.pass_on(worker.local_rank, "stdout", worker.process.stdout, file, prompts=stdin is None)
            ),
            self._task(self._lines.pass_on(worker.local_rank, "stderr", worker.process.stderr, file, worker.on_line)),
        ]
        watch = self._or_end(worker, self._watch(worker, worker.process, readers, file))
        self._watches[worker.local_rank] = self._task(watch)

    async def _or_end(self, worker: Worker, watch: collections.abc.Coroutine[None, None, None]) -> None:
        try:
            await watch
        except Exception:  # nobody waits for a worker of which nothing is known any more
            log.exception("this is a bug in torchelastic: worker %d ended, and is not started again", worker.local_rank)
            worker.process, worker.gave_up = None, True
            self._check_remaining(worker)

    async def _watch(
        self,
        worker: Worker,
        process: subprocess.Popen[bytes],
        readers: Sequence[asyncio.Task[None]],
        file: WorkerLog | None,
    ) -> None:
        await process_end(process.pid)
        # the others are notified before anything else is done: their recovery waits for nothing here
        worker.process, worker.ended_s = None, time.time()
        self._publish(events.WorkerExited(worker, process.pid, self.total_restarts))
        self._look_at_plain_group()
        # its data loaders, if it left any; before it is reaped, for then its number may become another process's
        worker.end_what_it_left(process.pid, exit_code_of(process.pid))
        worker.exit_code = process.wait()
        if worker.exit_code == 0 and self._sessions is not None:
            self._sessions.ended_in_order(process.pid)
        worker.leaves = worker.leaves or worker.exit_code == STOPPED_EARLY
        await asyncio.wait(readers, timeout=1.0)
        if worker.exit_code == 0 and in_session(process.pid):
            await asyncio.sleep(SETTLED_S)  # some of Python's own helpers end just after what has started them
            _name_left(worker, in_session(process.pid))
        self.terminal.ended(worker.local_rank)
        if file is not None:
            file.close()
        await self._decide(worker, process.pid)

    async def _decide(self, worker: Worker, pid: int) -> None:
        assert worker.exit_code is not None
        if self._plain is not None and self._plain.is_ending:
            if worker.exit_code not in (0, -signal.SIGTERM, -signal.SIGKILL):
                self._publish(events.WorkerFailed(worker.failed()))
            return  # who ends the group goes on when all its workers have ended
        if worker.exit_code != 0 and not self._stopping.is_set() and not worker.leaves:
            log.info("worker %d (pid %d): %s", worker.local_rank, pid, describe_exit(worker.exit_code))
            misses = worker.asked_s is None and misses_ranks(worker.failed().last_error)
            if misses and self._plain is None and not worker.has_stand_in:
                if not any(other.has_stand_in for other in self.workers):
                    log.warning("worker %d: %s", worker.local_rank, STANDS_IN)
                worker.has_stand_in = True
                self._spawn(worker)
                return
            after = after_loss(
                worker.exit_code,
                has_asked=worker.asked_s is not None,
                is_plain_group=self.is_plain_group,
                run_is_over=self._run_is_over(),
                restarts_left=0 if worker.computes_wrong else self._max_restarts - worker.restarts,
                fails_for_good=worker.fails_for_good,
            )
            if after is AfterLoss.ALL_END and self._plain is not None:
                await self._end_group(worker, self._plain)
                return
            worker.gave_up = after is AfterLoss.NOT_RESTARTED
            self._publish(events.WorkerFailed(worker.failed()))
            for each in {pid, *(trainer.pid for trainer in worker.trainers)} if worker.gave_up else ():
                self._publish(events.WorkerNotRestarted(each))
            if misses:
                log.error("worker %d: %s", worker.local_rank, NOT_AGAIN)
            if not worker.gave_up:
                worker.restarts += 1
                self.total_restarts += 1
                is_stopped = await _is_set_within(self._stopping, restart_delay_s(worker.restarts))
                if self._plain is not None and self._plain.is_ending:
                    return  # as above
                if not is_stopped:
                    self._spawn(worker)
                    return
        worker.gave_up = worker.gave_up or self._stopping.is_set()
        self._check_remaining(worker)

    async def _end_group(self, lost: Worker, plain: PlainGroup) -> None:
        """All workers end with the one that is lost, and are started again if they may."""
        goes_on = plain.begins_to_end(lost, describe_exit(lost.exit_code))
        for worker in self.workers:
            worker.gave_up = not goes_on and not worker.is_over
            if worker.process is not None:
                self._task(worker.end(worker.process, (0.0, signal.SIGTERM), (KILL_GRACE_S, signal.SIGKILL)))
        self._publish(events.WorkerFailed(lost.failed()))
        others = [watch for local_rank, watch in self._watches.items() if local_rank != lost.local_rank]
        await asyncio.gather(*others)
        if goes_on and not await _is_set_within(self._stopping, restart_delay_s(lost.restarts + 1)):
            plain.begins_anew(self.workers)
            self.total_restarts += len(self.workers)
            for worker in self.workers:
                self._spawn(worker)
            return
        for worker in self.workers:
            worker.gave_up = worker.exit_code != 0
        self._check_remaining(lost)

    def _look_at_plain_group(self) -> None:
        if self._plain is not None and not self._anyone_asked:
            self._plain.look()

    def _check_remaining(self, worker: Worker) -> None:
        """A worker is over for good: so may all be, or too many."""
        left, sizes = sum(not other.is_over for other in self.workers), self._sizes
        goes_on = sizes is None or sizes.usable(left) or self._run_is_over() or self._stopping.is_set()
        if not left:
            self.all_over.set()
        elif worker.gave_up and sizes is not None and not goes_on:
            why = f"fewer than {sizes.least} are left, and no other host takes part"
            log.error("worker %d is not started again; %s: the run ends", worker.local_rank, why)
            self.too_few.set()

    async def _tick(self) -> None:
        while not self.all_over.is_set():
            await _is_set_within(self.all_over, TICK_S)
            self._look_at_plain_group()

    def _task(self, work: collections.abc.Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)  # the event loop itself keeps only weak references
        task.add_done_callback(self._tasks.discard)
        return task


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except asyncio.TimeoutError:
        return False
    return True


def _name_left(worker: Worker, pids: Sequence[int]) -> None:
    """Say what a worker that has ended in order has left running; nothing, if that is nothing."""
    names = [f"{' '.join(command_of(pid).split())[:_MOST_NAME]} (pid {pid})" for pid in pids]
    if names:
        log.warning(
            "worker %d has left running what it has started: %s; that goes on after this launcher's end, but not after "
            "that of its container or job: where it has to, wait for it in the script",
            worker.local_rank, shortlist(names),
        )  # fmt: skip


def _dump_stacks(pid: int) -> str:
    """Have a process that hangs write its stacks to its log, stopped or not; returns what to say of that.

    Where it is a wrapper script, what that has started does.
    """
    if Process.of(pid).started_ticks < 0:
        return "it has just ended by itself"
    for number in (DUMP_STACK_SIGNAL, ABORT_SIGNAL):
        able = handlers(pid, number)
        for each in able:
            with suppress(FileNotFoundError, ProcessLookupError):
                if number == ABORT_SIGNAL:
                    _, hard = resource.prlimit(each, resource.RLIMIT_CORE)
                    resource.prlimit(each, resource.RLIMIT_CORE, (0, hard))  # the stacks are wanted, and no core file
                signal_main_thread(each, number)  # before SIGCONT: it dumps before it does anything else
                os.kill(each, signal.SIGCONT)  # a stopped process must run to write anything
        if able:
            return "its stacks follow in its log"
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    return "it cannot write its stacks"
