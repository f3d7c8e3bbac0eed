"""DCP's helper process (`AsyncCheckpointerType.PROCESS`): torch starts it once, and keeps it also when it is dead."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

log = logging.getLogger(__name__)

_EXECUTOR = "torch.distributed.checkpoint._async_process_executor"
_NAME = "_CHECKPOINT_PROCESS"
_DEATH_S = 10.0


def replace_dead_helpers(gather: Callable[[str, Any], Sequence[Any]]) -> None:
    """If the helper of any rank has died, has torch start new ones on all ranks; they form a group, so none is of use.

    Called by all ranks on the training thread before a save is given to the helpers. Does nothing where there are none,
    or where torch keeps them in another way than in its releases 2.7 to 2.11.

    Args:
        gather: tells all ranks a value and returns what each says; collective. Called only where there are helpers,
            which torch starts on all ranks together.
    """
    executor = sys.modules.get(_EXECUTOR)
    process = getattr(getattr(executor, _NAME, None), "_save_process", None)
    if executor is None or process is None:
        return
    alive = gather("async_save, looking for the helper processes", process.is_alive())
    if all(alive):
        return
    dead = [rank for rank, is_alive in enumerate(alive) if not is_alive]
    log.warning("the helper process of async_save has died on rank(s) %s: all ranks start another", dead)
    process.kill()
    process.join(_DEATH_S)
    setattr(executor, _NAME, None)
