"""Which worker is a straggler, and whether it has to go: a pure policy over progress rates, and how they are had."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchelastic.group.peers import Peers
from torchelastic.metrics import publish_metric
from torchelastic.observe.ledger.meter import this_worker

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StragglerPolicy:
    """When a worker is a straggler, and what follows.

    Workers that wait for each other in every step all finish as many: give the rate of the work between (samples per
    second of computing), or all rates are equal.

    Args:
        threshold: a progress rate below this share of the best one's is a straggler's.
        remove: whether a straggler leaves the group for good; if not, it is only reported.
        patience: only after so many comparisons in a row, within one group, in which it was one.

    Raises:
        ValueError: an argument out of its range.

    >>> StragglerPolicy().compare(7.0, [10.0, 7.0], times=0)
    PaceComparison(rate=7.0, best=10.0, relative=0.7, times=1, is_straggler=True, stragglers=1, has_to_go=False)
    """

    threshold: float = 0.8
    remove: bool = False
    patience: int = 3

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(f"threshold={self.threshold} is a share: 0 to 1")
        if self.patience < 1:
            raise ValueError(f"patience={self.patience} must be at least 1")

    def compare(self, rate: float, rates: Sequence[float], times: int) -> PaceComparison:
        """Compare one worker with all whose rates are known.

        Args:
            rate: its own progress rate, in any unit that all share.
            rates: those of all, its own too.
            times: how often in a row it was a straggler before.
        """
        best = max(rates)
        relative = rate / best if best > 0 else 1.0
        is_straggler = relative < self.threshold
        times = times + 1 if is_straggler else 0
        stragglers = sum(other / best < self.threshold for other in rates) if best > 0 else 0
        return PaceComparison(
            rate, best, relative, times, is_straggler, stragglers, self.remove and times >= self.patience
        )


@dataclass(frozen=True)
class PaceComparison:
    """What a comparison showed of one worker.

    Attributes:
        rate: its progress rate.
        best: the best worker's.
        relative: the one over the other.
        times: how often in a row it was a straggler, this time included.
        is_straggler: whether it is one.
        stragglers: how many there are among all.
        has_to_go: whether the policy removes it.
    """

    rate: float
    best: float
    relative: float
    times: int
    is_straggler: bool
    stragglers: int
    has_to_go: bool

    def __str__(self) -> str:
        return (
            f"{100 * self.relative:.0f} % of the best ({self.rate:.4g} against {self.best:.4g} per second), "
            f"{self.times} time(s) in a row"
        )


def compare_rates(policy: StragglerPolicy, rate: float | None, times: int, peers: Peers) -> PaceComparison | None:
    """Compare this worker's rate with those of the others, and publish, log and note for the ledger what it shows.

    Every rank calls this. None: nothing can be said, for its own rate is not known.

    Args:
        policy: who is a straggler.
        rate: this worker's progress rate; None, or no finite number from 0 on: it is not known.
        times: how often in a row it was a straggler before.
        peers: the ranks of its group.
    """
    own = float(rate) if rate is not None and math.isfinite(rate) and rate >= 0 else None
    rates = [known for known in peers.all_gather(own) if known is not None]
    if own is None:
        return None
    comparison = policy.compare(own, rates, times)
    publish_metric("torchelastic", "progress.relative.percent", 100 * comparison.relative)
    if comparison.is_straggler:
        log.warning("rank %d is a straggler: it runs at %s", peers.rank, comparison)
        this_worker().straggles(100 * comparison.relative)
    return comparison
