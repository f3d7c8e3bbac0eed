"""`torchelastic events`: what has happened in a run, from its etcd or from its journals."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from torchelastic.checkpoint.command.screen import say, say_json
from torchelastic.launch.options import UsageError, add
from torchelastic.launch.run_address import add_run, opened
from torchelastic.launch.status import fresh, unknown
from torchelastic.ledger.events import Counted, LedgerFormatError, to_dict
from torchelastic.ledger.journal import Journal, read_journals
from torchelastic.rendezvous.records import RoundState
from torchelastic.rendezvous.store import CoordinationStore, StoreError
from torchelastic.rendezvous.url import RendezvousUrl
from torchelastic.status.event_lines import Following, lines_of
from torchelastic.status.reading import StatusReader, is_known
from torchelastic.status.run_status import EventLine, RunStatus, every_s
from torchelastic.status.status_format import event_to_plain

EXAMPLES = """examples:
  torchelastic events --rdzv-endpoint etcd-host:2379 --rdzv-id job7
  torchelastic events --rdzv-endpoint etcd-host:2379 --rdzv-id job7 --follow
  torchelastic events --journal /logs/job7 /logs/job7-node2 --json

From etcd come the newest events of each host that takes part now, from journals all that are in them. With --follow it
goes on until the run is over, or Ctrl-C.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `events` to the command line."""
    parser = commands.add_parser(
        "events",
        help="list what has happened in a run: joins, losses, re-forms, saves, ..",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run(parser, required=False)
    add(parser, "follow", action="store_true", help="go on as they come")
    add(parser, "json", action="store_true", help="one JSON object per line, for programs")
    what = "folders with journals of the run, instead of its etcd"
    add(parser, "journal", type=Path, nargs="+", default=[], metavar="PATH", help=what)
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """List them. Exit code 0; 1: no such run, no journal, or etcd does not answer."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    if bool(options.journal) == bool(options.rdzv_endpoint and options.rdzv_id):
        raise UsageError("give --rdzv-endpoint HOST:PORT and --rdzv-id ID, or --journal PATH")
    if options.journal and options.follow:
        raise UsageError("--follow is for a run by its etcd: leave out --journal; or follow the file: tail -F PATH")
    try:
        if options.journal:
            _from_journals(options.journal, as_json=options.json)
            return 0
        with opened(options) as (store, url):
            return _from_etcd(store, url, follow=options.follow, as_json=options.json)
    except (StoreError, LedgerFormatError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it ends
            return 128 + signal.SIGPIPE
        print(f"torchelastic events: {error}", file=sys.stderr)  # noqa: T201 - the last word on the screen
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


# --- from etcd --------------------------------------------------------------------------------------------------------


def _from_etcd(store: CoordinationStore, url: RendezvousUrl, *, follow: bool, as_json: bool) -> int:
    status = fresh(store, url)
    if not is_known(status):
        print(f"torchelastic events: {unknown(url)}", file=sys.stderr)  # noqa: T201 - the last word on the screen
        return 1
    if not follow:
        _show(status.events, as_json=as_json)
        return 0
    _follow(StatusReader(store, url), status, as_json=as_json)
    return 0


def _follow(reader: StatusReader, status: RunStatus, *, as_json: bool) -> None:
    following, is_away = Following(), False
    while not _is_over(status):
        _show(following.news(status.events), as_json=as_json)
        time.sleep(every_s(len(status.hosts)))
        try:
            status, is_away = reader.read(), False
        except StoreError as error:
            if not is_away:
                print(f"torchelastic events: {error}; waiting", file=sys.stderr)  # noqa: T201 - beside the answer
            is_away = True
    _show(following.news(status.events, is_last=True), as_json=as_json)


def _is_over(status: RunStatus) -> bool:
    return status.round.state is RoundState.CLOSED and not status.hosts


def _show(lines: Iterable[EventLine], *, as_json: bool) -> None:
    from torchelastic.status.screen import event_text

    for line in lines:
        if as_json:
            say_json(event_to_plain(line))
        else:
            say(f"{clock_text(line.at_s)}  {event_text(line)}")
    sys.stdout.flush()


def clock_text(at_s: float) -> str:
    """The local time of an event, for people, to the millisecond."""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at_s))}.{int(at_s * 1000) % 1000:03d}"


# --- from journals ----------------------------------------------------------------------------------------------------


def _from_journals(paths: Sequence[Path], *, as_json: bool) -> None:
    """All events of all journals, by time: for people as lines, for programs as they were written down."""
    journals = [journal for path in paths for journal in _journals_of(path)]
    damaged = sum(journal.damaged for journal in journals)
    if damaged:
        print(f"torchelastic events: {damaged} damaged lines are left out", file=sys.stderr)  # noqa: T201 - beside it
    if not as_json:
        _show(sorted((line for one in journals for line in _lines(one)), key=lambda line: line.at_s), as_json=False)
        return
    written = [
        {"host": one.head.host, "at_s": one.head.wall_ns_of(event.at_ns) / 1e9, **to_dict(event)}
        for one in journals
        for event in one.events
        if not isinstance(event, Counted)
    ]
    for plain in sorted(written, key=lambda plain: float(plain["at_s"])):
        say_json(plain)


def _journals_of(path: Path) -> list[Journal]:
    folder = path if path.is_dir() else path.parent
    journals = read_journals(folder)
    if path != folder:
        journals = {name: one for name, one in journals.items() if path.name.startswith(f"{name}.")}
    if not journals:
        raise LedgerFormatError(f"there is no journal in {path}: give the --log-dir of `torchelastic run`")
    return list(journals.values())


def _lines(journal: Journal) -> tuple[EventLine, ...]:
    head = journal.head
    return lines_of(head.host, ((head.wall_ns_of(event.at_ns) / 1e9, event) for event in journal.events))
