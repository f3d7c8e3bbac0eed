"""For commands about a run that goes on elsewhere: which run, by its etcd, and a connection to that."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from urllib.parse import urlencode

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential

from torchelastic.agent.etcd_connection import connect
from torchelastic.launch.options import UsageError, access, add, add_access, find_credentials, without_password
from torchelastic.launch.runs_here import chosen_run, runs_here
from torchelastic.rendezvous.credentials import PASSWORD_VARIABLE
from torchelastic.rendezvous.records import Keys
from torchelastic.rendezvous.store import CoordinationStore, StoreUnavailableError
from torchelastic.rendezvous.url import RendezvousUrl, RendezvousUrlError, parse_url


def add_run(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add the options that name a run and its etcd.

    Args:
        parser: of the command.
        required: whether they must be given.
    """
    what = "the etcd where the hosts of the run meet"
    add(parser, "rdzv-endpoint", metavar="HOST:PORT[,..]", required=required, help=what)
    add(parser, "rdzv-id", metavar="ID", required=required, help="names the run")
    add(parser, "connect-timeout", type=float, default=30.0, metavar="S", help="wait for etcd (default 30 s)")
    add_access(parser)


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[tuple[CoordinationStore, RendezvousUrl]]:
    """A connection to the run's etcd, which has answered.

    Args:
        options: those of `add_run`.

    Raises:
        UsageError: invalid arguments.
        StoreError: etcd has not answered within `--connect-timeout`, or refuses.
    """
    with unanswered(options) as (store, url):
        wait_for_answer(store, url)
        yield store, url


@contextmanager
def unanswered(options: argparse.Namespace) -> Iterator[tuple[CoordinationStore, RendezvousUrl]]:
    """As `opened`, but for the answer: nothing has been sent yet. Imports gRPC.

    Args:
        options: those of `add_run`.

    Raises:
        UsageError: invalid arguments.
    """
    url = url_of(options)
    store = connect(url, find_credentials(url, os.environ))
    os.environ.pop(PASSWORD_VARIABLE, None)  # whatever is started from here on does not inherit it
    try:
        yield store, url
    finally:
        store.close()


def wait_for_answer(store: CoordinationStore, url: RendezvousUrl) -> None:
    """Wait until etcd answers. Raises StoreError: not within `--connect-timeout`, or it refuses.

    Args:
        store: of the run's etcd.
        url: of the run.
    """
    retrying = Retrying(
        retry=retry_if_exception_type(StoreUnavailableError),
        stop=stop_after_delay(url.connect_timeout_s),
        wait=wait_exponential(multiplier=0.05, max=1.0),
        reraise=True,
    )
    retrying(store.get, Keys(url.root).round)


def url_of(options: argparse.Namespace) -> RendezvousUrl:
    """The run that the options name; without an endpoint, one of this host. Raises UsageError."""
    if options.rdzv_endpoint is None:
        return replace(chosen_run(options, runs_here()), connect_timeout_s=options.connect_timeout)
    if options.rdzv_id is None:
        raise UsageError("--rdzv-endpoint names an etcd, not a run: give --rdzv-id ID too")
    query = f"min_workers=1&max_workers=1&connect_timeout={options.connect_timeout}&{urlencode(access(options))}"
    try:
        return parse_url(f"etcd://{without_password(options.rdzv_endpoint)}/{options.rdzv_id}?{query}")
    except RendezvousUrlError as error:
        raise UsageError(str(error)) from error
