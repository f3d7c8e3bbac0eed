"""`torch.save` in the background."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from torchelastic.checkpoint.compat.elastic01.staging import delete_stale, new_staging_path
from torchelastic.checkpoint.compat.nvrx.async_ckpt.calls_queue import AsyncCallsQueue
from torchelastic.checkpoint.compat.nvrx.async_ckpt.request import AsyncRequest
from torchelastic.checkpoint.errors import explained
from torchelastic.checkpoint.format.disk import REAL_DISK, replacing


class TorchAsyncCheckpoint:
    """Saves like `torch.save`, in a worker process. Each rank for itself, unless `no_dist=False`.

    A file appears under its name when it is complete and durable, by one rename; until then, and if the save fails or
    the job is killed, what was there before stays.

    Args:
        persistent_queue: keep one worker process; else start one for each save.
    """

    def __init__(self, persistent_queue: bool = True) -> None:
        self.save = torch.save
        self._queue = AsyncCallsQueue(persistent=persistent_queue)

    def async_save(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Have `torch.save(state_dict, *args, **kwargs)` done in the background.

        When this returns, the state is copied: changing it does not change the file.

        Args:
            state_dict: what to save; any object that can be pickled. Tensors of a GPU are saved as CPU tensors.
            *args: as for `torch.save`; the first one, `f`, has to be a path.
            **kwargs: as for `torch.save`.

        Raises:
            TypeError: `f` is missing or no path, or something cannot be pickled for the worker.
            AsyncCheckpointError: an earlier save failed; nothing was scheduled. Also if it failed on another rank,
                where the last `finalize_async_save` asked them.
        """
        f, *rest = args if args else (kwargs.pop("f", None),)
        if not isinstance(f, (str, os.PathLike)):
            raise TypeError(f"async_save needs the path of a file, got {f!r}: a worker cannot write into an open one")
        target = Path(f).absolute()
        self._queue.schedule_async_request(AsyncRequest(save_and_rename, (state_dict, target, *rest), [], kwargs))

    def finalize_async_save(self, blocking: bool = False, no_dist: bool = True, terminate: bool = False) -> list[int]:
        """Look which saves are done.

        Args:
            blocking: wait for all of them.
            no_dist: only look at this rank's; else every rank calls this in step.
            terminate: end the worker process afterwards; the next save starts one anew.

        Returns:
            The numbers of the saves that are done, from 1.

        Raises:
            AsyncCheckpointError: a save failed here, or with `no_dist=False` on some rank.
        """
        finalized = self._queue.maybe_finalize_async_calls(blocking, no_dist)
        if terminate:
            self._queue.close()
        return finalized

    def close(self, abort: bool = False) -> None:
        """Wait for this rank's saves and end the worker; with `abort`, end it now and drop them.

        Raises:
            AsyncCheckpointError: a save failed here.
        """
        try:
            if not abort:
                self._queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
        finally:
            self._queue.close(abort)


def save_and_rename(state_dict: Any, target: Path, *args: Any, **kwargs: Any) -> None:
    """`torch.save` into a hidden file beside `target`, which then takes its place; removes what killed writers left.

    Raises:
        CheckpointError: the file cannot be written; it names it.
    """
    with explained("save a checkpoint", target):
        staging = new_staging_path(target.parent)
        with replacing(target, staging, "xb") as file:
            delete_stale(target.parent, os.fstat(file.fileno()).st_mtime)
            torch.save(state_dict, file, *args, **kwargs)
        REAL_DISK.sync_folder(target.parent)
