"""The end of any process, for an event loop."""

from __future__ import annotations

import asyncio
import os


async def process_end(pid: int) -> None:
    """Return as soon as the process has ended (it need not be reaped yet)."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, _resolve, ended)
    try:
        await ended
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
