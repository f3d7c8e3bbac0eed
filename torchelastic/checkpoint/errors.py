"""What can go wrong with a checkpoint, in words that name the place and the remedy."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_REMEDIES = {
    errno.EACCES: "make it accessible to this user, or choose another checkpoint_dir",
    errno.EDQUOT: "free some of the quota, or let the manager delete old checkpoints (keep=N)",
    errno.EEXIST: "something else is in the way; choose another checkpoint_dir",
    errno.EFBIG: "raise the limit on file sizes (`ulimit -f`), or choose a file system without one",
    errno.EIO: "the device reports errors; check it, or choose another checkpoint_dir",
    errno.ENOENT: "it was removed from outside; do not clean up in a folder that is in use",
    errno.ENOSPC: "the disk is full; free space, or let the manager delete old checkpoints (keep=N)",
    errno.ENOTDIR: "a file is where a folder should be; choose another checkpoint_dir",
    errno.EPERM: "make it accessible to this user, or choose another checkpoint_dir",
    errno.EROFS: "it is mounted read-only; remount it, or choose another checkpoint_dir",
}
#: What the system answers where there is no more room.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)


class CheckpointError(OSError):
    """A checkpoint could not be written, published or read; everything committed before is untouched.

    It is an `OSError`; where the operating system gave the reason, `errno` and `filename` are set.
    """


class CorruptCheckpointError(CheckpointError):
    """What is stored is not (or no longer) what was saved: torn, truncated, changed or missing."""


class FencedError(CheckpointError):
    """This writer was replaced by another: what it wrote is not published, and it must not go on."""


class OutOfStepError(CheckpointError, RuntimeError):
    """The ranks did not call the same method, or one of them did not call it in time; names them.

    A RuntimeError as all errors of communication are: in a train step it is undone and repeated in a new group.
    """


class NotPublishedError(CheckpointError):
    """A checkpoint is not published in a tier: says which rank could not store its shard, and why."""


def torch_reason(error: BaseException) -> str:
    """Why torch cannot read something, in a line: its advice, with colours, is left out."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = next((line for line in lines if "Unsupported" in line or "WeightsUnpickler error" in line), None)
    return (named or (lines[0] if lines else type(error).__name__))[:200]


def is_full(error: OSError) -> bool:
    """Whether a file system, or the system, has no room (left)."""
    return error.errno in _FULL


@contextmanager
def explained(action: str, path: Path) -> Iterator[None]:
    """Turns what the operating system raises inside into a `CheckpointError` that names place, reason and remedy.

    Args:
        action: completes "could not ...", for example "publish the checkpoint".
        path: the file or folder that is worked on.
    """
    try:
        yield
    except CheckpointError:
        raise  # explained already
    except OSError as error:
        raise _explain(error, action, path) from error


def _explain(error: OSError, action: str, path: Path) -> CheckpointError:
    if error.errno is None:
        return CheckpointError(f"could not {action} at {path}: {error}")
    remedy = _REMEDIES.get(error.errno)
    reason = os.strerror(error.errno)
    text = f"could not {action}: {reason}" + (f" ({remedy})" if remedy else "")
    return CheckpointError(error.errno, text, str(path))
