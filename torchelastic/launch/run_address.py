"""Which run a command is about, where its etcd is, who may speak to that, and a connection to it.

Each launcher leaves the address of its run beside its socket, so that `top` and `status` find the runs of this host.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlencode

from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_delay, wait_exponential

from torchelastic.agent.etcd_opening import connect
from torchelastic.launch.command_line import ACCESS_OPTIONS
from torchelastic.rendezvous.credentials import PASSWORD_VARIABLE, Credentials, CredentialsError, read_file, resolve
from torchelastic.rendezvous.own_agent import FOLDER_PREFIX
from torchelastic.rendezvous.records import Keys
from torchelastic.rendezvous.store import CoordinationStore, StoreError, StoreUnavailableError
from torchelastic.rendezvous.url import RendezvousUrl, RendezvousUrlError, parse_url
from torchelastic.usage import CommandError, UsageError

#: In there: where the agent listens, which says that the launcher lives; and the run's URL, without a password.
SOCKET, ADDRESS = "agent", "run"

log = logging.getLogger(__name__)

#: A command that has waited for etcd so long says so.
SAY_AFTER_S = 2.0


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[tuple[CoordinationStore, RendezvousUrl]]:
    """A connection to the run's etcd, which has answered; for a command that says nothing of its own beside its answer.

    Args:
        options: `--rdzv-endpoint`, `--rdzv-id`, `--connect-timeout` and those about access to etcd.

    Raises:
        UsageError: invalid arguments.
        CommandError: etcd has not answered within `--connect-timeout`, or does not any more, or refuses.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    try:
        with unanswered(options) as (store, url):
            wait_for_answer(store, url, log.warning)
            yield store, url
    except StoreError as error:
        raise CommandError(str(error)) from error


@contextmanager
def unanswered(options: argparse.Namespace) -> Iterator[tuple[CoordinationStore, RendezvousUrl]]:
    """As `opened`, but for the answer: nothing has been sent yet. Imports gRPC.

    Args:
        options: as of `opened`.

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


def wait_for_answer(
    store: CoordinationStore, url: RendezvousUrl, say: Callable[[str], None] = lambda _text: None
) -> None:
    """Wait until etcd answers. Raises StoreError: not within `--connect-timeout`, or it refuses.

    Args:
        store: of the run's etcd.
        url: of the run.
        say: is called once with a line for people where it takes long.
    """
    said: list[str] = []

    def about_to_sleep(state: RetryCallState) -> None:
        if not said and (state.seconds_since_start or 0.0) > SAY_AFTER_S:
            said.append(f"etcd at {url.endpoints_text} has not answered yet: trying for {url.connect_timeout_s:g} s")
            say(f"{said[0]} (--connect-timeout)")

    retrying = Retrying(
        retry=retry_if_exception_type(StoreUnavailableError),
        stop=stop_after_delay(url.connect_timeout_s),
        wait=wait_exponential(multiplier=0.05, max=1.0),
        before_sleep=about_to_sleep,
        reraise=True,
    )
    retrying(store.get, Keys(url.root).round)


def url_of(options: argparse.Namespace) -> RendezvousUrl:
    """The run that the options name; without an endpoint, one of this host. Raises UsageError."""
    if options.rdzv_endpoint is None:
        return replace(chosen_run(options, runs_here()), connect_timeout_s=options.connect_timeout)
    if options.rdzv_id is None:
        raise UsageError("--rdzv-endpoint names an etcd, not a run: give --rdzv-id ID too")
    return url_with(options, options.rdzv_endpoint, options.rdzv_id, connect_timeout=options.connect_timeout)


def url_with(options: argparse.Namespace, endpoint: str, run_id: str, **query: object) -> RendezvousUrl:
    """The URL of a run.

    Args:
        options: those about access to etcd.
        endpoint: of its etcd.
        run_id: of the run.
        query: more of its parameters; without any, any number of workers will do.

    Raises:
        UsageError: they make no URL, or there is a password in it.
    """
    words = urlencode({"min_workers": 1, **query, **access(options)})
    try:
        return parse_url(f"etcd://{checked_endpoint(endpoint)}/{run_id}?{words}")
    except RendezvousUrlError as error:
        raise UsageError(str(error)) from error


# --- access to etcd ---------------------------------------------------------------------------------------------------


def access(options: argparse.Namespace) -> dict[str, str]:
    """What the options say about access to etcd, in the URL's words."""
    given = {parameter: getattr(options, name.replace("-", "_")) for name, (parameter, *_) in ACCESS_OPTIONS.items()}
    return {parameter: value for parameter, value in given.items() if value}


