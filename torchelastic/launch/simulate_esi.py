"""`torchelastic simulate-esi`: a job on instances whose time is limited, life after life, on this host."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchelastic.launch.options import UsageError, add

if TYPE_CHECKING:
    from torchelastic.launch.esi_lives import Life, Verdict
    from torchelastic.launch.esi_simulation import Order

NAME = "simulate-esi"
EXAMPLES = """examples:
  torchelastic simulate-esi --cmd 'torchrun --standalone --nproc-per-node 2 train.py' --timeout 120
  torchelastic simulate-esi --cmd 'python train.py' --timeout 60 --grace 5 --max-restarts 10 --report report.json

exit codes: 0 the job has finished, 1 it has not, 2 invalid arguments, 128 + N ended by signal N
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `simulate-esi` to the command line."""
    parser = commands.add_parser(
        NAME,
        help="run a job as on instances that end at a known time: end it, start it again, tell what was lost",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add(parser, "cmd", required=True, metavar="COMMAND", help="the job: one line for the shell")
    add(parser, "timeout", type=float, required=True, metavar="S", help="how long an instance lives, up to SIGTERM")
    add(parser, "grace", type=float, default=30.0, metavar="S", help="from SIGTERM to SIGKILL (default 30 s)")
    add(
        parser,
        "max-restarts",
        type=int,
        metavar="N",
        help="start it again so often (default 100, but not after 3 failures in a row)",
    )
    add(parser, "pause", type=float, default=0.0, metavar="S", help="between two lives (default 0 s)")
    add(
        parser,
        "requeue-code",
        type=int,
        action="append",
        metavar="N",
        help="a job that exits with this wants to be started again; may be given several times (default 75)",
    )
    add(parser, "velastic-dir", type=Path, default=Path(".velastic"), metavar="DIR", help="default: .velastic")
    add(parser, "json", action="store_true", help="the report as one line of JSON, the last one on stdout")
    add(parser, "report", type=Path, metavar="FILE", help="write the report as JSON here, anew after each life")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Run the lives. Exit code 0 if the job has finished, 1 if not, 128 + N if signal N has ended it."""
    from torchelastic.launch.esi_lives import report_document, table
    from torchelastic.launch.esi_simulation import Interrupted, Simulation, SurvivorsError, signals_raise

    order, path = read_order(options), options.report
    if sys.platform != "linux":
        raise UsageError("it needs Linux, whose kernel hands it the processes that a job leaves behind")
    if path is not None and not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise UsageError(f"--report {path}: give a file in a folder that exists and may be written to")
    document: dict[str, Any] = {}

    def note(lives: list[Life], verdict: Verdict) -> None:
        said = {"command": order.command, "timeout_s": order.timeout_s, "grace_s": order.grace_s}
        document.update(said | report_document(lives, verdict))
        if path is not None:
            partial = path.with_name(f".{path.name}.{os.getpid()}")
            partial.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
            partial.replace(path)  # a reader finds the old one or the new one

    try:
        with tempfile.TemporaryDirectory(prefix="torchelastic-esi-") as folder, signals_raise():
            verdict = Simulation(order, Path(folder)).run(note)
    except Interrupted as interrupted:  # after the last life
        return 128 + interrupted.number
    except (OSError, SurvivorsError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)  # noqa: T201 - for a person
        return 1
    print(table(document), f"{NAME}: {verdict.reason}", sep="\n", file=sys.stderr, flush=True)  # noqa: T201 - for a person
    if options.json:
        print(json.dumps(document, allow_nan=False), flush=True)  # noqa: T201 - asked for
    return verdict.exit_code


def read_order(options: argparse.Namespace) -> Order:
    """What the words order. Raises UsageError."""
    from torchelastic.launch.esi_simulation import Order
    from torchelastic.lifetime.requeue import STOPPED_EARLY

    if not options.cmd.strip():
        raise UsageError("--cmd is empty: give the command that starts the job")
    for name, least in (("timeout", "above 0"), ("grace", "0 or more"), ("pause", "0 or more")):
        seconds = getattr(options, name)
        if not math.isfinite(seconds) or seconds < 0.0 or (seconds == 0.0 and name == "timeout"):
            raise UsageError(f"--{name} {seconds:g}: give seconds, {least}")
    codes = tuple(options.requeue_code or (STOPPED_EARLY,))
    if not all(1 <= code <= 255 for code in codes):
        raise UsageError("--requeue-code: give an exit code from 1 to 255")
    restarts = options.max_restarts
    if restarts is not None and restarts < 0:
        raise UsageError(f"--max-restarts {restarts}: give a number from 0 on")
    return Order(
        options.cmd, options.timeout, options.grace, options.pause, restarts, codes, velastic_dir=options.velastic_dir
    )
