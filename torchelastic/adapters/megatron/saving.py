"""How Megatron saves into memory: copied at the call, checked and sent to other hosts in the background."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, astuple
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import (
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)

from torchelastic.adapters.megatron.planning import CollectivePlanner, Planned, Ranks, SaveSkippedError
from torchelastic.checkpoint.compat.flashpoint.commit import records_of
from torchelastic.checkpoint.compat.flashpoint.staged_items import result_of
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.store.manifest import ShardRecord

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import WriteResult

    from torchelastic.checkpoint.memory import MemoryStorageWriter, StagedItems

log = logging.getLogger(__name__)

#: Default backend and version in a checkpoint's metadata.json.
BACKEND = "torchelastic"
VERSION = 1
#: As torch waits for a gloo collective if nobody says otherwise.
DEFAULT_TIMEOUT_S = 1800.0


class MegatronAsyncSaveStrategy(AsyncSaveShardedStrategy):  # type: ignore[misc] # Megatron has no types
    """Saves sharded state into memory, for `megatron.core.dist_checkpointing` and its queues.

    Tensors are copied before `async_save` returns: training may change them at once, on whatever device they are.
    Checksums and copies to other hosts are the background's part; the commit comes when all ranks are done.

    A save for which some rank has no memory, or whose replicas cannot be made, is left out on all ranks with a warning:
    the request is a valid one that does nothing, or finalises without a commit, and the previous checkpoint stays.

    Args:
        storage_writer: a `MemoryStorageWriter`; its `on_failure` is for `dcp.save`.
        backend: for metadata.json; a load strategy asks for the same.
        version: likewise.
        use_cached_ckpt_structure: plan anew only when the structure of the state has changed on some rank, which is
            looked at in every save.
        timeout_s: for how long a rank is waited for that does not come to a step of a save; it is named then.
    """

    def __init__(
        self,
        storage_writer: MemoryStorageWriter,
        backend: str = BACKEND,
        version: int = VERSION,
        use_cached_ckpt_structure: bool = False,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        super().__init__(backend, version)
        self._writer = storage_writer
        self._ranks = Ranks(timeout_s)
        self._planning = CollectivePlanner(self._ranks, is_recurring=use_cached_ckpt_structure)
        self._files: dict[str, bytes] = {}

    @property
    def storage_writer(self) -> MemoryStorageWriter:
        """What it writes with."""
        return self._writer

    @property
    def ranks(self) -> Ranks:
        """Those that save together."""
        return self._ranks

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Yes: objects lie beside the tensors of their rank."""
        return True

    def attach(self, name: str, content: bytes) -> None:
        """Adds a file to the next save: its commit carries it to every host. What rank 0 attaches counts.

        Args:
            name: of the file in the container of the checkpoint.
            content: all of it.
        """
        self._files[name] = content

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str]) -> AsyncRequest:
        """Copies the state, and returns what remains to be done. Called on all ranks, from the thread that trains.

        Args:
            sharded_state_dict: of Megatron's sharded tensors and objects only; main replicas are written.
            checkpoint_dir: the container of the step: `step-<N>_ckpt` in the container of the job.

        Returns:
            A request for one of Megatron's queues, or for `torchelastic.checkpoint.async_ckpt.AsyncCallsQueue`.

        Raises:
            Exception: the state cannot be planned or is no sharded state, on some rank; raised on all of them.
        """
        return self._request(sharded_state_dict, checkpoint_dir, with_checksums=False)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str]) -> None:
        """All of it here and now; arguments and errors as `async_save`."""
        self._request(sharded_state_dict, checkpoint_dir, with_checksums=True).execute_sync()

    def _request(
        self, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str], *, with_checksums: bool
    ) -> AsyncRequest:
        files, self._files = self._files, {}
        name = Path(checkpoint_dir).name

        def begin() -> dict[str, Any]:
            self._begin(checkpoint_dir, files)
            return _state_of_torch(sharded_state_dict)

        try:
            planned = self._planning.plan(f"plan {name}", self._writer, begin)
            staged, results = self._stage(f"copy {name}", planned, with_checksums)
        except SaveSkippedError as error:
            self._count(checkpoint_dir, error)
            return AsyncRequest(_nothing, (), [])
        finalize = partial(self._finalize, Path(checkpoint_dir), staged, planned.metadata, results)
        return AsyncRequest(_write, (staged,), [finalize])

    def _begin(self, checkpoint_dir: str | os.PathLike[str], files: dict[str, bytes]) -> None:
        extras: dict[str, bytes] = {}
        if self._ranks.is_coordinator:
            config = json.dumps(asdict(CheckpointingConfig(self.backend, self.version)))
            extras = {**_common_of_megatron(checkpoint_dir), CONFIG_FNAME: config.encode(), **files}
        self._writer.reset(os.fspath(checkpoint_dir))
        for name, content in extras.items():
            self._writer.attach(name, content)

    def _stage(self, step: str, planned: Planned, with_checksums: bool) -> tuple[StagedItems, list[list[WriteResult]]]:
        """Copies what is planned; with the results of all ranks, on rank 0. All ranks have copied theirs, or none."""
        saver = self._writer.checkpoint_saver
        staged: list[StagedItems] = []

        def stage() -> None:
            staged.append(saver.prepare_write_data(planned.plan, planned.planner, with_checksums=with_checksums))

        try:
            self._ranks.agree(step, stage)
            return staged[0], self._ranks.gather(list(staged[0].results))
        except BaseException:
            for one in staged:
                _abort(one)
            raise

    def _finalize(
        self, checkpoint_dir: Path, staged: StagedItems, metadata: Any, results: list[list[WriteResult]]
    ) -> None:
        """Commits a save once all ranks have written; called on all ranks, in the training process.

        Where a rank has failed, this warns, and the checkpoint stays without a commit.

        Args:
            checkpoint_dir: the container of the step.
            staged: the part of this rank.
            metadata: DCP's, of the whole checkpoint; on rank 0 only.
            results: of all ranks; on rank 0 only.
        """

        def adopt() -> list[Any]:
            staged.adopt()
            return [list(astuple(record)) for record in records_of([staged.results])]

        def commit(records: list[Any]) -> None:
            if self._ranks.is_coordinator:
                written = [[result_of(ShardRecord(*record)) for record in each] for each in records]
                self._writer.finish(metadata, [*results, *written])

        step = f"commit {checkpoint_dir.name}"
        try:
            records = self._ranks.agree(step, adopt)
            self._ranks.agree(step, partial(commit, records))
        except SaveSkippedError as error:
            self._count(checkpoint_dir, error)
            _abort(staged)

    def _count(self, checkpoint_dir: str | os.PathLike[str], error: SaveSkippedError) -> None:
        """Warns, and counts the save among those that were skipped: on rank 0, as `dcp.save` does it."""
        if self._ranks.is_coordinator:
            self._writer.checkpoint_saver.skipped.skipped(os.fspath(checkpoint_dir), error.reason, str(error))


