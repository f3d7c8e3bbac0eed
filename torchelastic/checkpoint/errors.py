"""What can go wrong with a checkpoint, in words that name the place and the remedy."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchelastic.file_systems import Call, file_system_of, reason_of

_REMEDIES = {
    errno.EACCES: "make it accessible to this user, or choose another checkpoint_dir",
    errno.EBUSY: "somebody has it open or mounted; end that process, or remove it later",
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
#: What to do about a file system that does not have what a checkpoint needs.
OTHER_FILE_SYSTEM = "choose a folder on another file system, or for an object store a DurableTier with its URL"
#: Where it helps to mount it in another way, or to choose another place.
REMEDIES_BY_CALL = {
    Call.FLOCK: "mount it with locks (Lustre: -o flock; NFS: without nolock)",
    Call.MMAP: "choose a folder on tmpfs, such as one below /dev/shm",
    Call.FALLOCATE: "choose a folder on tmpfs, such as one below /dev/shm",
}


class CheckpointError(OSError):
    """A checkpoint could not be written, published or read; everything committed before is untouched.

    It is an `OSError`; where the operating system gave the reason, `errno` and `filename` are set.

    Attributes:
        absent: the call that the file system does not have, or may not have; None: it is not that.
    """

    absent: Call | None = None


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
def explained(action: str, path: Path, call: Call | None = None) -> Iterator[None]:
    """Turns what the operating system raises inside into a `CheckpointError` that names place, reason and remedy.

    Args:
        action: completes "could not ...", for example "publish the checkpoint".
        path: the file or folder that is worked on.
        call: what is called that not every file system has; named, with the file system, where it may be that.
    """
    try:
        yield
    except CheckpointError:
        raise  # explained already
    except OSError as error:
        raise _explain(error, action, path, call) from error


def _explain(error: OSError, action: str, path: Path, call: Call | None) -> CheckpointError:
    if error.errno is None:
        return CheckpointError(f"could not {action} at {path}: {error}")
    remedy = _REMEDIES.get(error.errno)
    reason = reason_of(error.errno)
    absent = call if call is not None and call.is_absent_by(error.errno) else None
    if absent is not None:
        system = file_system_of(path)
        may_be = "may have" if remedy else "has"  # EPERM, say, is what a user gets, too, who may not
        lack = f"its file system{f', {system},' if system else ''} {may_be} no {absent.value}"
        remedy = "; ".join(filter(None, (lack, REMEDIES_BY_CALL.get(absent, OTHER_FILE_SYSTEM), remedy)))
    text = f"could not {action}: {reason}" + (f" ({remedy})" if remedy else "")
    explained_error = CheckpointError(error.errno, text, str(path))
    explained_error.absent = absent
    return explained_error
