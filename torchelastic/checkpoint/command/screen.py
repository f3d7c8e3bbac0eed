"""What the command shows of work on checkpoints: a progress bar on a terminal, and the place that a copy is of."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from torchelastic.checkpoint.command.command_error import CheckpointCommandError
from torchelastic.checkpoint.command.format import Advance
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.console import as_shown, renamed
from torchelastic.text import printable


@contextlib.contextmanager
def shown_as(folder: str, name: str) -> Iterator[None]:
    """Meanwhile a folder with a copy is called by the name of the place that it is a copy of, also in errors."""
    with renamed(folder, name):
        try:
            yield
        except (CheckpointError, CheckpointCommandError) as error:
            raise CheckpointCommandError(as_shown(str(error))) from error


@contextlib.contextmanager
def progress(total_bytes: int, what: str) -> Iterator[Advance]:
    """A progress bar on stderr, where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _size_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(printable(what), total=total_bytes)
        yield lambda size_bytes: bar.advance(task, size_bytes)
