"""What a launcher takes over from those of its run that were killed on this host: their run's id, and what they left.

A launcher that is killed removes nothing: its folder stays, and says which run it was of and what it had started. The
kernel ends its workers with it, but not what those have started (data workers, programs of a script).
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torchelastic.foreign_json import RecordError, checked, decode_json
from torchelastic.launch.run_address import ADDRESS
from torchelastic.processes.family import command_text
from torchelastic.processes.file_locks import lock_of_nobody
from torchelastic.processes.left_running import end_all, left_running
from torchelastic.processes.own_folder import LOCK
from torchelastic.rendezvous.own_agent import FOLDER_PREFIX
from torchelastic.rendezvous.url import RendezvousUrl, RendezvousUrlError, parse_url
from torchelastic.text import shortlist

log = logging.getLogger(__name__)

#: In a launcher's folder: what it runs, and where.
STARTED = "started"
#: So long is waited for processes that were killed: longer, and they hang in the kernel.
END_S = 5.0
_MOST_BYTES = 2_000_000


@dataclass(frozen=True)
class Started:
    """What a launcher of `--standalone` was started for: the same again is taken for the same run.

    Attributes:
        folder: the one it was started in.
        command: of each worker.
    """

    folder: str
    command: tuple[str, ...]

    @classmethod
    def here(cls, command: Sequence[str]) -> Started:
        """In the folder of this process."""
        return cls(os.getcwd(), tuple(command))  # noqa: PTH109 - as text

    def leave(self, folder: Path) -> None:
        """In a launcher's own folder, for its successor. Raises: OSError."""
        document = {"folder": self.folder, "command": list(self.command)}
        (folder / STARTED).write_text(json.dumps(document), encoding="utf-8")


def take_over_run_id(started: Started) -> str | None:
    """The run of the latest launcher that was started for the same, and was killed; None: there is none.

    What it has left running is ended, and nobody else takes the same over.
    """
    run_ids = [url.run_id for url in _taken_over(lambda folder, _url: _started_in(folder) == started)]
    return run_ids[0] if run_ids else None


def end_what_was_left(run: RendezvousUrl) -> None:
    """Ends what launchers of a run that were killed on this host have left running."""
    for _ in _taken_over(lambda _, url: url.root == run.root and not set(url.endpoints).isdisjoint(run.endpoints)):
        pass


def _taken_over(is_one: Callable[[Path, RendezvousUrl], bool]) -> Iterator[RendezvousUrl]:
    """The runs of the launchers that were killed and are such a one, the latest first; their folders are removed."""
    for folder in _folders():
        with _of_dead_launcher(folder) as url:
            if url is not None and is_one(folder, url):
                _end_left(folder, url)
                shutil.rmtree(folder, ignore_errors=True)
                yield url


def _folders() -> list[Path]:
    """Those in which this user's launchers have left an address, the latest first."""
    found: list[tuple[int, Path]] = []
    try:
        folder = Path(tempfile.gettempdir())
    except FileNotFoundError:  # there is none, which is said where one is made
        return []
    for address in folder.glob(f"{FOLDER_PREFIX}*/{ADDRESS}"):
        with suppress(OSError):  # removed meanwhile
            if address.parent.lstat().st_uid == os.geteuid():
                found.append((address.stat().st_mtime_ns, address.parent))
    return [folder for _, folder in sorted(found, reverse=True)]


@contextmanager
def _of_dead_launcher(folder: Path) -> Iterator[RendezvousUrl | None]:
    """The run of a launcher that has ended, and that no other process looks at inside; None: it is no such."""
    with lock_of_nobody(folder / LOCK) as is_dead:
        url = None
        if is_dead:
            with suppress(OSError, RendezvousUrlError):
                url = parse_url((folder / ADDRESS).read_text(encoding="utf-8"))
        yield url


def _started_in(folder: Path) -> Started | None:
    try:
        data = (folder / STARTED).read_bytes()
        return checked(STARTED, decode_json(STARTED, data, most_bytes=_MOST_BYTES), Started)
    except (OSError, RecordError):  # it was none of --standalone
        return None


def _end_left(folder: Path, url: RendezvousUrl) -> None:
    left = left_running(folder)
    names = [f"{command_text(one.pid)} (process {one.pid})" for one in left]
    end_all(left, END_S)
    if names:
        log.warning(
            "the launcher of run %r was killed here, and its workers have left running: %s; that is ended",
            url.run_id, shortlist(names),
        )  # fmt: skip
    hanging = [str(one.pid) for one in left if not one.has_ended]
    if hanging:
        log.warning(
            "killed, and not ended after %g s: process(es) %s; they hang in the kernel", END_S, shortlist(hanging)
        )
