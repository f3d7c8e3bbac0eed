"""What `torch.distributed.checkpoint` keeps in a process for its whole life, though it belongs to one group's ranks.

torch expects that a process is in one group ever. In the next group the plans that `enable_plan_caching=True` keeps
would be merged with those of other ranks (the save fails, or lacks shards), and the background process of
`AsyncCheckpointerType.PROCESS` would wait for ranks that are gone. Both are private: where a torch has them no more,
or elsewhere, nothing is done here.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

_CHECKPOINT = "torch.distributed.checkpoint"
#: Of its `SavePlanner`, each by the planner's class.
_PLANS = (
    "_cached_save_plan", "_cached_final_save_plan", "_cached_all_plans", "_cached_global_plan", "_cached_metadata",
)  # fmt: skip


def forget_last_group() -> None:
    """Call before another group is formed, on the training thread; imports nothing, and does not wait.

    A save that is under way in the background ends as it can.
    """
    planner: Any = getattr(sys.modules.get(f"{_CHECKPOINT}.planner"), "SavePlanner", None)
    for name in _PLANS:
        getattr(planner, name, {}).clear()
    executor: Any = sys.modules.get(f"{_CHECKPOINT}._async_process_executor")
    if getattr(executor, "_CHECKPOINT_PROCESS", None) is not None:
        held = [executor._CHECKPOINT_PROCESS]
        executor._CHECKPOINT_PROCESS = None  # the next save starts one with the ranks of then
        # the last reference ends the process, which takes up to five seconds
        threading.Thread(target=held.clear, name="end-of-checkpoint-process", daemon=True).start()
