"""`torchelastic events`: what has happened in a run, from its etcd or from its journals."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from torchelastic.console import say, say_json
from torchelastic.launch.run_address import opened
from torchelastic.launch.status import current
from torchelastic.observe.ledger.journal import Journal
from torchelastic.observe.ledger.ledger_events import Counted, to_dict
from torchelastic.observe.report.building import NoRunError, of_one_run
from torchelastic.observe.report.journals import find_journals
from torchelastic.observe.status.event_lines import EventFollower, lines_of
from torchelastic.observe.status.run_screen import event_text
from torchelastic.observe.status.run_status import EventLine, RunStatus, every_s
from torchelastic.observe.status.status_format import event_to_plain
from torchelastic.observe.status.status_reader import StatusReader
from torchelastic.rendezvous.records import RoundState
from torchelastic.rendezvous.store import StoreError
from torchelastic.text import error_text
from torchelastic.usage import CommandError, UsageError


def events(options: argparse.Namespace) -> int:
    """List them. Exit code 0; 1: no such run, no journal, or etcd does not answer."""
    if bool(options.journal) == bool(options.rdzv_endpoint and options.rdzv_id):
        raise UsageError("give --rdzv-endpoint HOST:PORT and --rdzv-id ID, or --journal PATH")
    if options.journal and options.follow:
        raise UsageError("--follow is for a run by its etcd: leave out --journal; or follow the file: tail -F PATH")
    if options.journal:
        _from_journals(options.journal, options.rdzv_id, as_json=options.json)
        return 0
    with opened(options) as (store, url):
        status = current(store, url)
        if not status.hosts and not status.silent:
            _note(
                f"no host takes part in run {url.run_id!r} any more, and etcd keeps no events of those that have left: "
                "they are in the journals of `torchelastic run --log-dir DIR`; give --journal DIR"
            )
        if options.follow:
            _follow(StatusReader(store, url), status, as_json=options.json)
        else:
            _show(status.events, as_json=options.json)
    return 0


def _note(text: str) -> None:
    print(f"torchelastic events: {text}", file=sys.stderr)  # noqa: T201 - beside the answer


# --- from etcd --------------------------------------------------------------------------------------------------------


def _follow(reader: StatusReader, status: RunStatus, *, as_json: bool) -> None:
    following, is_away = EventFollower(), False
    while not _is_over(status):
        _show(following.news(status.events), as_json=as_json)
        time.sleep(every_s(len(status.hosts)))
        try:
            status, is_away = reader.read(), False
        except StoreError as error:
            if not is_away:
                _note(f"{error}; waiting")
            is_away = True
    _show(following.news(status.events, is_last=True), as_json=as_json)


def _is_over(status: RunStatus) -> bool:
    return status.round.state is RoundState.CLOSED and not status.hosts


def _show(lines: Iterable[EventLine], *, as_json: bool) -> None:
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


def _from_journals(paths: Sequence[Path], run_id: str | None, *, as_json: bool) -> None:
    """All events of all journals of a run, by time: for people as lines, for programs as they were written down."""
    try:
        found = find_journals(paths)
    except OSError as error:
        raise CommandError(error_text(error)) from error
    if not found.journals:
        where = ", ".join(map(str, paths))
        none = f"there is no journal in {where}: give the --log-dir of `torchelastic run`"
        raise CommandError(" ".join([none, *found.lacks_of(())]))
    try:
        chosen = of_one_run(found.journals, run_id, "--rdzv-id")
    except NoRunError as error:
        raise CommandError(str(error)) from error
    for lack in found.lacks_of(chosen):
        _note(lack)
    journals = chosen.values()
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


def _lines(journal: Journal) -> tuple[EventLine, ...]:
    head = journal.head
    return lines_of(head.host, ((head.wall_ns_of(event.at_ns) / 1e9, event) for event in journal.events))
