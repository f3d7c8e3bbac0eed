"""`torchelastic run`: this process becomes the agent of its host and runs a script in several workers."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import urlencode

from torchelastic.agent import sentinel
from torchelastic.agent.agent import Agent, AgentOptions, Outcome
from torchelastic.agent.etcd_connection import connect, say_if_unfit
from torchelastic.agent.plain_group import PlainGroup
from torchelastic.agent.supervisor import Supervisor
from torchelastic.agent.worker import Worker
from torchelastic.agent.worker_environment import worker_environment
from torchelastic.launch.interface import add_interface, meant_interface
from torchelastic.launch.log import RunLog, add_log, opened_log
from torchelastic.launch.meeting_place import MeetingPlace
from torchelastic.launch.options import UsageError, access, add, add_access, find_credentials, without_password
from torchelastic.launch.own_etcd import OwnEtcd
from torchelastic.launch.page import add_page, opened_page
from torchelastic.launch.runs_here import FOLDER_PREFIX, SOCKET, leave_address, words_for
from torchelastic.launch.time_limit import add_time_limit, limited
from torchelastic.launch.torchrun_options import (
    Translation,
    add_torchrun_options,
    from_environment,
    translated,
    workers_per_host,
)
from torchelastic.metrics.pushing import checked_gateway
from torchelastic.rendezvous.credentials import PASSWORD_VARIABLE, Credentials
from torchelastic.rendezvous.url import UNLIMITED, RendezvousUrl, RendezvousUrlError, parse_url

EXAMPLES = """examples:
  torchelastic run --standalone --nproc-per-node 3 train.py --epochs 10
  torchelastic run --rdzv-endpoint etcd-host:2379 --rdzv-id job7 --nnodes 2:4 --nproc-per-node 8 train.py

