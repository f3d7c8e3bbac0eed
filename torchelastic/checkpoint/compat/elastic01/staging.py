"""Hidden folders and files in which checkpoints are written before they are published, or to which they move to go.

A process that is killed leaves them behind. Their names tell who made them, so that the next writer can tell a
left-over from what another one is at work on, also on a file system shared by many hosts.

Of one run only the process publishes that took over last:

    <checkpoint_dir>/.run-<16 digits>/7/.tmp-4711-...    staging folders of the process that took over as the 7th

To take over is to create the next number, and to remove the older ones with whatever is staged in them. So a writer
that was paused in the middle of a save, and wakes up when others have gone on, has nothing to rename: its checkpoint
is not published, however late it is. No clock, lock or server is asked, only that a folder can be created once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import shutil
import socket
from pathlib import Path

import psutil

from torchelastic.checkpoint.errors import explained
from torchelastic.checkpoint.format.disk import HIDDEN
from torchelastic.file_systems import Call
from torchelastic.processes.identity import this_place

log = logging.getLogger(__name__)

# A writer that has not touched its folder for so long is gone, or stopped for so long that it may lose this one save.
STALE_AFTER_S = 24 * 3600.0

_RUN_PREFIX = ".run-"

# Process numbers can be compared within one scope only: a digest of host, boot and process namespace. The host's name
# is for people, and identifies nothing: clones and containers share names.
_NAME = re.compile(r"\.tmp-(?P<pid>\d{1,7})-[0-9a-f]{16}-(?P<scope>[0-9a-f]{12})-(?P<host>.+)")


def make_staging_folder(parent: Path) -> Path:
    """Creates an empty staging folder of the calling process in `parent`."""
    folder = new_staging_path(parent)
    folder.mkdir()  # with the user's umask: published folders must be readable by whoever may read the parent
    return folder


def remove_folder(folder: Path) -> bool:
    """Removes a folder, so that nobody ever sees a part of it under its name; or a file. Returns False if it was gone.

    A failure is logged and not raised: nothing that was committed depends on it, and the next manager tries again.
    """
    doomed = new_staging_path(folder.parent)
    try:
        try:
            folder.rename(doomed)
        except OSError as error:
            if not folder.name.startswith(HIDDEN) or not Call.RENAME_FOLDER.is_absent_by(error.errno):
                raise
            doomed = folder  # nobody looks at it
        if doomed.is_dir():
            shutil.rmtree(doomed)
        else:
            doomed.unlink()
    except FileNotFoundError:
        return False  # another process was faster
    except OSError as error:
        log.warning("could not remove %s completely: %s", folder, error)
    return True


def delete_stale(parent: Path, now_s: float) -> None:
    """Removes the staging folders and files in `parent` whose writers are gone.

    Args:
        parent: the checkpoint folder.
        now_s: the time as the file system tells it (the modification time of a file just written there), so that the
            clocks of other hosts do not matter.
    """
    here = _host_and_scope()[1]
    for path in sorted(parent.iterdir()):
        owner = _NAME.fullmatch(path.name)
        if owner is None:
            continue
        try:
            idle_s = now_s - max(one.stat().st_mtime for one in (path, *path.glob("*")))
        except FileNotFoundError:
            continue  # being published or removed while we look
        is_dead = owner["scope"] == here and not psutil.pid_exists(int(owner["pid"]))
        if (is_dead or idle_s > STALE_AFTER_S) and remove_folder(path):
            log.info("removed %s, left behind by process %s on %s", path, owner["pid"], owner["host"])


def take_over(checkpoint_dir: Path, run_id: str) -> Path:
    """From now on only the calling process publishes for this run; called by the rank that saves, once per group.

    Args:
        checkpoint_dir: the folder that holds all checkpoints.
        run_id: names the run; writers of other runs are left alone.

    Returns:
        Where to make staging folders; it is gone as soon as another process has taken over.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    root = checkpoint_dir / f"{_RUN_PREFIX}{hashlib.sha256(run_id.encode()).hexdigest()[:16]}"
    with explained("take over the saving of checkpoints", checkpoint_dir):
        root.mkdir(exist_ok=True)
        while True:
            own = root / str(max(_numbers(root), default=0) + 1)
            try:
                own.mkdir()
                break
            except FileExistsError:
                continue  # another process was faster: come after it
        for number in _numbers(root):
            if number < int(own.name):
                remove_folder(root / str(number))
    return own


def staging_dirs(checkpoint_dir: Path) -> list[Path]:
    """Where the writers of all runs stage, dead ones too. Raises: OSError."""
    return sorted(checkpoint_dir.glob(f"{_RUN_PREFIX}*/*"))


def _numbers(root: Path) -> list[int]:
    return [int(path.name) for path in root.iterdir() if path.name.isdecimal()]


def new_staging_path(parent: Path) -> Path:
    """A name in `parent` that nobody uses, for a staging folder of the calling process."""
    host, scope = _host_and_scope()
    return parent / f".tmp-{os.getpid()}-{secrets.token_hex(8)}-{scope}-{host}"


def _host_and_scope() -> tuple[str, str]:
    host = socket.gethostname().replace("/", "_")[:64] or "unnamed"
    # not on Linux: there are no process namespaces, and the host's name alone has to do
    place = this_place()
    return host, hashlib.sha256("\n".join((host, place["boot"], place["namespace"])).encode()).hexdigest()[:12]
