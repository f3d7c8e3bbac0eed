"""`torchelastic report`: one page about a run, from its journals."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torchelastic.observe.report.building import NoRunError, of_one_run, report_of
from torchelastic.observe.report.comparing import compared
from torchelastic.observe.report.html_page import html_page
from torchelastic.observe.report.journals import find_journals
from torchelastic.observe.report.losses import LossFileError, read_losses
from torchelastic.observe.report.model import Report
from torchelastic.observe.report.plain import to_plain
from torchelastic.text import error_text
from torchelastic.usage import CommandError, UsageError

_STDOUT = Path("-")
_DEFAULT_OUTPUT = Path("report.html")


def report(options: argparse.Namespace) -> int:
    """Write the page. Exit code 0; 1: there is no journal that can be read, or the page cannot be written."""
    if options.compare_run_id and not options.compare:
        raise UsageError("--compare-run-id is for --compare PATH")
    try:
        text = _text(options)
        output = options.output or (_STDOUT if options.json else _DEFAULT_OUTPUT)
        if output == _STDOUT:
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            try:
                _publish(output, text)
            except OSError as error:  # it may name the file that becomes the page
                raise CommandError(f"-o {output} cannot be written: {error.strerror}") from error
            print(f"report: {output}")  # noqa: T201 - what the command is for
    except BrokenPipeError:
        raise  # nobody reads on
    except (NoRunError, LossFileError, OSError) as error:
        raise CommandError(error_text(error)) from error
    return 0


def _text(options: argparse.Namespace) -> str:
    about = _report(options.journals, options.run_id, options.loss)
    comparison = None
    if options.compare:
        comparison = compared(about, _report(options.compare, options.compare_run_id, None))
    if options.json:
        return json.dumps(to_plain(about, comparison), allow_nan=False) + "\n"
    return html_page(about, comparison)


def _report(paths: Sequence[Path], run_id: str | None, loss: Path | None) -> Report:
    found = find_journals(paths)
    losses = None if loss is None else read_losses(loss)
    try:
        journals = of_one_run(found.journals, run_id, "--run-id (of --compare: --compare-run-id)")
        return report_of(journals, lacks=found.lacks_of(journals), losses=losses)
    except NoRunError as error:
        where = ", ".join(map(str, paths))
        raise NoRunError(" ".join([f"{where}: {error}", *found.lacks_of(found.journals)])) from error


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
