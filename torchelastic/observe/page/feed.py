"""Reads the run while somebody watches, and sends each listener what has changed. One event loop, that of the page."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from torchelastic.observe.page.document import LEAST_PAUSE_S, Document, difference, pause_s

log = logging.getLogger(__name__)

#: So long after the last listener has gone the run is still read: a page that is loaded again is complete at once.
LINGER_S = 5.0


@dataclass(frozen=True)
class RunSnapshot:
    """The run at one moment, in both forms.

    Attributes:
        status: as `torchelastic status --json` has it.
        document: as the page has it.
    """

    status: Document
    document: Document


@dataclass(frozen=True)
class FeedTick:
    """One reading.

    Attributes:
        number: 1, 2, ..
        picture: what was read.
        change: makes this picture's document of that of the tick before; as JSON.
    """

    number: int
    picture: RunSnapshot
    change: bytes

    def message(self, had: int) -> bytes:
        """What a listener is sent that had tick `had`: the change, or everything if it has missed one (0: all)."""
        if had == self.number - 1 and had:
            return event("change", self.change)
        return event("whole", as_json(self.picture.document))


def as_json(document: Document) -> bytes:
    """On one line, and short."""
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


def event(name: str, data: bytes) -> bytes:
    """A server-sent event (HTML standard, 9.2); the data have no line breaks."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


class Feed:
    """Ticks for all listeners alike: however many there are, the run is read once.

    Args:
        read: makes a picture; takes as long as etcd needs. What it raises is logged, and nothing is sent.
        sleep: as `asyncio.sleep`.
    """

    def __init__(
        self, read: Callable[[], Awaitable[RunSnapshot]], sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._read, self._sleep = read, sleep
        self._listeners = 0
        self._tick: FeedTick | None = None
        self._news = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """As long as somebody is in here, the run is read."""
        self._listeners += 1
        if self._task is None or self._task.done():
            self._tick = None  # it is that of the last time that somebody watched
            self._task = asyncio.ensure_future(self._run())
        try:
            yield
        finally:
            self._listeners -= 1

    async def newer(self, than: int) -> FeedTick:
        """The newest tick as soon as there is one after that."""
        async with self._news:
            await self._news.wait_for(lambda: self._tick is not None and self._tick.number > than)
            assert self._tick is not None
            return self._tick

    async def stop(self) -> None:
        """Read no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        unwatched_s, has_failed = 0.0, False
        while unwatched_s < LINGER_S:
            tick = None
            try:
                tick = self._next(await self._read())
                has_failed = False
            except Exception:
                if not has_failed:
                    log.exception("the page could not be updated")
                has_failed = True
            if tick is not None:
                async with self._news:
                    self._tick = tick
                    self._news.notify_all()
            pause = LEAST_PAUSE_S if tick is None else pause_s(len(tick.change))
            await self._sleep(pause)
            unwatched_s = 0.0 if self._listeners else unwatched_s + pause

    def _next(self, picture: RunSnapshot) -> FeedTick | None:
        """None: nothing has changed."""
        before = self._tick
        if before is None:
            return FeedTick(1, picture, b"{}")
        change = difference(before.picture.document, picture.document)
        return FeedTick(before.number + 1, picture, as_json(change)) if change else None
