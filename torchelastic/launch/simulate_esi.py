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

from torchelastic.usage import UsageError

if TYPE_CHECKING:
    from torchelastic.launch.esi_lives import Life, Verdict
    from torchelastic.launch.esi_simulation import Order

NAME = "simulate-esi"


def simulate_esi(options: argparse.Namespace) -> int:
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
