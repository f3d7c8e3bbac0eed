"""`torchelastic doctor`: whether this host can train; the checks are in `torchelastic.doctor`, loaded only then."""

from __future__ import annotations

import argparse
import logging
import math
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from torchelastic.launch.options import UsageError, access, add, add_access, without_password
from torchelastic.network.choice import IFACE_VARIABLE
from torchelastic.rendezvous.credentials import PASSWORD_VARIABLE
from torchelastic.rendezvous.url import RendezvousUrl, RendezvousUrlError, parse_url

if TYPE_CHECKING:
    from torchelastic.doctor import Question

NAME = "doctor"
EXAMPLES = """examples:
  torchelastic doctor
  torchelastic doctor --rdzv-endpoint etcd-host:2379 --rdzv-id job7 --checkpoint-dir /mnt/checkpoints --state-size 30GiB
  srun --nodes 4 torchelastic doctor --rdzv-endpoint etcd-host:2379 --nnodes 4       # the hosts look at each other too

exit codes: 0 nothing is wrong, 1 an error was found (with --strict also a warning), 2 invalid arguments
"""
#: How long a person may let it wait for the other hosts.
LONGEST_WAIT_S = 3600.0
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(iB|B)?|B)?", re.IGNORECASE)
_EXPONENTS = {"K": 1, "M": 2, "G": 3, "T": 4}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `doctor` to the command line."""
    parser = commands.add_parser(
        NAME,
        help="look for what would keep a run from working on this host, and say what to do about it",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add(parser, "rdzv-endpoint", metavar="HOST:PORT[,..]", help="the etcd where the hosts of a run meet")
    add(parser, "rdzv-id", metavar="ID", default="doctor", help="the run below whose key it writes (default: doctor)")
    add_access(parser)
    iface_help = "the network over which the hosts are to meet, as for `torchelastic run` (default: etcd's)"
    add(parser, "iface", metavar="NAME|SUBNET[,..]", help=iface_help)
    add(parser, "nnodes", type=int, default=1, metavar="N", help="how many hosts run the doctor now (default 1)")
    add(parser, "nproc-per-node", type=int, metavar="N", help="workers on each host")
    add(parser, "wait", type=float, default=7.0, metavar="S", help="for the other hosts (default 7 s)")
    what = "where checkpoints go; may be given several times"
    add(parser, "checkpoint-dir", type=Path, action="append", default=[], metavar="DIR", help=what)
    add(parser, "state-size", metavar="SIZE", help="what the ranks of a host save together, such as 30GiB")
    what = "has to be free here, and reached by the other hosts; may be given several times"
    add(parser, "port", type=int, action="append", default=[], metavar="PORT", help=what)
    add(parser, "strict", action="store_true", help="exit code 1 for warnings too")
    add(parser, "json", action="store_true", help="one line of JSON, for programs")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Look at everything and say what was found. Exit code 0, or 1 for an error (with --strict: for a warning)."""
    question = read_question(options, dict(os.environ))
    os.environ.pop(PASSWORD_VARIABLE, None)  # whatever is started from here on does not inherit it
    logger = logging.getLogger("torchelastic")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # what the rooms warn of is found and said by a check
    from torchelastic.doctor import examine, exit_code
    from torchelastic.doctor.screen import show

    try:
        findings = examine(question)
        show(findings, as_json=options.json, strict=options.strict)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it ends
        return 128 + signal.SIGPIPE
    finally:
        logger.setLevel(level)
    return exit_code(findings, strict=options.strict)


def read_question(options: argparse.Namespace, environment: dict[str, str]) -> Question:
    """What the words ask for. Raises UsageError."""
    from torchelastic.doctor import Question

    if options.nnodes < 1 or (options.nproc_per_node is not None and options.nproc_per_node < 1):
        raise UsageError("--nnodes and --nproc-per-node start at 1")
    if options.nnodes > 1 and not options.rdzv_endpoint:
        raise UsageError(f"--nnodes {options.nnodes}: give --rdzv-endpoint too, where the hosts find each other")
    if not options.rdzv_endpoint and access(options):
        raise UsageError("--etcd-...: give --rdzv-endpoint too")
    if not (math.isfinite(options.wait) and 0.0 <= options.wait <= LONGEST_WAIT_S):
        raise UsageError(f"--wait {options.wait:g}: give seconds, up to {LONGEST_WAIT_S:g}")
    for port in options.port:
        if not 0 < port < 65536:
            raise UsageError(f"--port {port}: give one from 1 to 65535")
    return Question(
        _url(options),
        options.nnodes,
        options.nproc_per_node,
        options.wait,
        tuple(options.checkpoint_dir),
        None if options.state_size is None else parse_size(options.state_size),
        tuple(dict.fromkeys(options.port)),
        environment.get(IFACE_VARIABLE) or None if options.iface is None else options.iface,
        environment,
    )


def parse_size(text: str) -> int:
    """Bytes from `30GiB`, `30G`, `1.5TiB` or `1000`; the units are binary. Raises UsageError.

    >>> parse_size("1.5KiB"), parse_size("10")
    (1536, 10)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--state-size {text!r}: give a size such as 30GiB")
    return int(float(match.group(1)) * 1024 ** _EXPONENTS.get((match.group(2) or "").upper(), 0))


def _url(options: argparse.Namespace) -> RendezvousUrl | None:
    if not options.rdzv_endpoint:
        return None
    endpoint = without_password(options.rdzv_endpoint)
    try:
        return parse_url(f"etcd://{endpoint}/{options.rdzv_id}?min_workers=1&{urlencode(access(options))}")
    except RendezvousUrlError as error:
        raise UsageError(str(error)) from error
