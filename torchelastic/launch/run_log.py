"""What `torchelastic run` writes to the terminal, and how: its own log and the output of its workers."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torchelastic.agent.event_log import events_log
from torchelastic.agent.screen_writer import ScreenWriter
from torchelastic.agent.terminal import Terminal
from torchelastic.launch.torchrun_options import Translation
from torchelastic.line_prefix import LinePrefix
from torchelastic.log_lines import FORMAT_VARIABLE, JSON, JsonFormatter, checked_format, json_line
from torchelastic.usage import UsageError


@dataclass(frozen=True)
class RunLog:
    """What a launcher writes with.

    Attributes:
        form: "human" or "json".
        terminal: the screen of the workers.
        host: this host's name.
        size: of the terminal that it writes to; None: to none, or JSON.
    """

    form: str
    terminal: Terminal
    host: str
    size: os.terminal_size | None = None

    @property
    def beside(self) -> int:
        """Characters that a worker's line begins with."""
        return len(self.terminal.prefix.of(0))

    def line(self, kind: str, text: str, **more: Any) -> str:
        """A line that is no record of the log; as JSON with more keys."""
        document = {"at_s": round(time.time(), 6), "host": self.host, "kind": kind, "text": text, **more}
        return json_line(document) if self.form == JSON else text

    def say(self, kind: str, text: str, **more: Any) -> None:
        """Write such a line at once, if there still is a screen; without a text only as JSON."""
        if text or self.form == JSON:
            with contextlib.suppress(OSError):  # the terminal was closed
                print(self.line(kind, text, **more), file=sys.stderr, flush=True)  # noqa: T201 - the screen


def opened_log(
    options: argparse.Namespace, environment: Mapping[str, str], stack: ExitStack, theirs: Translation
) -> RunLog:
    """Set up this process's logging, and the screen of its workers.

    Args:
        options: of the command line.
        environment: variables of this process.
        stack: writes out what is left.
        theirs: lines to begin with, and what the workers' lines begin with.

    Raises:
        UsageError: the environment's form is none.
    """
    try:
        form = options.log_format or checked_format(environment.get(FORMAT_VARIABLE, ""), FORMAT_VARIABLE)
    except ValueError as error:
        raise UsageError(str(error)) from error
    host = socket.gethostname()

    def lost(lines: int) -> str:
        text = f"{lines} lines were not shown, since nobody took them; those of workers are in --log-dir"
        return run_log.line("lost_lines", text if form == JSON else f"[agent] {text}", lines=lines)

    size = _terminal_size(environment) if form != JSON else None
    writer = ScreenWriter(sys.stdout, sys.stderr, lost, is_terminal=size is not None)
    stack.callback(writer.close)
    handler = logging.StreamHandler(writer.file("stderr"))
    if form == JSON:
        handler.setFormatter(JsonFormatter(host=host))
    else:
        handler.setFormatter(logging.Formatter("[agent] %(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, handlers=[handler])
    events_log.setLevel(logging.DEBUG if options.verbose or form == JSON else logging.INFO)
    terminal = Terminal(
        writer.write,
        form=form,
        host=host,
        below=None if size is None else writer.show_below,
        can_move=options.nproc_per_node == 1,
        logged=lambda: writer.logged,
        prefix=_prefix(options, theirs, host),
    )
    run_log = RunLog(form, terminal, host, size)
    for note in theirs.notes:
        run_log.say("note", note)
    return run_log


def _prefix(options: argparse.Namespace, theirs: Translation, host: str) -> LinePrefix:
    role = theirs.variables.get("ROLE_NAME", "default")
    # one host alone: these are the ranks of a group of torchrun's kind, from the start
    ranks = {number: number for number in range(options.nproc_per_node)} if options.standalone else {}
    return LinePrefix(theirs.prefix, role=role, host=host, ranks=ranks)


def _terminal_size(environment: Mapping[str, str]) -> os.terminal_size | None:
    """Of the terminal that both streams are; None: one of them is none, or it cannot write a line anew."""
    if environment.get("TERM", "dumb") == "dumb" or not (sys.stdout.isatty() and sys.stderr.isatty()):
        return None
    return shutil.get_terminal_size()
