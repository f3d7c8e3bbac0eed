"""The background part of a save: checksums, header, the file's name, and replicas at the peers.

In a thread of the trainer it works on the slot, which is mapped there. In a process of its own it knows only the path,
and maps the file anew (a page fault per page, which takes longer than the checksums).
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchelastic.checkpoint.compat.nvrx.local.names import described
from torchelastic.checkpoint.errors import CheckpointError, explained
from torchelastic.checkpoint.format.disk import Disk
from torchelastic.checkpoint.format.header import Header
from torchelastic.checkpoint.format.stage import Stage, seal
from torchelastic.checkpoint.replicas.replication_errors import UNREACHABLE
from torchelastic.checkpoint.replicas.topology import PeerTopology
from torchelastic.checkpoint.store.fence import Fence
from torchelastic.checkpoint.store.save_id import ShardId
from torchelastic.metrics import publish_metric

log = logging.getLogger(__name__)

#: For how long a save tries to reach a peer that is lost, before it goes on without that replica.
PUSH_RETRY_S = 3.0


@dataclass(frozen=True)
class ShardWrite:
    """One rank's shard on its way; it pickles.

    Attributes:
        hidden: the file that the tensors were copied into.
        target: the name that it gets, in the folder of its save.
        data_offset: where the data begins in it, in bytes.
        header: of the shard; checksums that it lacks are computed here.
        shard: which it is.
        peers: the ranks, and which of them get a copy.
        disk: what touches files.
        stage: the file as this process has it in its memory; left behind when it is pickled.
    """

    hidden: Path
    target: Path
    data_offset: int
    header: Header
    shard: ShardId
    peers: PeerTopology
    disk: Disk
    stage: Stage | None = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "stage": None}

    def run(self) -> None:
        """Does it all; when it returns, the shard is here, and at all peers that could be reached.

        A peer that cannot be reached or has no room costs its replica and not the save: a warning names it, and the
        metric checkpoint.replication.failures counts it. It is retried for `PUSH_RETRY_S` at most, and no wait for it
        takes longer than they may be silent.

        Raises:
            FencedError: another job has taken the session over meanwhile.
            CheckpointError: the disk failed, or the shard changed while it was sent. It is removed here; peers may have
                it.
        """
        try:
            self._seal_and_send()
        except BaseException as error:
            for path in (self.hidden, self.target):
                try:
                    self.disk.remove(path)
                except CheckpointError:
                    pass  # the first error is the one to see; the next save removes what is left
            if isinstance(error, CheckpointError):  # whoever has taken over may have removed the folder: say so
                Fence(self.target.parent.parent, self.disk).check(*self.shard.name.token)
            raise

    def _seal_and_send(self) -> None:
        with explained("write the checkpoint", self.hidden):
            descriptor = os.open(self.hidden, os.O_RDWR | os.O_CLOEXEC)
        try:
            with self._view(descriptor) as view:
                size_bytes = self._seal(view)
                self.disk.sync(descriptor, self.hidden)
                self.disk.make_folder(self.target.parent)
                self.disk.publish(self.hidden, self.target)
                self.disk.sync_folder(self.target.parent)
                with view[:size_bytes] as content:
                    self._send(content)
        finally:
            os.close(descriptor)

    @contextmanager
    def _view(self, descriptor: int) -> Iterator[memoryview]:
        if self.stage is not None:
            with self.stage.slot.view() as view:
                yield view
        else:
            with mmap.mmap(descriptor, 0) as memory, memoryview(memory) as view:
                yield view

    def _seal(self, view: memoryview) -> int:
        """Writes header and preamble, the preamble last, and returns how long the shard is."""
        try:
            return seal(view, self.header, self.data_offset, self.disk)
        except ValueError as error:
            raise CheckpointError(f"this save has far more plain values than the last: {error}") from error

    def _send(self, content: memoryview) -> None:
        for rank in self.peers.partners:
            client = self.peers.client(rank, min(PUSH_RETRY_S, self.peers.retry.timeout_seconds))
            try:
                client.push(str(self.shard), content, token_round=self.shard.name.generation)
            except UNREACHABLE as error:
                publish_metric("torchelastic", "checkpoint.replication.failures", 1)
                log.warning(
                    "%s has no replica on rank %d at %s, which could not be reached or has no room (%s): it is saved "
                    "without",
                    described(self.shard),
                    rank,
                    client.peer,
                    error,
                )
            except CheckpointError as error:
                raise CheckpointError(
                    f"rank {rank} could not get a copy of {described(self.shard)}: {error}"
                ) from error
