"""`torchelastic run`: this process becomes the agent of its host and runs a script in several workers."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from torchelastic.agent import sentinel
from torchelastic.agent.agent import Outcome
from torchelastic.agent.etcd_opening import connect, say_if_unfit
from torchelastic.agent.host_events import Publish
from torchelastic.agent.launcher_agent import LauncherAgent, LauncherOptions
from torchelastic.agent.plain_group import PlainGroup
from torchelastic.agent.supervisor import Supervisor
from torchelastic.agent.worker_environment import worker_environment
from torchelastic.launch.killed_launchers import Started, end_what_was_left, take_over_run_id
from torchelastic.launch.own_etcd import OwnEtcd, meeting_place
from torchelastic.launch.run_address import (
    SOCKET,
    access,
    find_credentials,
    leave_address,
    url_with,
    words_for,
)
from torchelastic.launch.run_log import RunLog, opened_log
from torchelastic.launch.run_options import (
    chosen_network,
    gateway_url,
    health_check,
    limited,
    nodes,
    understood,
    worker_command,
)
from torchelastic.observe.page.listening import PageOptions, listening
from torchelastic.processes.left_running import Sessions
from torchelastic.processes.own_folder import OwnFolder, make_folder
from torchelastic.rendezvous.credentials import NO_CREDENTIALS, PASSWORD_VARIABLE, Credentials
from torchelastic.rendezvous.own_agent import FOLDER_PREFIX
from torchelastic.rendezvous.url import UNLIMITED, RendezvousUrl
from torchelastic.text import error_text
from torchelastic.usage import CommandError, UsageError

log = logging.getLogger(__name__)

_NO_PAGE = "off"
#: In the launcher's own folder.
PAGE_TOKEN = "page-token"  # noqa: S105 - the name of a file


def run(options: argparse.Namespace) -> int:
    """Be the agent until the run is over. Exit code 0 only if the run was completed; 75: stopped before a deadline.

    76: the health check of this host has failed.
    """
    options, theirs = understood(options)
    environment, command, gateway = dict(os.environ), worker_command(options), gateway_url(options)
    end, network = limited(environment, options.time_limit, time.time()), chosen_network(options.iface, environment)
    os.environ.pop(PASSWORD_VARIABLE, None)  # whatever is started from here on does not inherit it
    with ExitStack() as stack:
        run_log = opened_log(options, environment, stack, theirs)
        url, socket_dir = _place(options, stack, command)
        credentials = _credentials(options, url, environment)
        agent_options = LauncherOptions(
            url,
            socket_dir / SOCKET,
            metrics_address=None if options.metrics_port is None else (options.metrics_host, options.metrics_port),
            push_gateway=gateway,
            term_grace_s=options.term_grace,
            ledger_dir=options.log_dir,
            page=opened_page(options, stack, network.address, socket_dir, partial(run_log.say, "page")),
            address=network.address,
            log_form=run_log.form,
        )
        own_variables = worker_environment(agent_options, options.nproc_per_node, run_log.size, run_log.beside)
        variables = {**own_variables, **theirs.variables, **end, **network.variables}
        agent_options = replace(agent_options, health_check=health_check(options, variables))

        def make_supervisor(run_is_over: Callable[[], bool], publish: Publish) -> Supervisor:
            return Supervisor(
                command,
                options.nproc_per_node,
                environment=variables,
                max_restarts=options.max_restarts,
                sizes=url.settings if options.standalone else None,
                log_dir=options.log_dir,
                run_is_over=run_is_over,
                publish=publish,
                terminal=run_log.terminal,
                hidden=theirs.hidden,
                plain=PlainGroup(options.nproc_per_node, options.max_restarts) if options.standalone else None,
                own=options.own,
                sessions=Sessions(socket_dir),
            )

        # the etcd of --standalone ends with the launcher, and there is nobody else to notify
        with nullcontext() if options.standalone else sentinel.watched(url, credentials):
            outcome = asyncio.run(_run_agent(run_log, agent_options, credentials, options.standalone, make_supervisor))
    return _say_end(run_log, outcome, options.if_finished)


def _say_end(run_log: RunLog, outcome: Outcome, if_finished: str) -> int:
    """The last line; returns the exit code."""
    exit_code = 0 if outcome.came_late and if_finished == "succeed" else outcome.exit_code
    run_log.say("failure_report" if outcome.detail else "over", outcome.message, exit_code=exit_code, **outcome.detail)
    return exit_code


def _credentials(options: argparse.Namespace, url: RendezvousUrl, environment: Mapping[str, str]) -> Credentials:
    # what the environment says is about another etcd than that of --standalone
    return NO_CREDENTIALS if options.standalone else find_credentials(url, environment)


def _place(options: argparse.Namespace, stack: ExitStack, command: Sequence[str]) -> tuple[RendezvousUrl, Path]:
    """The run, and this launcher's own folder, after what killed launchers of the same run have left."""
    started = Started.here(command) if options.standalone else None
    url = _url(options, stack, started)
    return url, stack.enter_context(_own_folder(url, started))