def _common_of_megatron(checkpoint_dir: str | os.PathLike[str]) -> dict[str, bytes]:
    """The common state, where `dist_checkpointing.save` has already written it: on rank 0 only."""
    path = Path(checkpoint_dir) / COMMON_STATE_FNAME
    return {COMMON_STATE_FNAME: path.read_bytes()} if path.exists() else {}


def _state_of_torch(sharded_state_dict: Any) -> dict[str, Any]:
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
    state: dict[str, Any] = mcore_to_pyt_state_dict(by_key, False)
    return state


def _nothing() -> None:
    """The background's part of a save that is left out; Megatron's persistent queue would wait for ever for None."""


def _write(staged: StagedItems) -> None:
    """The background's part, in the process that staged it, in a fork of it, or in a spawned one.

    Never raises: Megatron's worker would end, and its queue wait for it for ever. `adopt` sees it.
    """
    try:
        staged.write()
    except CheckpointError as error:
        log.warning("%s cannot be written: %s", staged.target, error)
    except Exception:
        log.exception("%s cannot be written", staged.target)


def _abort(staged: StagedItems) -> None:
    try:
        staged.abandon()
    except CheckpointError as error:  # whatever made this save fail is the one to see
        log.warning("the memory of %s, which was not saved, cannot be used again: %s", staged.target, error)
