"""Process groups over a rendezvous: `CoordinatorP2P`, and when it calls a worker hung or slow.

A group (`groups.py`) can be given up in the middle of any operation (`abortable.py`, `abandoned.py`), and is formed
anew in the same process. The train loop is left by all at the same step (`step_agreement.py`, `termination.py`). A step
that does not end is noticed by `watchdog.py`, judged by `hangs.py` and `late_step.py` (pure), and explained by
`busy.py`, `stacks.py` and `hang_location.py`; a worker that is slower than the others is a matter of `stragglers.py`.
"""

from torchelastic.p2p.coordinator_p2p import CoordinatorP2P
from torchelastic.p2p.hangs import HangPolicy
from torchelastic.p2p.stragglers import StragglerPolicy

__all__ = ["CoordinatorP2P", "HangPolicy", "StragglerPolicy"]
