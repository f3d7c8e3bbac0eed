"""What the workers of this host say, line by line: to their files and to the screen, whatever becomes of either."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Set
from typing import IO

from torchelastic.agent.terminal import Terminal
from torchelastic.agent.worker_log import WorkerLog

log = logging.getLogger(__name__)

_MOST_LINE_BYTES = 2**20
_PIECE_BYTES = 2**16
#: A line that somebody at the terminal may have to answer is shown when it stays unfinished for so long.
PROMPT_AFTER_S = 0.1


class WorkerLines:
    """Use it on the agent's event loop.

    Args:
        terminal: shows them.
        hidden: (local rank, "stdout" or "stderr") of what it does not show.
    """

    def __init__(self, terminal: Terminal, hidden: Set[tuple[int, str]]) -> None:
        self._terminal, self._hidden = terminal, hidden
        self._unshown: set[tuple[int, str]] = set()

    async def pass_on(
        self,
        local_rank: int,
        stream: str,
        pipe: IO[bytes],
        file: WorkerLog | None,
        heard: Callable[[str], None] = lambda _text: None,
        *,
        prompts: bool = False,
    ) -> None:
        """Read a worker's pipe to its end: a worker whose pipe is full stands still.

        Args:
            local_rank: the worker's number on this host.
            stream: "stdout" or "stderr".
            pipe: its end for reading.
            file: takes the bytes, too.
            heard: called with each line.
            prompts: whether somebody at the terminal may be asked: a line that stays unfinished is shown as it is.
        """
        reader = asyncio.StreamReader(limit=_MOST_LINE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        async for line in _lines(reader, PROMPT_AFTER_S if prompts else None):
            if file is not None:
                file.write(line)
            text = line.decode(errors="replace").rstrip("\n")
            self._show(local_rank, stream, text, is_prompt=prompts and not line.endswith(b"\n"))
            heard(text)
        transport.close()

    def _show(self, local_rank: int, stream: str, text: str, *, is_prompt: bool) -> None:
        if (local_rank, stream) in self._hidden:
            return
        try:
            (self._terminal.asks if is_prompt else self._terminal.said)(local_rank, stream, text)
        except Exception:  # said once: the next line may do better
            if (local_rank, stream) not in self._unshown:
                self._unshown.add((local_rank, stream))
                log.exception("worker %d: lines of its %s are missing on this screen", local_rank, stream)


async def _lines(reader: asyncio.StreamReader, prompt_after_s: float | None) -> AsyncIterator[bytes]:
    """Each line with its end; without one: what is longer than a line may be, the last, and what stays unfinished."""
    rest = b""
    while True:
        try:
            piece = await asyncio.wait_for(reader.read(_PIECE_BYTES), prompt_after_s if rest else None)
        except asyncio.TimeoutError:
            yield rest
            rest = b""
            continue
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line + b"\n"
        if rest and (not piece or len(rest) >= _MOST_LINE_BYTES):
            yield rest
            rest = b""
        if not piece:
            return
