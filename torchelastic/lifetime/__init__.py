"""How long this machine lives, and the last good moment to save; see docs/lifetime.md.

Names are loaded on first use (PEP 562); importing this package imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchelastic.lifetime.agreement import Agreement, Alone, GroupAgreement, RankMissingError
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
    from torchelastic.lifetime.decision import StopDecision, Tier, decide, part_of_risk
    from torchelastic.lifetime.iter_manager import IterManager
    from torchelastic.lifetime.iteration_times import Forecast, IterationTimes
    from torchelastic.lifetime.progress import LifetimeSummary

__all__ = [
    "Agreement",
    "Alone",
    "Bound",
    "CapacityBlock",
    "Deadline",
    "DeadlineAt",
    "Forecast",
    "GroupAgreement",
    "IterManager",
    "IterationTimes",
    "LifetimeSummary",
    "Nearest",
    "RankMissingError",
    "StopDecision",
    "Tier",
    "automatic_deadlines",
    "decide",
    "guess",
    "nearest",
    "needed_samples",
    "part_of_risk",
    "step_bound",
    "time_limit_s",
    "upper_bound",
]

_NAMES_OF_HOME = {
    "agreement": ("Agreement", "Alone", "GroupAgreement", "RankMissingError"),
    "bounds": ("Bound", "guess", "needed_samples", "step_bound", "upper_bound"),
    "deadline": (
        "CapacityBlock",
        "Deadline",
        "DeadlineAt",
        "Nearest",
        "automatic_deadlines",
        "nearest",
        "time_limit_s",
    ),
    "decision": ("StopDecision", "Tier", "decide", "part_of_risk"),
    "iter_manager": ("IterManager",),
    "iteration_times": ("Forecast", "IterationTimes"),
    "progress": ("LifetimeSummary",),
}
_HOME_OF_NAME = {name: f"{__name__}.{home}" for home, names in _NAMES_OF_HOME.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF_NAME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF_NAME})
