"""`torchelastic simulate-esi`: a job on instances whose time is limited, life after life, on this host."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from torchelastic.launch.options import UsageError, add

if TYPE_CHECKING:
    from torchelastic.launch.simulation_of_instances.simulation import Order, Outcome

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
    from torchelastic.launch.simulation_of_instances.keeper import guarded
    from torchelastic.launch.simulation_of_instances.process_tree import SurvivorsError, is_supported

    order = read_order(options)
    if not is_supported():
        raise UsageError("it needs Linux, whose kernel hands it the processes that a job leaves behind")
    if options.report is not None and not os.access(options.report.absolute().parent, os.W_OK | os.X_OK):
        raise UsageError(f"--report {options.report}: give a file in a folder that exists and may be written to")
    folder = Path(tempfile.mkdtemp(prefix="torchelastic-esi-"))
    try:
        return guarded(lambda: _simulate(order, folder, as_json=options.json, report=options.report))
    except SurvivorsError as error:
        _say(str(error))
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def read_order(options: argparse.Namespace) -> Order:
    """What the words order. Raises UsageError."""
    from torchelastic.launch.simulation_of_instances.lives import REQUEUE_CODE, Limits
    from torchelastic.launch.simulation_of_instances.simulation import Order

    if not options.cmd.strip():
        raise UsageError("--cmd is empty: give the command that starts the job")
    for name, least in (("timeout", "above 0"), ("grace", "0 or more"), ("pause", "0 or more")):
        seconds = getattr(options, name)
        if not math.isfinite(seconds) or seconds < 0.0 or (seconds == 0.0 and name == "timeout"):
            raise UsageError(f"--{name} {seconds:g}: give seconds, {least}")
    codes = tuple(options.requeue_code or (REQUEUE_CODE,))
    if not all(1 <= code <= 255 for code in codes):
        raise UsageError("--requeue-code: give an exit code from 1 to 255")
    if options.max_restarts is not None and options.max_restarts < 0:
        raise UsageError(f"--max-restarts {options.max_restarts}: give a number from 0 on")
    limits = Limits() if options.max_restarts is None else Limits(options.max_restarts, failures_in_a_row=None)
    return Order(options.cmd, options.timeout, options.grace, options.pause, limits, codes, options.velastic_dir)


def _simulate(order: Order, folder: Path, *, as_json: bool, report: Path | None) -> int:
    """What the inner process does."""
    from torchelastic.launch.simulation_of_instances.process_tree import SurvivorsError
    from torchelastic.launch.simulation_of_instances.report import document, print_table, write_report
    from torchelastic.launch.simulation_of_instances.simulation import Simulation

    def note(outcome: Outcome) -> None:
        if report is not None:
            write_report(report, order, outcome)

    try:
        simulation = Simulation(
            order, os.environ, folder, clock=time.monotonic, wall_clock=time.time, sleep=time.sleep, say=_say
        )
        outcome = simulation.run(note)
        note(outcome)
        print_table(outcome, sys.stderr)
        if as_json:
            print(json.dumps(document(order, outcome), allow_nan=False), flush=True)  # noqa: T201 - asked for
        return outcome.verdict.exit_code
    except (OSError, SurvivorsError) as error:
        _say(str(error))
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # the front may be gone


def _say(text: str) -> None:
    print(f"{NAME}: {text}", file=sys.stderr, flush=True)  # noqa: T201 - for a person, beside the job's own output
