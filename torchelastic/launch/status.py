"""`torchelastic status`: a run as it is now, for people or for programs; `torchelastic top`: live in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

from torchelastic.console import say_json
from torchelastic.launch.run_address import opened, unanswered, wait_for_answer
from torchelastic.observe.status.run_status import RunStatus, every_s
from torchelastic.observe.status.status_format import run_to_plain
from torchelastic.observe.status.status_reader import StatusReader, is_known
from torchelastic.processes.background import in_background
from torchelastic.rendezvous.store import CoordinationStore, StoreError
from torchelastic.rendezvous.url import RendezvousUrl
from torchelastic.usage import CommandError

#: Between two checks for a signal, a key, or another size of the terminal.
TICK_S = 0.2
FOOTER = "q: quit"


def status(options: argparse.Namespace) -> int:
    """Print it. Exit code 0, or 1: there is no such run, or etcd does not answer."""
    with opened(options) as (store, url):
        found = current(store, url)
    if options.json:
        say_json(run_to_plain(found))
    else:
        show(found)
    return 0


def current(store: CoordinationStore, url: RendezvousUrl) -> RunStatus:
    """The status of now: waits until all hosts have told, two periods at most.

    Args:
        store: of the run's etcd.
        url: of the run.

    Raises:
        StoreError: etcd does not answer.
        CommandError: it knows no such run.
    """
    reader = StatusReader(store, url)
    found = reader.read()
    hosts = len(found.hosts) + len(found.silent)
    if hosts:
        found = reader.read_fresh(1.0 + 2 * every_s(hosts))
    if not is_known(found):
        raise CommandError(_unknown(url))
    return found


def show(found: RunStatus) -> None:
    """Print it for people, however long it is; in a pipe or a file nothing is cut, unless `COLUMNS` says how wide."""
    from rich.console import Console

    from torchelastic.observe.status.run_screen import UNCUT_WIDTH, Screen

    is_uncut = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    Console(width=UNCUT_WIDTH if is_uncut else None).print(Screen(found))


def _unknown(url: RendezvousUrl) -> str:
    return f"etcd at {url.endpoints_text} knows no run {url.run_id!r}: see --rdzv-id"


# --- top --------------------------------------------------------------------------------------------------------------


def top(options: argparse.Namespace) -> int:
    """Show it until the person has seen enough. Exit code 0; 1: etcd has not answered at all; 143: ended by SIGTERM.

    For the main thread: it handles SIGINT and SIGTERM.
    """
    if not sys.stdout.isatty():
        return status(options)
    logging.getLogger("torchelastic").addHandler(logging.NullHandler())
    logging.getLogger("torchelastic").propagate = False  # nothing else may write to the screen
    with Signals() as signals:
        try:
            with unanswered(options) as (store, url):
                answer = in_background(partial(wait_for_answer, store, url), "torchelastic-top")
                while not answer.done() and not signals.received:
                    time.sleep(TICK_S / 10)
                if not signals.received:
                    answer.result()
                    _watch(store, url, max(0.1, options.interval), signals)
        except StoreError as error:
            raise CommandError(str(error)) from error
        return 128 + signal.SIGTERM if signals.received == signal.SIGTERM else 0


class Signals:
    """Remembers, within its block, that SIGINT (Ctrl-C) or SIGTERM has arrived. For the main thread.

    Nothing is raised: an exception from a signal handler appears wherever the main thread is, between two control
    sequences for the terminal for example; and in a `__del__` or in the callback of a weak reference, as every import
    runs one, Python discards it, and the signal is lost.

    A shell without job control starts its background commands with SIGINT ignored. Whoever sees the display has the
    terminal, and types Ctrl-C to end it: so SIGINT is handled even then.
    """

    def __init__(self) -> None:
        self.received = 0  # the first one's number
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _receive(self, number: int, _frame: object) -> None:
        self.received = self.received or number


def _watch(store: CoordinationStore, url: RendezvousUrl, interval_s: float, signals: Signals) -> None:
    """Draw the run until a key or a signal ends it; etcd is read on a thread, so that neither waits for it."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from torchelastic.observe.status.run_screen import Screen

    console, reader = Console(), StatusReader(store, url)
    found: RunStatus | None = None
    reading: Future[RunStatus] | None = None
    answered_s, next_s = time.monotonic(), 0.0

    def picture(away_s: float) -> Screen | Text:
        if found is None or not is_known(found):
            what = _unknown(url) if found is not None and not away_s else "waiting for etcd"
            return Text(f"{what}\n{FOOTER}")
        return Screen(found, height=console.size.height, away_s=away_s, footer=FOOTER)

    with keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        drawn: object = None
        while not signals.received and not pressed(TICK_S):
            now_s = time.monotonic()
            if reading is not None and reading.done():
                with contextlib.suppress(StoreError):  # the picture says since when
                    found, answered_s = reading.result(), now_s
                hosts = 0 if found is None else len(found.hosts)
                reading, next_s = None, now_s + max(interval_s, every_s(hosts) if hosts > 64 else 0.0)
            if reading is None and now_s >= next_s:
                reading = in_background(reader.read, "torchelastic-top")
            silent_s = now_s - answered_s
            away_s = silent_s if silent_s > 3.0 + interval_s else 0.0
            now = (answered_s, console.size, int(away_s))
            if now != drawn:
                drawn = now
                live.update(picture(away_s), refresh=True)


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], bool]]:
    """Keys come one by one and are not shown, until the end of the block; Ctrl-C stays what it is.

    What it gives waits so many seconds for a key, and says whether that was q, or the terminal is gone.
    """
    if not sys.stdin.isatty():
        yield _no_key
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor, termios.TCSANOW)
        yield partial(_is_enough, descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


def _no_key(timeout_s: float) -> bool:
    time.sleep(timeout_s)
    return False


def _is_enough(descriptor: int, timeout_s: float) -> bool:
    readable, _, _ = select.select([descriptor], [], [], timeout_s)
    if not readable:
        return False
    try:
        typed = os.read(descriptor, 64)
    except OSError:
        return True
    return not typed or b"q" in typed.lower()