def _own_folder(url: RendezvousUrl, started: Started | None) -> OwnFolder:
    if started is None:
        end_what_was_left(url)
    try:
        folder = OwnFolder(make_folder(FOLDER_PREFIX))
        if started is not None:
            started.leave(folder.path)
        return folder
    except OSError as error:  # a container whose root is read-only has none
        text = f"no folder for temporary files can be made: set TMPDIR to one that can be written ({error})"
        raise CommandError(text) from error


def _say_how_to_watch(run_log: RunLog, url: RendezvousUrl, log_dir: Path | None) -> None:
    """Two lines, or one record: which run this is, and what to type to watch it, here or on another host."""
    text = f"run {url.run_id} at {url.endpoints_text}; to watch it: {words_for('top', url)} (or status)"
    report = "--log-dir DIR keeps what `torchelastic report DIR` shows"
    if log_dir is not None:
        report = f"its report, while it runs or later: torchelastic report {shlex.quote(str(log_dir))}"
    run_log.say("run", f"{text}\n{report}", run_id=url.run_id, endpoint=url.endpoints_text)


async def _run_agent(
    run_log: RunLog,
    options: LauncherOptions,
    credentials: Credentials,
    is_standalone: bool,
    make_supervisor: Callable[[Callable[[], bool], Publish], Supervisor],
) -> Outcome:
    leave_address(options.socket_path.parent, options.url)
    _say_how_to_watch(run_log, options.url, options.ledger_dir)
    store = connect(options.url, credentials, partial(say_if_unfit, is_own=is_standalone))
    return await LauncherAgent(options, store, make_supervisor).run()


def _url(options: argparse.Namespace, stack: ExitStack, started: Started | None) -> RendezvousUrl:
    min_nodes, max_nodes = nodes(options.nnodes)
    per_node = options.nproc_per_node
    if per_node < 1 or options.max_restarts < 0:
        raise UsageError("--nproc-per-node starts at 1 and --max-restarts at 0")
    least = 1 if options.standalone else min_nodes * per_node
    min_workers = least if options.min_workers is None else options.min_workers
    max_workers = max_nodes * per_node if options.max_workers is None else options.max_workers
    if started is not None:
        if options.rdzv_endpoint or max_nodes > 1:
            raise UsageError("--standalone is for one host: leave it out to meet others at --rdzv-endpoint")
        if access(options):
            raise UsageError("--standalone has an etcd of its own: leave out --etcd-..., which is about another one")
        try:
            endpoint = stack.enter_context(OwnEtcd()).endpoint
        except (OSError, RuntimeError) as error:
            raise CommandError(f"the etcd of --standalone cannot be started: {error}") from error
        before = take_over_run_id(started)
        run_id = options.rdzv_id or before or f"standalone-{uuid.uuid4().hex[:8]}"
    else:
        if not options.rdzv_endpoint or not options.rdzv_id:
            raise UsageError("give --rdzv-endpoint HOST:PORT and --rdzv-id ID, or --standalone for this host alone")
        endpoint, run_id = options.rdzv_endpoint, options.rdzv_id
        if options.meeting_place is not None:
            host, port = options.meeting_place
            _open_meeting_place(stack, host, port, run_id, options.connect_timeout)
    return url_with(
        options,
        endpoint,
        run_id,
        min_workers=min_workers,
        max_workers=max_workers,
        multiple_of=options.multiple_of,
        timeout=options.rdzv_timeout,
        last_call_timeout=options.last_call,
        ttl=options.ttl,
        connect_timeout=options.connect_timeout,
        orphan_timeout=options.orphan_timeout or (UNLIMITED if options.standalone else "300"),
    )


def _open_meeting_place(stack: ExitStack, host: str, port: int, run_id: str, patience_s: float) -> None:
    try:
        stack.enter_context(meeting_place(host, port, run_id, patience_s))
    except (OSError, RuntimeError) as error:
        raise UsageError(f"the hosts cannot meet at {host}:{port}: {error}") from error


def opened_page(
    options: argparse.Namespace, stack: ExitStack, address: str, folder: Path, say: Callable[[str], None]
) -> PageOptions | None:
    """Take the page's address and say where it is, once; None: there is none.

    Args:
        options: of the command line.
        stack: frees the address.
        address: where the other hosts reach this one, if one was chosen; used instead of its name.
        folder: of this user alone; for the token, if the user names no file and sees no terminal.
        say: shows a line; no log, for the line may hold a token.

    Raises:
        UsageError: the arguments are invalid, or the address cannot be had.
    """
    where = options.page or ("0" if options.standalone else _NO_PAGE)
    if where == _NO_PAGE:
        if options.page_token_file is not None:
            raise UsageError("--page-token-file is for a page: give --page [HOST:]PORT too")
        return None
    is_seen = sys.stderr.isatty()
    token_file = options.page_token_file or (None if is_seen else folder / PAGE_TOKEN)
    try:
        page = listening(where, token_file)
    except (ValueError, OSError) as error:
        if options.page is None and options.page_token_file is None:  # nobody has asked for it
            log.warning("the live page is not served: %s", error_text(error))
            return None
        raise UsageError(error_text(error)) from error
    stack.callback(page.socket.close)
    page = replace(page, address=address)
    where_token_is = "" if is_seen or options.page_token_file else f" (its token is in {token_file})"
    say(f"live page: {page.url_to_open}{where_token_is}")
    return page
