"""What the workers of a host say, on the screen of its launcher: each line with who has said it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from torchelastic.agent.control_sequences import last_state, shown_of
from torchelastic.foreign_json import RecordError, decode_object
from torchelastic.line_prefix import LinePrefix
from torchelastic.log_lines import HUMAN, JSON, json_line

#: Writes a text, line end and all, to the stream with that name; must not wait.
Write = Callable[[str, str], None]

#: A line of a worker's own torchelastic log begins so, see `torchelastic.log_lines.JsonFormatter`.
_LOG_LINE = '{"at_s": '


def to_screen(stream: str, text: str) -> None:
    """Write to this process's standard output or error; whoever waits there holds up the caller."""
    print(text, end="", file=sys.stderr if stream == "stderr" else sys.stdout, flush=True)


class Terminal:
    """Use it on the agent's event loop.

    Args:
        write: to the screen.
        form: "human" or "json".
        host: this host's name, for JSON.
        below: shows a line below all that is written, in place of the one before; None: the screen is no terminal.
        can_move: there is one worker only, so that it may move the cursor up to lines that it has written.
        logged: gives how often somebody else has written to the screen: the cursor is not moved up over those lines.
        prefix: what each line begins with.
        wall_s: Unix seconds.
    """

    def __init__(
        self,
        write: Write = to_screen,
        *,
        form: str = HUMAN,
        host: str = "",
        below: Callable[[str], None] | None = None,
        can_move: bool = False,
        logged: Callable[[], int] = lambda: 0,
        prefix: LinePrefix | None = None,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._write, self.form, self._is_json, self._host = write, form, form == JSON, host
        self._below, self._can_move = None if self._is_json else below, can_move
        self._logged, self._seen_logged = logged, 0
        self.prefix = prefix or LinePrefix()
        self._bars: dict[tuple[int, str], str] = {}
        self._progress, self._step, self._is_asking = "", -1, False
        self._wall_s = wall_s

    @property
    def is_live(self) -> bool:
        """Whether a person sees it change: lines that are written anew stay in their place."""
        return self._below is not None

    def said(self, worker: int, stream: str, text: str) -> None:
        r"""A worker has said a line.

        Args:
            worker: its number on this host.
            stream: "stdout" or "stderr".
            text: without its end; of a line that was rewritten (`\r`), the last state is shown.
        """
        if self._bars.pop((worker, stream), None) is not None or self._is_asking:
            self._is_asking = False
            self._draw_below()
        moves, shown = shown_of(text) if self.is_live else ("", last_state(text))
        self._move(stream, moves)
        self._seen_logged = self._logged()
        if shown is not None:
            line = self._for_people(worker, shown)
            if self._is_json:
                line = json_line(self._document(worker, stream, shown))
            self._write(stream, line + "\n")

    def asks(self, worker: int, stream: str, text: str) -> None:
        """A worker has said the beginning of a line, and waits for an answer: it is shown at once, each time.

        Arguments as for `said`.
        """
        if self._is_json:
            self.said(worker, stream, text)
        else:
            self._is_asking = True
            self._draw_below()
            self._write(stream, self._for_people(worker, text))

    def rewrites(self, worker: int, stream: str, text: str) -> None:
        """A worker has begun a line, or written it anew, as progress bars do; without its end, `said` follows.

        Arguments as for `said`.
        """
        moves, shown = shown_of(text)
        if self.is_live and shown is not None:
            self._move(stream, moves)
            self._bars[worker, stream] = self._for_people(worker, shown)
            self._draw_below()

    def progresses(self, step: int, text: str) -> None:
        """The launcher's own line about the training, shown below all others unless a worker shows one.

        Args:
            step: a prompt of a worker is taken for answered once it is another one.
            text: the line; empty: none.
        """
        self._is_asking = self._is_asking and step == self._step
        self._step, self._progress = step, text
        self._draw_below()

    def ended(self, worker: int) -> None:
        """A worker's process has ended and has said all that it will: no bar of it is shown any more."""
        self._bars = {key: bar for key, bar in self._bars.items() if key[0] != worker}
        self._draw_below()

    def _for_people(self, worker: int, text: str) -> str:
        return f"{self.prefix.of(worker)}{text}"

    def _move(self, stream: str, moves: str) -> None:
        if moves and self._can_move and self._logged() == self._seen_logged:
            self._write(stream, moves)

    def _draw_below(self) -> None:
        if self._below is not None:
            line = self._bars[min(self._bars)] if self._bars else self._progress
            self._below("" if self._is_asking else line)

    def _document(self, worker: int, stream: str, text: str) -> dict[str, Any]:
        log_line = _log_line(text)
        if log_line is not None:
            return {**log_line, "host": self._host, "local_rank": worker}
        head = {"at_s": round(self._wall_s(), 6), "host": self._host}
        return {**head, "kind": "output", "local_rank": worker, "stream": stream, "text": text}


def _log_line(text: str) -> dict[str, Any] | None:
    """A worker's own torchelastic log line, if that is what it is; whatever a script prints is only printed on."""
    if not text.startswith(_LOG_LINE):
        return None
    try:
        document = decode_object("a line", text, most_bytes=len(text))
    except RecordError:
        return None
    return document if document.get("kind") == "log" else None
