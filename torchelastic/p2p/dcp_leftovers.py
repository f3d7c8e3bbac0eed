"""What `torch.distributed.checkpoint` keeps in a process for its whole life, though it belongs to one group's ranks.

torch expects that a process is in one group ever. In the next group the plans that `enable_plan_caching=True` keeps
would be merged with those of other ranks (the save fails, or lacks shards), and the background process of
`AsyncCheckpointerType.PROCESS` would wait for ranks that are gone.
"""

from __future__ import annotations

import threading

from torchelastic.torch_internals.checkpoints import forget_plans, take_helper


def forget_last_group() -> None:
    """Call before another group is formed, on the training thread; imports nothing, and does not wait.

    A save that is under way in the background ends as it can.
    """
    forget_plans()
    held = take_helper()
    if held:
        threading.Thread(target=held.clear, name="end-of-checkpoint-process", daemon=True).start()