exit codes: 0 the run is finished, 1 it or a worker failed, 2 invalid arguments, 75 stopped before a deadline: start it
again (see docs/lifetime.md), 128 + N stopped by signal N
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `run` to the command line. Dashes and underscores are the same, as for torchrun's users."""
    parser = commands.add_parser(
        "run",
        help="run a training script on this host, alone or together with others",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # else an option of the script that begins like two of ours is refused as ambiguous
    )
    _add_meeting(parser)
    add(parser, "max-restarts", type=int, default=3, metavar="K", help="of each worker (default 3)")
    add(parser, "log-dir", type=Path, metavar="DIR", help="write each worker's output to a file in here too")
    add(parser, "rdzv-timeout", type=float, default=600.0, metavar="S", help="wait for a group (default 600 s)")
    add(parser, "last-call", type=float, default=30.0, metavar="S", help="first group: wait for more (default 30 s)")
    add(parser, "ttl", type=float, default=10.0, metavar="S", help="silence after which a host is lost (default 10 s)")
    add(parser, "connect-timeout", type=float, default=30.0, metavar="S", help="wait for etcd (default 30 s)")
    grace_help = "on SIGTERM, let workers leave in order for so long (default 30 s)"
    add(parser, "term-grace", type=float, default=30.0, metavar="S", help=grace_help)
    orphan_help = (
        "how long a group may train without contact to etcd; 'unlimited' (default 300 s; --standalone: unlimited)"
    )
    add(parser, "orphan-timeout", metavar="S", help=orphan_help)
    add_interface(parser)
    add_time_limit(parser)
    finished_help = "what to do in a run that was finished before: fail (default), or succeed with exit code 0"
    add(parser, "if-finished", choices=("fail", "succeed"), default="fail", help=finished_help)
    add_access(parser)
    add(parser, "metrics-port", type=int, metavar="PORT", help="serve Prometheus metrics there; 0: any free port")
    add(parser, "metrics-host", default="127.0.0.1", metavar="ADDR", help="where to serve them (default 127.0.0.1)")
    gateway_help = "push the metrics to a Prometheus push gateway, every 15 s and at the end"
    add(parser, "push-gateway", metavar="URL", help=gateway_help)
    add_page(parser)
    add_log(parser)
    add_torchrun_options(parser)
    parser.set_defaults(**from_environment(os.environ))
    parser.add_argument("-m", "--module", action="store_true", help="script is the name of a module")
    parser.add_argument("-v", "--verbose", action="store_true", help="say more about membership")
    parser.add_argument("script", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    parser.set_defaults(execute=execute)


def _add_meeting(parser: argparse.ArgumentParser) -> None:
    """Add the options about who trains together, and where they meet."""
    alone_help = "this host alone, with an etcd of its own: the default without --nnodes and --rdzv-endpoint"
    add(parser, "standalone", action="store_true", help=alone_help)
    add(parser, "rdzv-endpoint", metavar="HOST:PORT[,..]", help="the etcd where the hosts of a run meet")
    add(parser, "rdzv-id", metavar="ID", help="names the run; the same on every host")
    add(parser, "nnodes", default="1:1", metavar="MIN[:MAX]", help="how many hosts (default 1)")
    nproc_help = "workers on each host: a number (default 1), cpu, gpu: as many as there are, or auto: gpu, or else cpu"
    add(parser, "nproc-per-node", default="1", metavar="N", help=nproc_help)
    add(parser, "min-workers", type=int, metavar="M", help="default: 1 with --standalone, else MIN x N")
    add(parser, "max-workers", type=int, metavar="M", help="default: MAX x N")
    multiple_help = "train in groups whose size is a multiple of it; who is over waits as a spare (default 1)"
    add(parser, "multiple-of", type=int, default=1, metavar="K", help=multiple_help)


def execute(options: argparse.Namespace) -> int:
    """Be the agent until the run is over. Exit code 0 only if the run was completed; 75: stopped before a deadline."""
    options, theirs = _understood(options)
    environment, command, gateway = dict(os.environ), _worker_command(options), _gateway(options)
    end, network = limited(environment, options.time_limit, time.time()), meant_interface(options.iface, environment)
    os.environ.pop(PASSWORD_VARIABLE, None)  # whatever is started from here on does not inherit it
    with ExitStack() as stack:
        run_log = opened_log(options, environment, stack, theirs.notes)
        url = _url(options, stack)
        # what the environment says is about another etcd than that of --standalone
        credentials = Credentials() if options.standalone else find_credentials(url, environment)
        socket_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, ignore_cleanup_errors=True))
        agent_options = AgentOptions(
            url,
            Path(socket_dir, SOCKET),
            metrics_address=None if options.metrics_port is None else (options.metrics_host, options.metrics_port),
            push_gateway=gateway,
            term_grace_s=options.term_grace,
            ledger_dir=options.log_dir,
            page=opened_page(options, stack, network.address, partial(run_log.say, "page")),
            address=network.address,
            log_form=run_log.form,
        )
        own_variables = worker_environment(agent_options, options.nproc_per_node, run_log.size)

        def make_supervisor(run_is_over: Callable[[], bool], on_exit: Callable[[Worker, int], None]) -> Supervisor:
            return Supervisor(
                command,
                options.nproc_per_node,
                environment={**own_variables, **theirs.variables, **end, **network.variables},
                max_restarts=options.max_restarts,
                sizes=url.settings if options.standalone else None,
                log_dir=options.log_dir,
                run_is_over=run_is_over,
                on_exit=on_exit,
                terminal=run_log.terminal,
                hidden=theirs.hidden,
                plain=PlainGroup(options.nproc_per_node, options.max_restarts) if options.standalone else None,
            )

        # the etcd of --standalone ends with the launcher, and nobody else is there to be told of that
        with nullcontext() if options.standalone else sentinel.watched(url, credentials):
            outcome = asyncio.run(_run_agent(run_log, agent_options, credentials, options.standalone, make_supervisor))
    exit_code = 0 if outcome.came_late and options.if_finished == "succeed" else outcome.exit_code
    run_log.say("failure_report" if outcome.detail else "over", outcome.message, exit_code=exit_code, **outcome.detail)
    return exit_code


def _say_how_to_watch(run_log: RunLog, url: RendezvousUrl, log_dir: Path | None) -> None:
    """Two lines, or one record: which run this is, and what to type to watch it, here or on another host."""
    text = f"run {url.run_id} at {url.endpoints_text}; to watch it: {words_for('top', url)} (or status)"
    report = "--log-dir DIR keeps what `torchelastic report DIR` shows"
    if log_dir is not None:
        report = f"its report, while it runs or later: torchelastic report {shlex.quote(str(log_dir))}"
    run_log.say("run", f"{text}\n{report}", run_id=url.run_id, endpoint=url.endpoints_text)


async def _run_agent(
    run_log: RunLog,
    options: AgentOptions,
    credentials: Credentials,
    is_standalone: bool,
    make_supervisor: Callable[[Callable[[], bool], Callable[[Worker, int], None]], Supervisor],
) -> Outcome:
    leave_address(options.socket_path.parent, options.url)
    _say_how_to_watch(run_log, options.url, options.ledger_dir)
    store = connect(options.url, credentials, partial(say_if_unfit, is_own=is_standalone))
    return await Agent(options, store, make_supervisor).run()


