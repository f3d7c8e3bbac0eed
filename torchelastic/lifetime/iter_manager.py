"""When a training loop has to save before its deadline: one call per iteration, the same answer on every rank."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.policy.arguments import real_number, whole_number
from torchelastic.lifetime.deadline import Deadline, nearest
from torchelastic.lifetime.deadline_monitor import Lifetime
from torchelastic.lifetime.decision import StopDecision
from torchelastic.lifetime.group_monitor import GroupMonitor
from torchelastic.lifetime.iteration_times import COMPILING, WARM_UP, IterationTimes
from torchelastic.lifetime.manager_state import (
    FILE_NAME,
    ManagerState,
    SaveTimes,
    is_to_note,
    read_state,
    remove_state,
    write_state,
)
from torchelastic.lifetime.progress_file import ProgressFile, StepCount, Steps
from torchelastic.lifetime.sources.detection import close_all, detect
from torchelastic.metrics import publish_metric
from torchelastic.processes.exit_codes import STOPPED_EARLY

log = logging.getLogger(__name__)


class IterManager:
    """Decides when to save before a deadline, and when to stop. On every rank, on the training thread.

    ::

        manager = IterManager(total_iters=max_iters)
        while True:
            manager.iter()
            if manager.should_save_ckpt():
                with manager.saving():
                    save_checkpoint()
            if manager.should_stop:
                break
            ...  # train
        manager.close()
        sys.exit(manager.exit_code)

    `iter()` measures the iterations; where torch.distributed is initialised, the ranks agree through a tiny all-reduce,
    begun in one iteration and read in a later one. Near the deadline they agree in each iteration. No random number
    generator and no tensor of the training is used.

    Args:
        total_iters: of the run, to forecast the rest of it; 0 or less: not known.
        redundant_time: seconds to keep in reserve for what is not measured; the margins of bounds that rest on few
            samples are part of it. A negative number counts as 0.
        save_ckpt_time: seconds that a save takes at least. 0: not known; then, if no attempt of the job has
            measured one, there is a trial save when a deadline is known and less than an hour away.
        use_torch_compile: whether the first iterations may compile: then `COMPILING` of them are not counted, else
            `WARM_UP`.
        predict_freq: changes nothing; velastic takes it too.
        velastic_dir: folder of `manager_state.json`, for the next attempt of the job.
        deadline: when to be done; None: the nearest of `sources.detect()`, which `close` ends, without signals if this
            is not made on the main thread. `nearest([])`: never.
        tiers: names of the storage tiers, the most durable first; `decision.tier` is one of them.
        confidence: that the save is done in time, above 0 and below 1.
        timeout_s: after which a missing rank is an error.
        clock: monotonic seconds; that of the deadline.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range, or an environment variable with a deadline holds no date.

    Attributes:
        total_iters: of the run; -1: not known.
        velastic_dir: folder of the state file.
        start_time: when the present iteration has begun, by the clock; None: none has yet.
        given_up_s: seconds that were left when the save before the deadline was done; None: not yet.
    """

    given_up_s: float | None = None
    _complain_at = math.inf  # by the count of calls of `iter`
    _has_begun = _is_counting = _is_past_end = _is_closed = _is_over = False
    start_time: float | None = None
    _apart_s = 0.0  # how long saves took in the present iteration
    _save_began_s: float | None = None  # one that nobody measures
    _answered: StopDecision | None = None  # what should_save_ckpt() has said yes to,
    _asked_tier: str | None = None  # and the tier that it asked for, until a save was measured
    _noted_s = math.inf  # what was left of the time when that was last noted
    _stored: ManagerState | None = None  # what stands in the state file

    def __init__(
        self,
        total_iters: int = -1,
        redundant_time: float = 5,
        save_ckpt_time: float = 0,
        use_torch_compile: bool = False,
        predict_freq: int = 5,
        velastic_dir: str | Path = ".velastic",
        *,
        deadline: Deadline | None = None,
        tiers: Sequence[str] = ("checkpoint",),
        confidence: float = 0.99,
        timeout_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        total = whole_number("total_iters", total_iters, at_least=-sys.maxsize, remedy="give the iterations, or -1")
        self.total_iters = max(-1, total)
        self.predict_freq = predict_freq
        self.velastic_dir = Path(velastic_dir)
        self._count = StepCount()
        self._times = IterationTimes(warm_up=COMPILING if use_torch_compile else WARM_UP)
        self._saves = SaveTimes(tiers)
        reserve_s = max(0.0, real_number("redundant_time", redundant_time, above=-math.inf, remedy="give seconds"))
        save_s = real_number("save_ckpt_time", save_ckpt_time, remedy="give seconds, 0 or more")
        self._monitor = GroupMonitor(
            nearest([deadline]),
            self._times,
            lambda: self._saves.expected_s,
            Lifetime(reserve_s=reserve_s, confidence=confidence, unknown_save_s=save_s or None),
            least_save_s=save_s,
            timeout_s=real_number("timeout_s", timeout_s, above=0.0, remedy="give seconds, above 0"),
            clock=clock,
        )
        self._clock = clock
        self._progress = ProgressFile.from_environment()
        self._sources = detect(clock=clock) if deadline is None else []  # last: what it starts is to be closed
        if deadline is None:
            self._monitor.deadline = nearest(self._sources)

    # --- in the loop --------------------------------------------------------------------------------------------------

    def iter(self) -> None:
        """An iteration begins. Every rank calls it, as often as the others.

        Raises:
            RankMissingError: timed out waiting for a rank, or its process has ended; names it.
        """
        now_s = self._clock()
        self._count.calls += 1
        self._begin_attempt()
        is_new_group = self._monitor.follow_group()
        if not is_new_group and self.start_time is not None:
            self._save_has_ended(now_s)
            self._times.observe(max(0.0, now_s - self.start_time - self._apart_s))
        self._apart_s = 0.0
        self.start_time = now_s
        self._count.begun += 1
        if is_new_group or self._monitor.is_due(now_s, self._count.calls):
            self._check(now_s, is_new_group)
        if self._count.calls >= self._complain_at:
            self._complain()

    def should_save_ckpt(self) -> bool:
        """Whether to save now, at the same iteration on all ranks; `should_stop` says whether to stop after it.

        True once before a deadline, then to stop. Also True, to go on after it, at a notice that does not say how much
        time is left (SIGTERM without a known grace), and once per job to measure a save. The checkpoint then holds what
        was trained before the present iteration. The first rank writes the count of iterations for the next
        attempt.
        """
        save = self._monitor.save
        if save is None or save is self._answered:
            return False
        self._answered, self._asked_tier = save, save.tier
        self._save_began_s = self._clock()
        log.warning("iteration %d: %s (deadline: %s)", self._count.begun, save, self._monitor.deadline_text())
        if save.stops:
            self._complain_at = self._count.calls + 2
            self.given_up_s = None
            publish_metric("torchelastic", "lifetime.given_up.expected.ms", 1000.0 * save.given_up_s)
        self._save_state()
        return True

    @property
    def should_stop(self) -> bool:
        """Whether to leave the loop, because the deadline is near: after a save, if `should_save_ckpt()`."""
        return self._monitor.stop is not None

    @property
    def exit_code(self) -> int:
        """Exit code of the script: `STOPPED_EARLY` if it `should_stop`, to be started again; else 0."""
        return STOPPED_EARLY if self.should_stop else 0

    @property
    def decision(self) -> StopDecision | None:
        """The last decision near a deadline; None: none was near yet."""
        return self._monitor.decision

    @contextmanager
    def saving(self, tier: str | None = None) -> Iterator[None]:
        """Measures a save: `with manager.saving(): save()`. It does not count as part of the iteration.

        Without it, the time from `should_save_ckpt()` to the next `iter()` counts as the save. A save in the background
        takes until it is durable: call `save_took` then.

        Args:
            tier: of the save; None: that of the decision, else the most durable.

        Raises:
            ValueError: there is no such tier.
        """
        tier = self._tier() if tier is None else tier
        began_s, step = self._clock(), self._count.done
        self._save_began_s = None
        self._last_save_begins(tier)
        try:
            yield
        except Exception:
            self._saves.ends(tier)
            self._save_state()
            raise
        finally:
            took_s = max(0.0, self._clock() - began_s)
            self._apart_s += took_s
        self._count.saved = step
        self.save_took(took_s, tier)

    def save_took(self, seconds: float, tier: str | None = None) -> None:
        """A save took so long until it was durable. On the training thread; arguments and errors as `saving`."""
        self._begin_attempt()
        self._saves.took(self._tier() if tier is None else tier, seconds)
        self._save_began_s = None
        was_asked, self._asked_tier = self._asked_tier is not None, None
        if self._answered is not None:
            self._count.saved = self._count.done
        if was_asked and not self.should_stop and self._monitor.stops_after_save(self._count.done, self._count.calls):
            self._answered = self._monitor.save  # what would be saved now is saved
            log.warning("iteration %d: %s", self._count.begun, self._monitor.stop)
        if self._answered is not None and self._answered.stops and self.given_up_s is None:
            left_s = self._monitor.remaining_s()
            if left_s < math.inf:
                self.given_up_s = max(0.0, left_s)
                in_time = f"{left_s:.1f} s before the deadline" if left_s >= 0.0 else f"{-left_s:.1f} s too late"
                log.warning("the save took %.1f s and was done %s", seconds, in_time)
                publish_metric("torchelastic", "lifetime.given_up.ms", 1000.0 * left_s)
        self._save_state()

    # --- what it knows ------------------------------------------------------------------------------------------------

    @property
    def iter_count(self) -> int:
        """The iteration that has begun, counted from 1 over all attempts of the job.

        Before the first `iter()` it may be set to the number of iterations that are done, as in the checkpoint.
        """
        return self._count.begun

    @iter_count.setter
    def iter_count(self, done: int) -> None:
        self._count.begun = whole_number("iter_count", done, at_least=0, remedy="give the iterations that are done")
        self._is_counting = True

    @property
    def velastic_state_path(self) -> Path:
        """The file with the state for the next attempt of the job."""
        return self.velastic_dir / FILE_NAME

    @property
    def iter_times(self) -> tuple[float, ...]:
        """The iterations that count, in seconds, oldest first."""
        return self._times.recent_s

    @property
    def avg_iter_time(self) -> float:
        """Seconds of a usual iteration: the mean of the newest, without pauses and without the first; 0: not known."""
        return self._times.average_s()

    @property
    def max_iter_time(self) -> float:
        """Seconds of the longest of the newest iterations, without the first; 0: not known."""
        return self._times.longest_s

    @property
    def remaining_time(self) -> float | None:
        """Seconds that the rest of the run is expected to take; None: not known."""
        if self.total_iters <= 0 or not self._times.recent_s:
            return None
        return self._times.expected_s(max(0, self.total_iters - self._count.done))

    @property
    def save_ckpt_time(self) -> float:
        """Seconds to leave for a save into the most durable tier."""
        return self._monitor.tiers()[0].bound.seconds

    @property
    def save_times_s(self) -> Mapping[str, tuple[float, ...]]:
        """By tier, how long the newest saves took, in seconds, oldest first."""
        return self._saves.times_s

    def summary(self) -> str:
        """What has been seen so far, in lines for people."""
        of = f" of {self.total_iters}" if self.total_iters > 0 else ""
        lines = [f"iterations: {self._count.done}{of}, {self._times.summary()}"]
        if self.remaining_time is not None:
            lines.append(f"rest of the run: {timedelta(seconds=int(self.remaining_time))}")
        lines += [*self._saves.summary(), *self._monitor.summary()]
        if self.given_up_s is not None:
            lines.append(f"unused: {self.given_up_s:.1f} s were left when the save was done")
        return "\n".join(lines)

    # --- between attempts -----------------------------------------------------------------------------------------

    def save_manager_state(self, save_bin: bool = False) -> None:
        """Writes the count of iterations and the times of saves for the next attempt; on the first rank.

        Called automatically at the save before a deadline, and after every save that is measured. In between only how
        much time is left is noted there now and then, in case that the process is killed in an iteration.

        Args:
            save_bin: ignored: nothing is pickled.

        Raises:
            CheckpointError: the operating system refused; names the place and the remedy.
        """
        del save_bin
        self._begin_attempt()
        self._write(self._state())

    def load_manager_state(self) -> bool:
        """Resumes the state of an earlier attempt, on every rank; returns whether there is one.

        The first `iter()` calls it.

        Raises:
            CorruptCheckpointError: the file holds something else; names it.
            CheckpointError: it could not be read.
        """
        self._has_begun = True
        state = read_state(self.velastic_dir)
        if state is None:
            return False
        self._stored = state
        if not self._is_counting:
            self._count.begun = state.completed_iters
            log.info("counting on from iteration %d, as %s says", state.completed_iters, self.velastic_state_path)
        self._is_counting = True
        self._saves.remember(state.save_times_s, state.unfinished_save_s)
        self._monitor.remember(state)
        return True

    def close(self) -> None:
        """Ends the sources found with `deadline=None`: threads end, signal handlers are restored. Idempotent.

        On the thread that made this.
        """
        if self._is_closed:
            return
        self._is_closed = True
        close_all(self._sources)
        self._complain_at = self._count.calls + 1
        if self._count.calls:
            self._report(self._clock())

    def cleanup(self) -> None:
        """The run is over: `close`, and remove the state file on the first rank, never a checkpoint.

        The file stays if `should_stop` ended the loop before its last iteration was trained.

        Raises:
            CheckpointError: the file cannot be removed.
        """
        self.close()
        if self.should_stop and not 0 < self.total_iters <= self._count.done:
            log.info("the run is not over: %s stays for its next attempt", self.velastic_state_path)
            return
        self._is_over = True
        if self._count.calls:
            self._report(self._clock())
        if self._monitor.is_first:
            remove_state(self.velastic_dir)

    # ------------------------------------------------------------------------------------------------------------------

    def _check(self, now_s: float, is_new_group: bool) -> None:
        done = self._monitor.check(self._count.begun - 1, self._count.calls)
        if is_new_group:
            self._count.begun = done + 1  # a new rank counts with the others
        if self._count.resumed is None:
            self._count.resumed = self._count.done
        if self._progress.is_due(now_s):
            self._report(now_s)
        self._note_what_is_left()
        if 0 < self.total_iters < self._count.begun - 1 and not self._is_past_end:
            self._is_past_end = True
            log.warning(
                "iteration %d begins, and total_iters is %d: end the loop there, or give the iterations of all "
                "attempts; if %s is left from another run, remove it (`cleanup` does at the end)",
                self._count.begun,
                self.total_iters,
                self.velastic_state_path,
            )

    def _begin_attempt(self) -> None:
        """Reads the state of the attempt before once, and before this one writes."""
        if self._has_begun:
            return
        try:
            self.load_manager_state()
        except CheckpointError as error:
            log.warning("%s", error)

    def _save_has_ended(self, now_s: float) -> None:
        """A save that was not measured, if there was one, took at most what the iteration took more than usual."""
        if self._save_began_s is not None:
            self._apart_s = max(0.0, now_s - self._save_began_s - self._times.usual_s)
            self.save_took(self._apart_s)

    def _last_save_begins(self, tier: str) -> None:
        """If the process is killed in the last save, the next attempt is to know how little time that was."""
        stop, left_s = self._monitor.stop, self._monitor.remaining_s()
        if stop is not None and 0.0 < left_s < math.inf:
            self._saves.begins(tier, min(left_s, stop.numbers.get("at_once_s", left_s)))
            self._save_state()

    def _note_what_is_left(self) -> None:
        """If the process is killed in this iteration, the next attempt is to know when that had begun."""
        left_s, done = self._monitor.remaining_s(), self._count.resumed or 0
        if self._monitor.stop is None and is_to_note(left_s, self._noted_s):
            self._noted_s = left_s
            # the rest stays as at the save before: there the next one goes on
            stored = self._stored or ManagerState(completed_iters=done, world_size=self._monitor.world_size)
            with suppress(CheckpointError):  # said at the next save
                self._write(replace(stored, unfinished_iter_s=self._unfinished_s))

    @property
    def _unfinished_s(self) -> float:
        return 0.0 if self.should_stop or self._noted_s == math.inf else max(0.0, self._noted_s)

    def _write(self, state: ManagerState) -> None:
        if self._monitor.is_first:
            write_state(self.velastic_dir, state)
        self._stored = state

    def _tier(self) -> str:
        stop = self._monitor.stop
        asked = self._asked_tier if stop is None else stop.tier
        return self._saves.first_tier if asked is None else asked

    def _complain(self) -> None:
        """Warns once of training after the end."""
        self._complain_at = math.inf
        if self._is_closed:
            log.warning("iteration %d begins after close(): deadlines are no longer detected", self._count.begun)
        elif self._answered is not None and self._answered is self._monitor.stop:
            log.warning(
                "iteration %d begins after the save before the deadline: what is trained now will be lost; leave the "
                "loop when should_stop is true",
                self._count.begun,
            )

    def _report(self, now_s: float) -> None:
        """Progress for the launcher; on the first rank.

        Exit code 0 means that the run is over, unless `should_stop`, or the loop was left with `close` alone; so the
        length of the run is only reported then, or when all of it is done.
        """
        if not self._monitor.is_first:
            return
        done, total = self._count.done, self.total_iters
        if self._is_closed and not self.should_stop and self._count.begun == total:
            done = total  # there is no iter() after the last iteration
        is_unfinished = (self._is_closed and not self._is_over) or self.should_stop
        says_total = total > 0 and (is_unfinished or done >= total)
        self._progress.report(Steps(self._count.resumed, done, self._count.saved, total if says_total else None), now_s)

    def _save_state(self) -> None:
        self._report(self._clock())
        try:
            self.save_manager_state()
        except CheckpointError as error:
            log.warning("the next attempt of this job will count its iterations anew: %s", error)

    def _state(self) -> ManagerState:
        remaining_s = self.remaining_time
        return ManagerState(
            avg_iter_time=self.avg_iter_time,
            total_iters=self.total_iters,
            iter_count=self._count.begun,
            remaining_time=-1.0 if remaining_s is None else remaining_s,
            save_ckpt_time=self.save_ckpt_time,
            completed_iters=self._count.done,
            world_size=self._monitor.world_size,
            save_times_s=self._saves.times_s,
            is_step_tried=self._monitor.is_step_tried,
            unfinished_save_s=self._saves.unfinished_s,
            unfinished_iter_s=self._unfinished_s,
            iter_times_s=tuple(round(seconds, 6) for seconds in self._times.known_s),
        )
