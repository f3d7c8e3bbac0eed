"""The deadline of this machine, and the last safe moment to save; see docs/lifetime.md.

`sources` finds deadlines. `deadline_monitor.py` samples what a rank knows of the time that is left (`sample.py`,
`iteration_times.py`) and decides from what all ranks know (`decision.py`, pure). Both who have such a loop use it:
`train()` (`loop_lifetime.py`, with `drain_policy.py` for workers that leave one after the other), and a loop of one's
own (`iter_manager.py`, with `group_monitor.py`). `requeue.py` ends the process so that the scheduler starts the job
again.

Importing this package imports no torch, and names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.lifetime.deadline import Deadline as Deadline
    from torchelastic.lifetime.deadline import DeadlineAt as DeadlineAt
    from torchelastic.lifetime.deadline import Nearest as Nearest
    from torchelastic.lifetime.deadline import nearest as nearest
    from torchelastic.lifetime.deadline import time_limit_s as time_limit_s
    from torchelastic.lifetime.deadline_monitor import Lifetime as Lifetime
    from torchelastic.lifetime.decision import StopDecision as StopDecision
    from torchelastic.lifetime.group_monitor import RankMissingError as RankMissingError
    from torchelastic.lifetime.iter_manager import IterManager as IterManager
    from torchelastic.lifetime.requeue import Requeue as Requeue
    from torchelastic.lifetime.requeue import StoppedEarly as StoppedEarly
    from torchelastic.lifetime.requeue import requeue_job as requeue_job
    from torchelastic.lifetime.sources.detection import close_all as close_all
    from torchelastic.lifetime.sources.detection import detect as detect
    from torchelastic.processes.exit_codes import STOPPED_EARLY as STOPPED_EARLY

__getattr__, __dir__ = lazily(__name__)
