"""What the workers of this host say, line by line: to their files and to the screen, whatever becomes of either."""

from __future__ import annotations

import asyncio
import codecs
import logging
import time
from collections.abc import AsyncIterator, Callable, Set
from typing import IO

from torchelastic.agent.control_sequences import is_prompt, plain_text, without_sequences
from torchelastic.agent.terminal import Terminal
from torchelastic.agent.worker_log import WorkerLog

log = logging.getLogger(__name__)

_MOST_LINE_BYTES = 2**20
_PIECE_BYTES = 2**16
#: A line that stays unfinished, because somebody has to answer it or because it is written anew, is shown so often.
UNFINISHED_S = 0.1


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
            prompts: whether somebody at the terminal may be asked.
        """
        reader = asyncio.StreamReader(limit=_MOST_LINE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        said = (local_rank, stream)
        decoder, line = codecs.getincrementaldecoder("utf-8")("replace"), ""
        async for piece in _pieces(reader):
            if file is not None:
                file.write(without_sequences(piece) if self._terminal.is_live else piece)
            line += decoder.decode(piece)
            if line.endswith("\n") or len(line) >= _MOST_LINE_BYTES:
                self._show(self._terminal.said, *said, line.rstrip("\n"))
                heard(plain_text(line.rstrip("\n")))
                line = ""
            elif prompts and is_prompt(line):
                self._show(self._terminal.asks, *said, line)
                heard(line)
                line = ""  # the answer ends this line on the screen
            else:
                line = line[line.rstrip("\r").rfind("\r") + 1 :]
                self._show(self._terminal.rewrites, *said, line)
        line += decoder.decode(b"", final=True)
        if line:
            self._show(self._terminal.said, *said, line)
            heard(plain_text(line))
        transport.close()

    def _show(self, show: Callable[[int, str, str], None], local_rank: int, stream: str, text: str) -> None:
        if (local_rank, stream) in self._hidden:
            return
        try:
            show(local_rank, stream, text)
        except Exception:  # said once: the next line may do better
            if (local_rank, stream) not in self._unshown:
                self._unshown.add((local_rank, stream))
                log.exception("worker %d: lines of its %s are missing on this screen", local_rank, stream)


async def _pieces(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Each line with its end; without one: what is longer than a line may be, the last, and what stays unfinished."""
    rest, since_s = b"", 0.0
    while True:
        left_s = max(0.0, since_s + UNFINISHED_S - time.monotonic()) if rest else None
        try:
            piece = await asyncio.wait_for(reader.read(_PIECE_BYTES), left_s)
        except asyncio.TimeoutError:
            yield rest
            rest = b""
            continue
        since_s = since_s if rest else time.monotonic()
        *lines, rest = (rest + piece).split(b"\n")
        since_s = time.monotonic() if lines else since_s
        for line in lines:
            yield line + b"\n"
        if rest and (not piece or len(rest) >= _MOST_LINE_BYTES):
            yield rest
            rest = b""
        if not piece:
            return