def _understood(options: argparse.Namespace) -> tuple[argparse.Namespace, Translation]:
    """The options with what torchrun's words among them come to."""
    nproc = workers_per_host(options.nproc_per_node, lambda: os.cpu_count() or 1, _visible_gpus)
    theirs = translated(options, several_hosts=_nodes(options.nnodes)[1] > 1, nproc=nproc)
    defaults = {"meeting_place": None, "nproc_per_node": nproc}
    ours = argparse.Namespace(**{**vars(options), **defaults, **theirs.options})
    if theirs.to_files and ours.log_dir is None:
        ours.log_dir = Path(tempfile.mkdtemp(prefix="torchelastic-logs-"))
        theirs = replace(theirs, notes=(*theirs.notes, f"the workers' output is written to files in {ours.log_dir}"))
    return ours, theirs


def _visible_gpus() -> int:
    """In another process: torch would take 200 MB of the launcher's memory as long as the run lasts."""
    asking = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    try:
        return int(subprocess.run(asking, capture_output=True, text=True, check=True).stdout)
    except (subprocess.CalledProcessError, ValueError) as error:
        raise UsageError(f"--nproc-per-node: torch cannot count the GPUs here ({error}); write a number") from error


def _worker_command(options: argparse.Namespace) -> list[str]:
    if options.no_python and not options.run_path:
        return _program(options)
    if options.module:
        return [sys.executable, "-m", options.script, *options.arguments]
    if not Path(options.script).is_file():
        raise UsageError(f"there is no file {options.script!r}; for a module write -m {options.script}")
    return [sys.executable, options.script, *options.arguments]


def _program(options: argparse.Namespace) -> list[str]:
    if options.module:
        raise UsageError("--no-python and -m exclude each other: leave one out")
    found = shutil.which(options.script)
    if found is None:
        raise UsageError(f"--no-python: there is no program {options.script!r} that this user may start")
    return [found, *options.arguments]


def _gateway(options: argparse.Namespace) -> str | None:
    try:
        return None if options.push_gateway is None else checked_gateway(options.push_gateway)
    except ValueError as error:
        raise UsageError(f"--push-gateway: {error}") from error


def _url(options: argparse.Namespace, stack: ExitStack) -> RendezvousUrl:
    min_nodes, max_nodes = _nodes(options.nnodes)
    per_node = options.nproc_per_node
    if per_node < 1 or options.max_restarts < 0:
        raise UsageError("--nproc-per-node starts at 1 and --max-restarts at 0")
    min_workers = options.min_workers or (1 if options.standalone else min_nodes * per_node)
    max_workers = options.max_workers or max_nodes * per_node
    if options.standalone:
        if options.rdzv_endpoint or max_nodes > 1:
            raise UsageError("--standalone is for one host: leave it out to meet others at --rdzv-endpoint")
        if access(options):
            raise UsageError("--standalone has an etcd of its own: leave out --etcd-..., which is about another one")
        endpoint = stack.enter_context(OwnEtcd()).endpoint
        run_id = options.rdzv_id or f"standalone-{uuid.uuid4().hex[:8]}"
    else:
        if not options.rdzv_endpoint or not options.rdzv_id:
            raise UsageError("give --rdzv-endpoint HOST:PORT and --rdzv-id ID, or --standalone for this host alone")
        endpoint, run_id = without_password(options.rdzv_endpoint), options.rdzv_id
        if options.meeting_place is not None:
            host, port = options.meeting_place
            _open_meeting_place(stack, host, port, run_id)
    orphan_timeout = options.orphan_timeout or (UNLIMITED if options.standalone else "300")
    query = (
        f"min_workers={min_workers}&max_workers={max_workers}&multiple_of={options.multiple_of}"
        f"&timeout={options.rdzv_timeout}&last_call_timeout={options.last_call}&ttl={options.ttl}"
        f"&connect_timeout={options.connect_timeout}&orphan_timeout={orphan_timeout}&{urlencode(access(options))}"
    )
    try:
        return parse_url(f"etcd://{endpoint}/{run_id}?{query}")
    except RendezvousUrlError as error:
        raise UsageError(str(error)) from error


def _open_meeting_place(stack: ExitStack, host: str, port: int, run_id: str) -> None:
    try:
        stack.enter_context(MeetingPlace(host, port, run_id))
    except OSError as error:
        raise UsageError(f"the hosts cannot meet at {host}:{port}: {error}") from error


def _nodes(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    try:
        nodes = int(low), int(high or low)
    except ValueError:
        raise UsageError(f"--nnodes {text!r}: write a number, or MIN:MAX") from None
    if not 1 <= nodes[0] <= nodes[1]:
        raise UsageError(f"--nnodes {text!r}: 1 <= MIN <= MAX")
    return nodes
