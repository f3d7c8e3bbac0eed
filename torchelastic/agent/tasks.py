"""Tasks of the agent that must not end while it lives: an error in one is logged with its traceback, and it goes on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

log = logging.getLogger(__name__)

#: Between a failure and the next attempt: the first pause, and the longest; twice as long each time.
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0
#: What ran this long before it failed has not failed in a row with the failure before.
GOOD_RUN_S = 60.0


async def _nothing() -> None:
    pass


async def keep_running(
    what: str,
    work: Callable[[], Awaitable[None]],
    clean_up: Callable[[], Awaitable[None]] = _nothing,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Do something that never ends by itself; whenever it fails, say so, clean up and begin it anew. Cancel it to end.

    Every failure is a bug in torchelastic. It must end neither the agent nor, worse, only a part of it: an agent that
    keeps its lease and decides nothing would hold up all hosts.

    Args:
        what: for the log, at the beginning of a sentence.
        work: begins it; called again after each failure.
        clean_up: done at once after each failure; if it fails too, that is logged, and the work begins all the same.
        clock: monotonic seconds.
    """
    pause_s = FIRST_PAUSE_S
    while True:
        began_s = clock()
        try:
            return await work()
        except Exception:  # whatever it is: see above
            log.exception("this is a bug in torchelastic: %s failed; it begins anew, training goes on", what)
        try:
            await clean_up()
        except Exception:
            log.exception("cleaning up after that failed, too")
        if clock() - began_s > GOOD_RUN_S:
            pause_s = FIRST_PAUSE_S
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def first_of(*works: Any) -> None:
    """Wait until one of these is done, and cancel the others; an error of one is a bug, and logged."""
    tasks = [asyncio.ensure_future(work) for work in works]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
        if task.done() and not task.cancelled() and task.exception() is not None:
            log.error("this is a bug in torchelastic: the agent ends for this error", exc_info=task.exception())


async def within(seconds: float, work: Any) -> None:
    """Wait for this, and no longer than that."""
    try:
        await asyncio.wait_for(work, seconds)
    except asyncio.TimeoutError:
        log.info("aborted: not done within %g s", seconds)
