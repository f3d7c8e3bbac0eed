"""`torchelastic status`: a run as it is now, for people or for programs."""

from __future__ import annotations

import argparse
import logging
import sys

from torchelastic.checkpoint.command.screen import say_json
from torchelastic.launch.options import add
from torchelastic.launch.run_address import add_run, opened
from torchelastic.rendezvous.store import CoordinationStore, StoreError
from torchelastic.rendezvous.url import RendezvousUrl
from torchelastic.status.reading import StatusReader, is_known
from torchelastic.status.run_status import RunStatus, every_s
from torchelastic.status.status_format import run_to_plain

NAME = "status"
EXAMPLES = """examples:
  torchelastic status                     # the run of a launcher on this host
  torchelastic status --rdzv-endpoint etcd-host:2379 --rdzv-id job7
  torchelastic status --rdzv-endpoint etcd-host:2379 --rdzv-id job7 --json

exit codes: 0 the run is known, 1 it is not or etcd did not answer, 2 invalid arguments
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `status` to the command line."""
    parser = commands.add_parser(
        NAME,
        help="show a run: members, steps, where the time goes, what happened last",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run(parser, required=False)
    add(parser, "json", action="store_true", help="one line of JSON, for programs")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Print it. Exit code 0, or 1: there is no such run, or etcd does not answer."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    try:
        with opened(options) as (store, url):
            status = fresh(store, url)
    except StoreError as error:
        print(f"torchelastic status: {error}", file=sys.stderr)  # noqa: T201 - the last word on the screen
        return 1
    if not is_known(status):
        print(f"torchelastic status: {unknown(url)}", file=sys.stderr)  # noqa: T201 - the last word on the screen
        return 1
    if options.json:
        say_json(run_to_plain(status))
    else:
        show(status)
    return 0


def fresh(store: CoordinationStore, url: RendezvousUrl) -> RunStatus:
    """The status of now: waits until all hosts have told, two periods at most. Raises StoreError."""
    reader = StatusReader(store, url)
    first = reader.read()
    hosts = len(first.hosts) + len(first.silent)
    return reader.read_fresh(1.0 + 2 * every_s(hosts)) if hosts else first


def show(status: RunStatus) -> None:
    """Print it for people, however long it is."""
    from rich.console import Console

    from torchelastic.status.screen import Screen

    Console().print(Screen(status))


def unknown(url: RendezvousUrl) -> str:
    """Why nothing is shown."""
    return f"etcd at {url.endpoints_text} knows no run {url.run_id!r}: see --rdzv-id"