def access_words(url: RendezvousUrl) -> list[str]:
    """What to type for the same access to etcd as the URL has it; a password in the environment stays there."""
    given = {name: getattr(url.access, parameter) for name, (parameter, *_) in ACCESS_OPTIONS.items()}
    return [word for name, value in given.items() if value for word in (f"--{name}", shlex.quote(value))]


def checked_endpoint(endpoint: str) -> str:
    """The endpoint as given. Raises UsageError if it has a password in it, or is a URL as `etcdctl` takes them."""
    if ":" in endpoint.rpartition("@")[0]:
        raise UsageError(
            "every user of this host may read a command line: give no password with --rdzv-endpoint, but "
            f"--etcd-password-file FILE, or the environment's {PASSWORD_VARIABLE}"
        )
    if "/" in endpoint:
        hint = "; --etcd-cacert FILE switches TLS on" if "https://" in endpoint else ""
        raise UsageError(f"--rdzv-endpoint {endpoint!r}: write HOST:PORT[,..], without a scheme and a path{hint}")
    return endpoint


def find_credentials(url: RendezvousUrl, environment: Mapping[str, str]) -> Credentials:
    """What the URL, the environment and files say. Raises UsageError."""
    try:
        return resolve(url.access, environment, read_file)
    except CredentialsError as error:
        raise UsageError(str(error)) from error


# --- the runs of this host --------------------------------------------------------------------------------------------


def leave_address(folder: Path, url: RendezvousUrl) -> None:
    """Let the commands of this user find the run; called by the launcher, whose folder goes when it ends."""
    (folder / ADDRESS).write_text(str(url), encoding="utf-8")


def runs_here(folder: Path | None = None) -> list[RendezvousUrl]:
    """The runs whose launchers live on this host and belong to this user.

    Args:
        folder: where launchers make theirs; default: the folder for temporary files.
    """
    found = {}
    for address in sorted((folder or Path(tempfile.gettempdir())).glob(f"{FOLDER_PREFIX}*/{ADDRESS}")):
        try:
            if address.parent.lstat().st_uid == os.getuid() and _is_answered(address.with_name(SOCKET)):
                url = parse_url(address.read_text(encoding="utf-8"))
                found[url.root, url.endpoints] = url
        except (OSError, RendezvousUrlError):
            continue  # another user's, or its launcher has just ended
    return list(found.values())


def chosen_run(options: argparse.Namespace, runs: Sequence[RendezvousUrl]) -> RendezvousUrl:
    """The one run of this host that the options fit.

    Args:
        options: as of `opened`, without an endpoint.
        runs: what `runs_here` has found.

    Raises:
        UsageError: there is none, or there are several, which the message lists with the words to type.
    """
    fitting = [url for url in runs if options.rdzv_id in (None, url.run_id)]
    if len(fitting) == 1:
        return fitting[0]
    how = "give --rdzv-endpoint HOST:PORT and --rdzv-id ID"
    if not fitting:
        called = "" if options.rdzv_id is None else f" called {options.rdzv_id!r}"
        raise UsageError(f"no launcher of this user runs a job{called} on this host: {how}")
    lines = "\n".join(f"  {words_for(options.command, url)}" for url in fitting)
    raise UsageError(f"{len(fitting)} runs of this user are on this host:\n{lines}")


def words_for(command: str, url: RendezvousUrl) -> str:
    """What to type for a command about a run."""
    words = ["torchelastic", command, "--rdzv-endpoint", url.endpoints_text, "--rdzv-id", url.run_id]
    return " ".join([*words, *access_words(url)])


def _is_answered(path: Path) -> bool:
    """Whether somebody listens at that socket: a launcher that was killed has left it. Raises OSError."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        connection.connect(str(path))
    return True
