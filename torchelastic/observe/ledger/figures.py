"""How well the run went, and how well it could have gone: figures of ledgers, each beside its attainable bound.

A bound is computed from the failure rate and the costs that were seen, so it is an estimate from a sample; where
nothing has failed it is 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchelastic.checkpoint.policy.formulas import daly_period_s, exact_cost
from torchelastic.foreign_json import Count
from torchelastic.observe.ledger.accounts import NOTHING, Account, Amounts, Nanoseconds, added
from torchelastic.observe.ledger.host_ledger import HostLedger

_S = 1e-9
#: Of each figure, for people.
TITLES = {
    "goodput": "Goodput",
    "ettr": "Effective time (ETTR)",
    "step_efficiency": "Step efficiency",
    "participation": "Participation",
    "whole_job_s": "Whole job",
}


@dataclass(frozen=True)
class Seen:
    """What a run has shown, added up over its hosts. Times in nanoseconds.

    Attributes:
        wall_ns: from the first start of a worker to the last end, or to now.
        worker_ns: the wall time of all workers added up; the sum of `amounts`.
        amounts: by account.
        configured_workers: how many the run wants; 0: as many as there were on average.
        workers: processes started.
        committed: steps, each counted for each worker in it.
        undone: attempts that did not last, counted in the same way.
        failures: groups that broke, and workers lost before they were in one, as far as one host noticed it.
        restores_from_checkpoint: of the restores of the group, those from a checkpoint.
        lost: workers lost.
        saves: as seen by each worker.
    """

    wall_ns: Nanoseconds
    worker_ns: Nanoseconds
    amounts: Amounts = NOTHING
    configured_workers: Count = 0
    workers: Count = 0
    committed: Count = 0
    undone: Count = 0
    failures: Count = 0
    restores_from_checkpoint: Count = 0
    lost: Count = 0
    saves: Count = 0

    @property
    def mean_workers(self) -> float:
        """How many workers there were on average."""
        return self.worker_ns / self.wall_ns if self.wall_ns else 0.0

    @property
    def mtbf_s(self) -> float:
        """Mean seconds between failures of the group; infinity: none was seen, or no time has passed."""
        return self.wall_ns * _S / self.failures if self.failures and self.wall_ns else math.inf

    @property
    def step_s(self) -> float:
        """Mean seconds of a step that committed; 0: there was none."""
        return self.amounts[Account.PRODUCTIVE] * _S / self.committed if self.committed else 0.0

    @property
    def save_s(self) -> float:
        """Mean seconds that training stood still for a save; 0: there was none."""
        return self.amounts[Account.SAVE_STALL] * _S / self.saves if self.saves else 0.0

    @property
    def wanted_workers(self) -> float:
        """How many the run wants."""
        return self.configured_workers or self.mean_workers

    @property
    def in_a_group_ns(self) -> int:
        """What all workers have spent in a group, or on forming one anew."""
        return sum(self.amounts) - self.amounts[Account.START_UP] - self.amounts[Account.IDLE]

    @property
    def down_s(self) -> float:
        """Mean seconds of a worker from a failure until it trains again; 0: there was no failure."""
        if not self.failures or not self.mean_workers:
            return 0.0
        down_ns = sum(self.amounts[account] for account in (Account.DETECT, Account.RE_FORM, Account.RESTORE))
        return down_ns * _S / (self.failures * self.mean_workers)


def seen(books: Sequence[HostLedger], now_ns: Sequence[int], wall_ns: int, configured_workers: int = 0) -> Seen:
    """Add up the ledgers of a run's hosts.

    Args:
        books: one per agent.
        now_ns: by the clock of each: up to when; workers that ended before are not extended.
        wall_ns: from the run's beginning to its end, or to now.
        configured_workers: how many the run wants; 0: not known.

    Raises:
        ValueError: the two lists differ in length.
    """
    parts = [_of_one(book, now) for book, now in zip(books, now_ns, strict=True)]
    return merged(parts, wall_ns, configured_workers)


def _of_one(book: HostLedger, now_ns: int) -> Seen:
    counts = book.counts
    return Seen(
        wall_ns=0,  # the run's is given by whoever adds up
        worker_ns=book.worker_ns(now_ns),
        amounts=book.amounts(now_ns),
        workers=counts.started,
        committed=book.committed(),
        undone=book.undone(),
        failures=counts.failures,
        restores_from_checkpoint=counts.restores_from_checkpoint,
        lost=counts.lost,
        saves=counts.saves,
    )


def merged(parts: Sequence[Seen], wall_ns: int, configured_workers: int = 0) -> Seen:
    """The sum over hosts that were there at the same time; arguments as for `seen`.

    Failures and restores are of the group: every host noticed the same ones, so they are not added up.
    """
    amounts = NOTHING
    for part in parts:
        amounts = added(amounts, part.amounts)
    return Seen(
        wall_ns,
        sum(part.worker_ns for part in parts),
        amounts,
        configured_workers,
        workers=sum(part.workers for part in parts),
        committed=sum(part.committed for part in parts),
        undone=sum(part.undone for part in parts),
        failures=max((part.failures for part in parts), default=0),
        restores_from_checkpoint=max((part.restores_from_checkpoint for part in parts), default=0),
        lost=sum(part.lost for part in parts),
        saves=sum(part.saves for part in parts),
    )


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        name: of it.
        value: what was.
        attainable: the bound; a time is never below it, a share never above it.
        because: where the bound comes from, with its numbers.
    """

    name: str
    value: float
    attainable: float
    because: str

    @property
    def is_share(self) -> bool:
        """Whether it is a part of 1; else it is a time in seconds."""
        return not self.name.endswith("_s")

    @property
    def of_attainable(self) -> float:
        """The fraction of the attainable value that was achieved, 1 being all; of a time, the other way round."""
        low, high = sorted((self.value, self.attainable))
        return low / high if high and math.isfinite(high) else 0.0


