"""When to save and what to keep, as small values that `|` and `&` combine; see docs/checkpoint.md.

Formulas to plan by; all assume independent failures at a constant rate, C is what a save costs the training, M the mean
time between failures, R the time to restore:

* The period that wastes least is `daly_period_s`; to the first order sqrt(2 C M), for each of several places with its
  own C and M. One over `exact_cost` is the attainable efficiency at a period.
* For the best availability it is C + sqrt(2 (M + R) C + C^2) (Saxena et al., arXiv 2410.18124).
* A copy of the state takes (b/6) F / (B T S) steps, and hides behind one where that is below 1: b bytes of state per
  parameter, F operations per second of a worker, B bytes per second of the copy, T samples (tokens) per worker and
  step, S workers that share the state.
* Writers keep up with a save every Tw / (N q t) steps or more (PCcheck, ASPLOS 2025): Tw seconds until a save is
  durable, N saves at once, q the slowdown that is allowed (1.05: 5 %), t seconds of a step.

Nothing in here has a clock, a file, a socket or a memory. That the newest checkpoint stays is enforced in
`KeepPolicy.decide` and nowhere else. Names are loaded on first use (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.checkpoint.policy.costs import SaveCosts as SaveCosts
    from torchelastic.checkpoint.policy.failure_rate import FailurePrior as FailurePrior
    from torchelastic.checkpoint.policy.failure_rate import FailureRate as FailureRate
    from torchelastic.checkpoint.policy.formulas import daly_period_s as daly_period_s
    from torchelastic.checkpoint.policy.formulas import exact_cost as exact_cost
    from torchelastic.checkpoint.policy.keeping import KeepAll as KeepAll
    from torchelastic.checkpoint.policy.keeping import KeepBest as KeepBest
    from torchelastic.checkpoint.policy.keeping import KeepDecision as KeepDecision
    from torchelastic.checkpoint.policy.keeping import KeepEvery as KeepEvery
    from torchelastic.checkpoint.policy.keeping import KeepEverySeconds as KeepEverySeconds
    from torchelastic.checkpoint.policy.keeping import KeepLast as KeepLast
    from torchelastic.checkpoint.policy.keeping import KeepPolicy as KeepPolicy
    from torchelastic.checkpoint.policy.keeping import KeptCheckpoint as KeptCheckpoint
    from torchelastic.checkpoint.policy.keeping import prunable as prunable
    from torchelastic.checkpoint.policy.saving import SaveDecision as SaveDecision
    from torchelastic.checkpoint.policy.saving import SaveMoment as SaveMoment
    from torchelastic.checkpoint.policy.saving import SavePolicy as SavePolicy
    from torchelastic.checkpoint.policy.schedules import AtSteps as AtSteps
    from torchelastic.checkpoint.policy.schedules import EverySeconds as EverySeconds
    from torchelastic.checkpoint.policy.schedules import EverySteps as EverySteps
    from torchelastic.checkpoint.policy.schedules import Never as Never
    from torchelastic.checkpoint.policy.schedules import OnEnd as OnEnd
    from torchelastic.checkpoint.policy.schedules import OnSignal as OnSignal
    from torchelastic.checkpoint.policy.young_daly import YoungDaly as YoungDaly

__getattr__, __dir__ = lazily(__name__)
