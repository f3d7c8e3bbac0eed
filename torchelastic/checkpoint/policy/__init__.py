"""When to save and what to keep, as small values that `|` and `&` combine; see docs/checkpoint.md.

Nothing in here has a clock, a file, a socket or a memory. That the newest checkpoint stays is enforced in
`KeepPolicy.decide` and nowhere else. Names are loaded on first use (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.checkpoint.policy.costs import SaveCosts
    from torchelastic.checkpoint.policy.failures import FailurePrior, FailureRate
    from torchelastic.checkpoint.policy.formulas import (
        daly_period_s,
        exact_cost,
    )
    from torchelastic.checkpoint.policy.keeping import (
        KeepAll,
        KeepBest,
        KeepDecision,
        KeepEvery,
        KeepEverySeconds,
        KeepLast,
        KeepPolicy,
        KeptCheckpoint,
        prunable,
    )
    from torchelastic.checkpoint.policy.saving import SaveDecision, SaveMoment, SavePolicy
    from torchelastic.checkpoint.policy.schedules import AtSteps, EverySeconds, EverySteps, Never, OnSignal
    from torchelastic.checkpoint.policy.young_daly import YoungDaly

__all__ = [
    "AtSteps",
    "EverySeconds",
    "EverySteps",
    "FailurePrior",
    "FailureRate",
    "KeepAll",
    "KeepBest",
    "KeepDecision",
    "KeepEvery",
    "KeepEverySeconds",
    "KeepLast",
    "KeepPolicy",
    "KeptCheckpoint",
    "Never",
    "OnSignal",
    "SaveCosts",
    "SaveDecision",
    "SaveMoment",
    "SavePolicy",
    "YoungDaly",
    "daly_period_s",
    "exact_cost",
    "prunable",
]

_NAMES_OF_HOME = {
    "costs": ("SaveCosts",),
    "failures": ("FailurePrior", "FailureRate"),
    "formulas": (
        "daly_period_s",
        "exact_cost",
    ),
    "keeping": (
        "KeepAll",
        "KeepBest",
        "KeepDecision",
        "KeepEvery",
        "KeepEverySeconds",
        "KeepLast",
        "KeepPolicy",
        "KeptCheckpoint",
        "prunable",
    ),
    "saving": ("SaveDecision", "SaveMoment", "SavePolicy"),
    "schedules": ("AtSteps", "EverySeconds", "EverySteps", "Never", "OnSignal"),
    "young_daly": ("YoungDaly",),
}
_HOME_OF_NAME = {name: f"{__name__}.{home}" for home, names in _NAMES_OF_HOME.items() for name in names}

__getattr__, __dir__ = lazily(__name__, _HOME_OF_NAME)
