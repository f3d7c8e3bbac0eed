"""`torchelastic report`: one page about a run, from its journals. The work is in `torchelastic.report`, loaded then."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchelastic.launch.options import UsageError, add

if TYPE_CHECKING:
    from torchelastic.report.comparing import Comparison
    from torchelastic.report.model import Report

_STDOUT = Path("-")
_DEFAULT_OUTPUT = Path("report.html")

EXAMPLES = """examples:
  torchelastic report logs/
  torchelastic report /shared/job7/logs -o job7.html --loss losses.csv
  torchelastic report logs/ --compare ../yesterday/logs
  torchelastic report node1/logs node2/logs --json | jq .figures

Give the --log-dir of every host's `torchelastic run`, or files of journals (ledger-*.jsonl). See docs/ledger.md.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `report` to the command line."""
    parser = commands.add_parser(
        "report",
        help="write a page about a run: where every second went, what each failure cost",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = "folders with journals of the run, or files of journals"
    parser.add_argument("journals", type=Path, nargs="+", metavar="PATH", help=what)
    what = f"the file to write; - is the screen [{_DEFAULT_OUTPUT}; with --json -]"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=what)
    add(parser, "json", action="store_true", help="the same content as one JSON object, for programs")
    what = "losses by step: CSV or JSON lines with step and loss, or a folder of them"
    add(parser, "loss", type=Path, metavar="FILE", help=what)
    add(
        parser,
        "compare",
        type=Path,
        nargs="+",
        default=[],
        metavar="PATH",
        help="journals of another run, side by side",
    )
    what = "which run, where there are journals of several"
    add(parser, "run-id", metavar="ID", help=what)
    add(parser, "compare-run-id", metavar="ID", help="the same for --compare")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Write the page. Exit code 0; 1: there is no journal that can be read, or the page cannot be written."""
    from torchelastic.report.building import NoRunError
    from torchelastic.report.losses import LossFileError

    if options.compare_run_id and not options.compare:
        raise UsageError("--compare-run-id is for --compare PATH")
    try:
        text = _text(options)
        output = options.output or (_STDOUT if options.json else _DEFAULT_OUTPUT)
        if output == _STDOUT:
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            _publish(output, text)
            print(f"report: {output}")  # noqa: T201 - what the command is for
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it ends
        return 128 + signal.SIGPIPE
    except (NoRunError, LossFileError, OSError) as error:
        print(f"torchelastic report: {error}", file=sys.stderr)  # noqa: T201 - the last word on the screen
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _text(options: argparse.Namespace) -> str:
    from torchelastic.report.comparing import compared
    from torchelastic.report.page import html_page
    from torchelastic.report.plain import to_plain

    report = _report(options.journals, options.run_id, options.loss)
    comparison: Comparison | None = None
    if options.compare:
        comparison = compared(report, _report(options.compare, options.compare_run_id, None))
    if options.json:
        return json.dumps(to_plain(report, comparison), allow_nan=False) + "\n"
    return html_page(report, comparison)


def _report(paths: Sequence[Path], run_id: str | None, loss: Path | None) -> Report:
    from torchelastic.report.building import NoRunError, report_of
    from torchelastic.report.losses import read_losses
    from torchelastic.report.reading import find_journals

    found = find_journals(paths)
    losses = None if loss is None else read_losses(loss)
    try:
        return report_of(found.journals, run_id=run_id, lacks=found.lacks, losses=losses)
    except NoRunError as error:
        where = ", ".join(map(str, paths))
        raise NoRunError(" ".join([f"{where}: {error}", *found.lacks])) from error


def _publish(output: Path, text: str) -> None:
    """All of it, or what was there before. Raises OSError."""
    descriptor, hidden = tempfile.mkstemp(prefix=f".{output.name}.", dir=output.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        Path(hidden).chmod(0o666 & ~mask)
        Path(hidden).replace(output)
    except BaseException:
        Path(hidden).unlink(missing_ok=True)
        raise
