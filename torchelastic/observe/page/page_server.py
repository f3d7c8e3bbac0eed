"""Serves the page, on a thread with an event loop of its own: no client can hold up the agent.

Every client is bounded: in number, in how long it may take for its request, and in how long it may take to read what
it is sent. Who is too slow for a stream loses it, and the page asks again.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from torchelastic.observe.page import answers
from torchelastic.observe.page.feed import Feed, RunSnapshot, as_json, event
from torchelastic.observe.page.http_request import MOST_HEAD_BYTES, HttpError, Wanted, parsed, wanted
from torchelastic.observe.page.listening import PageOptions
from torchelastic.processes.background import in_background

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Connections at one time, and how many of them may be streams.
MOST_CONNECTIONS = 48
MOST_STREAMS = 16
#: How long a client may take for its request, and to take what it is sent.
HEAD_TIMEOUT_S = 5.0
SEND_TIMEOUT_S = 10.0
#: Something is sent at least so often, so that both sides see that the other one is there.
KEEP_ALIVE_S = 10.0
#: So much may wait for one client here, and about as much in the kernel.
MOST_BUFFERED_BYTES = 65_536
#: How long the agent waits for the page at its end.
STOP_TIMEOUT_S = 2.0
#: Turns of the event loop: a connection is accepted in one, set up in the next two, and read from the fourth on.
_TO_BEGIN = 5


class PageServer:
    """The page of one agent. `start` and `stop` it from any one thread.

    Args:
        options: where, and for whom.
        read: makes a picture of the run; called on a thread, while somebody watches.
        keep_alive_s, send_timeout_s: as the constants of this module; tests have less patience.
    """

    def __init__(
        self,
        options: PageOptions,
        read: Callable[[], RunSnapshot],
        *,
        keep_alive_s: float = KEEP_ALIVE_S,
        send_timeout_s: float = SEND_TIMEOUT_S,
    ) -> None:
        self._options, self._read = options, read
        self._keep_alive_s, self._send_timeout_s = keep_alive_s, send_timeout_s
        self._access, self._files = options.access, answers.static_files()
        self._connections: set[asyncio.Task[None]] = set()
        self._streams: set[asyncio.StreamWriter] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="torchelastic-page", daemon=True)

    def start(self) -> None:
        """Serve from now on."""
        self._loop, self._enough = asyncio.new_event_loop(), asyncio.Event()
        self._thread.start()

    def stop(self) -> None:
        """Notify all clients of the end, and serve no more. Returns after `STOP_TIMEOUT_S` at the latest."""
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._enough.set)
            self._thread.join(STOP_TIMEOUT_S)

    # --- on the page's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._loop is not None
        try:
            self._loop.run_until_complete(self._serve())
        except Exception:  # training goes on without its page
            log.exception("the page is not served any more")
        finally:
            self._options.socket.close()
            self._loop.close()

    async def _serve(self) -> None:
        self._feed = Feed(self._read_in_background)
        server = await asyncio.start_server(
            self._connected, sock=self._options.socket, limit=MOST_HEAD_BYTES, backlog=64
        )
        await self._enough.wait()
        # asyncio leaves open what it has accepted and not set up when the server is closed, or its task is cancelled
        asyncio.get_running_loop().remove_reader(self._options.socket)
        await _turns(_TO_BEGIN)
        server.close()
        for stream in self._streams:
            stream.write(event("end", b"{}"))  # what fits into the buffers goes out
        await self._feed.stop()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_TIMEOUT_S / 4)
        await _turns(_TO_BEGIN)  # a transport that was aborted closes its socket in the next turn

    async def _read_in_background(self) -> RunSnapshot:
        return await asyncio.wrap_future(in_background(self._read, "torchelastic-page-read"))

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._connections) >= 2 * MOST_CONNECTIONS:
            writer.transport.abort()
            return
        self._connections.add(task)
        writer.transport.set_write_buffer_limits(high=MOST_BUFFERED_BYTES)
        # else the kernel takes megabytes for a client that reads nothing
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BUFFERED_BYTES)
        try:
            await self._answer(reader, writer)
        except (OSError, asyncio.TimeoutError, asyncio.CancelledError):
            pass  # it has gone, or is too slow, or the agent ends
        except Exception:
            log.exception("a request to the page was not answered")
        try:
            writer.close()
            await asyncio.wait_for(writer.wait_closed(), self._send_timeout_s)
        except (OSError, asyncio.TimeoutError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._connections.discard(task)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if len(self._connections) > MOST_CONNECTIONS:
                raise HttpError(503, "too many connections", {"Retry-After": "5"})
            try:
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HEAD_TIMEOUT_S)
            except asyncio.LimitOverrunError:
                raise HttpError(431, f"a request has at most {MOST_HEAD_BYTES} bytes") from None
            except asyncio.IncompleteReadError:
                return
            request = parsed(head[:-4])
            what = wanted(request, self._files)
            self._access.check(request, what)
            if what.kind == "events":
                await self._stream(reader, writer)
            else:
                await self._send(writer, await self._content(what))
        except HttpError as error:
            await self._send(writer, answers.error_response(error))

    async def _content(self, what: Wanted) -> bytes:
        if what.kind == "file":
            file = self._files[what.name]
            return answers.whole(file.content, file.content_type)
        async with self._feed.listening():
            tick = await _soon(self._feed.newer(0))
        return answers.whole(as_json(tick.picture.status), "application/json")

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._streams) >= MOST_STREAMS:
            raise HttpError(503, f"{MOST_STREAMS} others watch already", {"Retry-After": "10"})
        self._streams.add(writer)
        gone = asyncio.ensure_future(reader.read(1))  # it has nothing to say: whatever comes is its end
        try:
            await self._send(writer, answers.head(200, "text/event-stream", None))
            async with self._feed.listening():
                await self._send_ticks(writer, gone)
        finally:
            self._streams.discard(writer)
            gone.cancel()

    async def _send_ticks(self, writer: asyncio.StreamWriter, gone: asyncio.Future[bytes]) -> None:
        had = 0
        while not gone.done():
            news = asyncio.ensure_future(self._feed.newer(had))
            try:
                either: list[asyncio.Future[Any]] = [news, gone]
                await asyncio.wait(either, timeout=self._keep_alive_s, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    return
                if news.done():
                    tick = news.result()
                    await self._send(writer, tick.message(had))
                    had = tick.number
                else:
                    await self._send(writer, b": nothing new\n\n")
            finally:
                news.cancel()

    async def _send(self, writer: asyncio.StreamWriter, content: bytes) -> None:
        writer.write(content)
        await asyncio.wait_for(writer.drain(), self._send_timeout_s)


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def _soon(work: Awaitable[T]) -> T:
    try:
        return await asyncio.wait_for(work, 5.0)
    except asyncio.TimeoutError:
        raise HttpError(503, "the run could not be read within 5 s", {"Retry-After": "2"}) from None
