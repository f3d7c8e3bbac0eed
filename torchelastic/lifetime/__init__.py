"""The deadline of this machine, and the last safe moment to save; see docs/lifetime.md.

`sources` finds deadlines. `deadline_monitor.py` samples what a rank knows of the time that is left (`sample.py`,
`iteration_times.py`) and decides from what all ranks know (`decision.py`, pure). Both who have such a loop use it:
`train()` (`loop_lifetime.py`, with `drain_policy.py` for workers that leave one after the other), and a loop of one's
own (`iter_manager.py`, with `group_monitor.py`). `requeue.py` ends the process so that the scheduler starts the job
again.

Importing this package imports no torch.
"""

from __future__ import annotations

from torchelastic.lifetime.deadline import Deadline, DeadlineAt, Nearest, nearest, time_limit_s
from torchelastic.lifetime.deadline_monitor import Lifetime
from torchelastic.lifetime.decision import StopDecision
from torchelastic.lifetime.group_monitor import RankMissingError
from torchelastic.lifetime.iter_manager import IterManager
from torchelastic.lifetime.requeue import STOPPED_EARLY, Requeue, StoppedEarly, requeue_job
from torchelastic.lifetime.sources.detection import close_all, detect

__all__ = [
    "STOPPED_EARLY",
    "Deadline",
    "DeadlineAt",
    "IterManager",
    "Lifetime",
    "Nearest",
    "RankMissingError",
    "Requeue",
    "StopDecision",
    "StoppedEarly",
    "close_all",
    "detect",
    "nearest",
    "requeue_job",
    "time_limit_s",
]
