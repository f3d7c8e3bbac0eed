"""The deadline of this machine, and the last safe moment to save; see docs/lifetime.md.

Importing this package imports no torch.
"""

from __future__ import annotations

from torchelastic.lifetime.bounds import Bound, guess, needed_samples, step_bound, upper_bound
from torchelastic.lifetime.deadline import (
    CapacityBlock,
    Deadline,
    DeadlineAt,
    Nearest,
    automatic_deadlines,
    nearest,
    time_limit_s,
)
from torchelastic.lifetime.deadline_monitor import Lifetime
from torchelastic.lifetime.decision import SaveTarget, StopDecision, decide, part_of_risk
from torchelastic.lifetime.group_monitor import Agreement, GroupAgreement, RankMissingError, SoloAgreement
from torchelastic.lifetime.iter_manager import IterManager
from torchelastic.lifetime.iteration_times import Forecast, IterationTimes
from torchelastic.lifetime.progress import LifetimeSummary
from torchelastic.lifetime.requeue import STOPPED_EARLY, Requeue, StoppedEarly, requeue_job
from torchelastic.lifetime.sources.detection import close_all, detect

__all__ = [
    "STOPPED_EARLY",
    "Agreement",
    "Bound",
    "CapacityBlock",
    "Deadline",
    "DeadlineAt",
    "Forecast",
    "GroupAgreement",
    "IterManager",
    "IterationTimes",
    "Lifetime",
    "LifetimeSummary",
    "Nearest",
    "RankMissingError",
    "Requeue",
    "SaveTarget",
    "SoloAgreement",
    "StopDecision",
    "StoppedEarly",
    "automatic_deadlines",
    "close_all",
    "decide",
    "detect",
    "guess",
    "nearest",
    "needed_samples",
    "part_of_risk",
    "requeue_job",
    "step_bound",
    "time_limit_s",
    "upper_bound",
]
