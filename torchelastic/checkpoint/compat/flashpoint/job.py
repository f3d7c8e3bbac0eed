"""Which folder of this host's memory is this job's. Imports no torch.

A container has to be the same after a restart, and another one for another job. So its name is made from the run id.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from torchelastic.checkpoint.errors import CheckpointError, explained
from torchelastic.file_systems import is_in_memory

if TYPE_CHECKING:
    from torchelastic.checkpoint.compat.flashpoint.ids import CheckpointContainerId

log = logging.getLogger(__name__)

RUN_ID_VARIABLE = "TORCHELASTIC_RUN_ID"
ROOT_VARIABLE = "TORCHELASTIC_MEMORY_ROOT"
DEFAULT_ROOT = Path("/dev/shm")  # noqa: S108 - what is put there is protected by its folder's mode and owner
#: What torchrun calls runs that were given no --rdzv-id.
_NO_RUN_ID = "none"
#: What it makes up instead on one host (a random UUID, see its run.py), and what `torchelastic run --standalone` does.
_MADE_UP = re.compile(r"standalone-[0-9a-f]{8}|[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
MAX_NAME_CHARS = 128  # as in `ids.is_part`
_REMEDY = (
    "give torchrun an --rdzv-id, start the job with `torchelastic run`, set TORCHELASTIC_RUN_ID, or pass a run_id: the "
    "same again after a restart, and another one for another job"
)


def job_container(run_id: str | None = None, root: str | os.PathLike[str] | None = None) -> CheckpointContainerId:
    """The container of this job: `<root>/torchelastic-<user's number>/<run id>`.

    The same job finds it again after a restart, on this host; another job gets another one. Any rank may call it, from
    any thread. The folder of the user is created, for this user alone; that of the job by whoever enters it. A run id
    of the environment that looks as if a launcher had made it up for this start alone is taken with a warning.

    Args:
        run_id: names the job; not given: see `known_run_id`. What a file name should not hold is escaped.
        root: an absolute path of a folder on tmpfs; not given: see `memory_root`.

    Raises:
        ValueError: the job has no run id, or it is empty or torchrun's "none", or the root is no absolute path.
        CheckpointError: the root is not there or cannot be written, or the user's folder belongs to somebody else or
            can be written by others.
    """
    from torchelastic.checkpoint.compat.flashpoint.ids import CheckpointContainerId

    name = container_name(known_run_id() if run_id is None else run_id)
    if run_id is None and _MADE_UP.fullmatch(name):
        log.warning(
            "the run id %s looks made up at this start, so a restart would not find its memory: %s", name, _REMEDY
        )
    folder = memory_root(root) / f"torchelastic-{os.geteuid()}"
    _make_private(folder)
    return CheckpointContainerId(str(folder / name))


def known_run_id(environment: Mapping[str, str] | None = None) -> str | None:
    """What the environment says of this job's identity; None: nothing.

    Args:
        environment: that of this process if not given.

    Returns:
        TORCHELASTIC_RUN_ID, which `torchelastic run` and torchrun set (torchrun's "none" is no identity); else
        `slurm-<SLURM_JOB_ID>`, which a requeued job keeps, with `_<SLURM_ARRAY_TASK_ID>` for a job of an array.
    """
    environment = os.environ if environment is None else environment
    run_id = environment.get(RUN_ID_VARIABLE, "")
    if run_id and run_id != _NO_RUN_ID:
        return run_id
    job_id, task_id = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_ARRAY_TASK_ID", "")
    return f"slurm-{job_id}" + (f"_{task_id}" if task_id else "") if job_id else None


def container_name(run_id: str | None) -> str:
    """The name of a job's folder; different for different run ids. Pure.

    Letters, digits and `._@+,-` stay, other bytes become `=` and two hexadecimal digits (as in quoted-printable text,
    RFC 2045), and so does a point at the beginning or the end. Of what is longer than 128 characters the first part
    stays, with `=.` and 40 digits of the run id's SHA-256 behind it; no shorter name has `=.` in it.

    Raises:
        ValueError: there is no run id, or it is empty or "none".

    >>> container_name("team/llama 7b")
    'team=2Fllama=207b'
    """
    if not run_id or run_id == _NO_RUN_ID:
        found = "this job has no run id" if not run_id else "its run id is 'none', as torchrun calls all that have none"
        raise ValueError(f"no name distinguishes this job's container from those of other jobs: {found}; {_REMEDY}")
    data = os.fsencode(run_id)
    name = quote(data, safe="@+,").replace("~", "%7E").replace("%", "=")
    if name.startswith("."):
        name = f"=2E{name[1:]}"
    if name.endswith("."):
        name = f"{name[:-1]}=2E"
    if len(name) <= MAX_NAME_CHARS:
        return name
    digest = f"=.{hashlib.sha256(data).hexdigest()[:40]}"
    return name[: MAX_NAME_CHARS - len(digest)] + digest


def memory_root(root: str | os.PathLike[str] | None = None) -> Path:
    """Where this host keeps checkpoints in memory.

    Args:
        root: taken as it is, with a warning if it lies on a disk; not given: TORCHELASTIC_MEMORY_ROOT in the same way,
            else /dev/shm.

    Raises:
        ValueError: the root is no absolute path.
        CheckpointError: it is no folder that this user can write, or /dev/shm is not in memory; names the remedy.
    """
    given = root if root is not None else os.environ.get(ROOT_VARIABLE) or None
    path = DEFAULT_ROOT if given is None else Path(given)
    if not path.is_absolute():
        raise ValueError(f"the root {str(path)!r} for checkpoints in memory is no absolute path: begin it with a slash")
    remedy = f"set {ROOT_VARIABLE} to a folder on tmpfs that you may write, or pass root"
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        raise CheckpointError(f"{path} is no folder that this user can write: {remedy}")
    if not is_in_memory(path):
        if given is None:
            raise CheckpointError(f"{path} is not in memory on this host (no tmpfs): {remedy}")
        log.warning("%s is on a disk: checkpoints there are slower, and a dead job's are not found by `prune`", path)
    return path


def _make_private(folder: Path) -> None:
    """Creates a folder for this user alone; in a root where everybody may write, somebody else may have been there."""
    with explained("create the folder for this user's checkpoints", folder):
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            pass
        status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise CheckpointError(
            f"{folder} is no folder of this user (but of user {status.st_uid}), so others could read or change the "
            f"checkpoints: have it removed, or set {ROOT_VARIABLE} to another folder on tmpfs"
        )
    if status.st_mode & 0o022:
        raise CheckpointError(
            f"others may write into {folder}: remove it, or `chmod 700` it if you trust what is there"
        )