@dataclass(frozen=True)
class Figures:
    """All figures of a run; see the functions of this module for what each is."""

    goodput: Figure
    ettr: Figure
    step_efficiency: Figure
    participation: Figure
    whole_job_s: Figure

    def __iter__(self) -> Iterator[Figure]:
        return iter((self.goodput, self.ettr, self.step_efficiency, self.participation, self.whole_job_s))


def figures_of(run: Seen) -> Figures:
    """All figures of a run. Nothing is raised: what is not known is 0, and its bound 1."""
    return Figures(goodput(run), ettr(run), step_efficiency(run), participation(run), whole_job_s(run))


def goodput(run: Seen) -> Figure:
    """Productive time over the workers' time: the runtime goodput of Google's "ML Productivity Goodput" (2024).

    The bound is that of a formed group, see `attainable_in_a_group`, times that of being in one, see
    `participation`: every worker process has to start.
    """
    total = sum(run.amounts)
    return Figure("goodput", run.amounts[Account.PRODUCTIVE] / total if total else 0.0, *_attainable(run))


def ettr(run: Seen) -> Figure:
    """Effective training time ratio: productive time over the time in which the run was wanted, with all its workers.

    Meta's figure (Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", HPCA
    2025, arXiv 2410.21680) is that of a job that runs as a whole or not at all. Here some workers go on while others
    are away, so workers that were configured and not there count as unproductive. The bound is that of `goodput`.
    """
    wanted_ns = run.wanted_workers * run.wall_ns
    value = min(1.0, run.amounts[Account.PRODUCTIVE] / wanted_ns) if wanted_ns else 0.0
    return Figure("ettr", value, *_attainable(run))


def step_efficiency(run: Seen) -> Figure:
    """Committed over attempted steps: torchft's figure (Meta, 2025).

    The bound is the chance that no failure falls into a step of mean length s: e^(-s/M), failures being a Poisson
    process. Whoever keeps the work of a step that failed (see docs/salvage.md) may exceed it.
    """
    attempted = run.committed + run.undone
    value = run.committed / attempted if attempted else 0.0
    between = f"{run.mtbf_s:.1f} s between failures" if math.isfinite(run.mtbf_s) else "no failure was seen"
    because = f"steps of {run.step_s:.4f} s, {between}"
    return Figure("step_efficiency", value, math.exp(-run.step_s / run.mtbf_s), because)


def participation(run: Seen) -> Figure:
    """Mean number of workers in a group over the configured one: torchft's figure.

    The bound is the availability MTBF / (MTBF + MTTR) of a worker (see e.g. A. Birolini, "Reliability Engineering"):
    the mean time in a group of a process over that and the mean start-up of a process.
    """
    wanted_ns = run.wanted_workers * run.wall_ns
    value = min(1.0, run.in_a_group_ns / wanted_ns) if wanted_ns else 0.0
    start_up_ns = run.amounts[Account.START_UP]
    there_ns = run.in_a_group_ns + start_up_ns
    start_up_s = start_up_ns * _S / run.workers if run.workers else 0.0
    because = f"{run.workers} starts of workers, {start_up_s:.2f} s for one to start"
    return Figure("participation", value, run.in_a_group_ns / there_ns if there_ns else 1.0, because)


def whole_job_s(run: Seen) -> Figure:
    """Seconds from the first start to the last end: to be printed beside every goodput, which slow steps also raise.

    The bound is the time that the same productive seconds would take at the attainable goodput, with all workers.
    """
    attainable, because = _attainable(run)
    rate = attainable * run.wanted_workers
    least_s = run.amounts[Account.PRODUCTIVE] * _S / rate if rate else 0.0
    return Figure("whole_job_s", run.wall_ns * _S, least_s, because)


def attainable_in_a_group(run: Seen) -> float:
    """The share of its time in a group that a worker could have been productive, with the failures and costs seen.

    1 / (1 + X / M) for failures that live peers repair, X being the mean time to detect, re-form and restore, and half
    a step (a failure comes at any time in a step, and a step is a transaction). Times Daly's exact cost, at his best
    period, for those that went back to a checkpoint (J. T. Daly, Future Generation Computer Systems 22, 2006; see
    `torchelastic.checkpoint.policy.formulas`), C being the mean stall of a save and R the same X without the step.
    """
    wall_s = run.wall_ns * _S
    by_checkpoint = min(run.restores_from_checkpoint, run.failures)
    by_peers = run.failures - by_checkpoint
    bound = 1.0
    if by_peers and wall_s:
        bound /= 1.0 + (run.down_s + run.step_s / 2) * by_peers / wall_s
    if by_checkpoint and wall_s:
        mtbf_s = wall_s / by_checkpoint
        period_s = max(daly_period_s(run.save_s, mtbf_s), run.step_s, 1e-9)
        bound /= exact_cost(period_s, run.save_s, mtbf_s, run.down_s)
    return bound


def _attainable(run: Seen) -> tuple[float, str]:
    there, in_a_group = participation(run), attainable_in_a_group(run)
    by_checkpoint = min(run.restores_from_checkpoint, run.failures)
    because = (
        f"{there.because}; {run.failures - by_checkpoint} failures repaired by peers and {by_checkpoint} from "
        f"checkpoints in {run.wall_ns * _S:.1f} s, {run.down_s:.3f} s each to train again, "
        f"steps of {run.step_s:.4f} s, saves of {run.save_s:.4f} s"
    )
    return there.attainable * in_a_group, because
