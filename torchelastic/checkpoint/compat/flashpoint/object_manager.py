"""The containers of this host that a process knows, by path for itself and by name for other hosts."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchelastic.checkpoint.compat.flashpoint.buffer_io import BufferIO
from torchelastic.checkpoint.compat.flashpoint.container import Container
from torchelastic.checkpoint.compat.flashpoint.ids import (
    CheckpointContainerId,
    CheckpointObjectId,
    newest_of_step,
    object_of,
    parse_object,
    parts_of,
)
from torchelastic.checkpoint.compat.flashpoint.job import job_container
from torchelastic.checkpoint.compat.flashpoint.received_objects import ReceivedObjects
from torchelastic.checkpoint.compat.flashpoint.registry import ContainerRegistry
from torchelastic.checkpoint.engine.durable_copies import DurableCopies
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.format.disk import REAL_DISK, Disk
from torchelastic.checkpoint.store.durable_tier import DurableTier
from torchelastic.checkpoint.store.kinds import Kind, require_own_folder
from torchelastic.processes.dropped import let_go

log = logging.getLogger(__name__)


class CheckpointObjectManager:
    """Opens containers, and takes and gives away their objects; may be used by several threads.

    It pickles to what another process of this host needs: containers are opened anew there, and what that process opens
    is known here too, for the server that receives replicas (`ReplicationManager`).

    Args:
        pool_config: accepted for code written for ML Flashpoint; slots need no configuration.
        durable: where complete checkpoints are copied to in the background, of this job alone; all of them or, with its
            `every`, some, the next one when the copy before is done. What no host has any more is read there. None:
            nowhere.
        disk: what touches files.

    Attributes:
        copies: what goes to the durable place.
        shelf: the objects of all containers that this process and those that it was pickled to use; see `ReplicaStore`.
    """

    def __init__(
        self, pool_config: object = None, *, durable: DurableTier | None = None, disk: Disk = REAL_DISK
    ) -> None:
        del pool_config
        self._prepare(durable, disk, ContainerRegistry())

    def _prepare(self, durable: DurableTier | None, disk: Disk, registry: ContainerRegistry) -> None:
        self._durable, self._disk, self._registry = durable, disk, registry
        self._lock = threading.RLock()
        self._containers: dict[str, Container] = {}
        self.shelf = ReceivedObjects(self._find, self._registry.names)
        self.copies = None if durable is None else DurableCopies(durable, Kind.MEMORY, marks=registry.copies)

    def container(self, base: str | os.PathLike[str] | CheckpointContainerId) -> Container:
        """The container of a job; the same object each time. From now on its objects can be received and given away.

        Args:
            base: its path on this host; its last part is its name, which all hosts of the job share.

        Raises:
            ValueError: the path cannot be a container's, or another container of this name is in use.
            CheckpointError: the folder cannot be used, belongs to another job, or holds only what something else saved.
        """
        root = Path(str(CheckpointContainerId(Path(os.fspath(base)).absolute())))
        with self._lock:
            known = self._containers.get(root.name)
            if known is not None and known.root == root:
                return known
            self._check_free(root)
            require_own_folder(root, Kind.MEMORY)
            container = self._containers[root.name] = Container(root, disk=self._disk, registry=self._registry)
            return container

    def wait_for_durable(self, timeout_s: float) -> bool:
        """Waits until no copy to the durable place is under way; whether that is so. Before the job ends, say.

        Not a collective; in the process that saves, or whose helper does (`async_save`). The coordinator knows
        whether the others have copied theirs too.
        """
        return self.copies is None or self.copies.wait(timeout_s)

    def names_of(self, object_id: str | os.PathLike[str] | CheckpointObjectId) -> str:
        """What the other hosts call a shard. Raises: ValueError if it is none that lies in a container."""
        return object_of(*parse_object("/".join(CheckpointObjectId(object_id).split("/")[-3:])))

    def names_in(self, container_id: str | os.PathLike[str] | CheckpointContainerId, there: Iterable[str]) -> list[str]:
        """Of what another host has, the newest save of the step of this container; its commit comes last.

        Raises:
            ValueError: it is no container of a step.
        """
        base, step = parts_of(container_id)
        return newest_of_step(there, base.name, step)

    # --- buffers ------------------------------------------------------------------------------------------------------

    def acquire_buffer(
        self, object_id: str | os.PathLike[str] | CheckpointObjectId, buffer_size: int = 0, overwrite: bool = True
    ) -> BufferIO:
        """A new object in the container of a step, to be written; nobody sees it before it is closed.

        Args:
            object_id: the object.
            buffer_size: how many bytes are expected; it grows if more are written.
            overwrite: an object of this name is replaced.

        Raises:
            ValueError: it does not lie in the container of a step.
            FileExistsError: there is one, and `overwrite` is false.
            CheckpointError: there is no room.
        """
        wanted = CheckpointObjectId(object_id)
        base = _base_of(wanted)
        if not overwrite and Path(str(wanted)).exists():
            raise FileExistsError(f"{wanted} is there already: give overwrite=True to replace it")
        return BufferIO(wanted, self.container(base), buffer_size)

    def get_buffer(self, object_id: str | os.PathLike[str] | CheckpointObjectId) -> BufferIO | None:
        """An object for reading, compared with its checksum; None, with a warning, if it cannot be read."""
        try:
            return BufferIO(CheckpointObjectId(object_id))
        except (CheckpointError, ValueError) as error:
            log.warning("%s cannot be read: %s", object_id, error)
            return None

    def close_buffer(
        self, buffer_io: BufferIO | None, skip_close_if_symlink: bool = False, truncate: bool = True
    ) -> None:
        """Closes a buffer, which publishes what was written. What is no buffer is ignored, with a warning.

        Args:
            buffer_io: of `acquire_buffer` or `get_buffer`.
            skip_close_if_symlink: accepted for code written for ML Flashpoint; objects are no links.
            truncate: see `BufferIO.close`.

        Raises:
            CheckpointError: it cannot be published.
        """
        del skip_close_if_symlink
        if not isinstance(buffer_io, BufferIO):
            log.warning("%r is no buffer, and nothing is closed", buffer_io)
            return
        buffer_io.close(truncate)

    def delete_object(self, object_id: str | os.PathLike[str] | CheckpointObjectId) -> None:
        """Removes an object, unless another process uses it; it may be gone. Raises: ValueError, CheckpointError."""
        wanted = CheckpointObjectId(object_id)
        self.container(_base_of(wanted)).remove_object(Path(str(wanted)))

    def delete_container(self, container_id: str | os.PathLike[str] | CheckpointContainerId) -> None:
        """Removes the container of a step, or that of a job with all of its checkpoints; it may be gone.

        What is no folder stays, with a warning.

        Raises:
            CheckpointError: the disk refuses.
        """
        wanted = CheckpointContainerId(container_id)
        folder = Path(str(wanted))
        if not folder.is_dir():
            if folder.exists():
                log.warning("%s is no folder, so no container, and nothing is removed", folder)
            return
        if CheckpointContainerId.parse_version_container_step(wanted.name) is not None:
            base, step = parts_of(wanted)
            self.container(base).remove(step)
            return
        container = self.container(wanted)
        with self._lock:
            self._forget(container)
        container.remove_all()

    def teardown_pool(self) -> None:
        """Gives the memory of all free slots back and forgets the containers; what is published stays."""
        with self._lock:
            for container in list(self._containers.values()):
                self._forget(container)
                container.close()
        let_go(self.copies)

    # --- what other processes of this host use ------------------------------------------------------------------------

    def _check_free(self, root: Path) -> None:
        other = self._registry.root_of(root.name)
        if self._durable is not None and (others := set(self._registry.names()) - {root.name}):
            raise ValueError(f"{self._durable.where} is for one container: {root} is another one than {min(others)!r}")
        if other is not None and other != root:
            raise ValueError(
                f"the container {root} has the same name as {other}, which is in use: containers are known to other "
                "hosts by the last part of their path, so give it another one"
            )

    def _forget(self, container: Container) -> None:
        self._containers.pop(container.name, None)
        self._registry.forget(container.name)

    def _find(self, name: str) -> Container | None:
        with self._lock:
            known = self._containers.get(name)
            if known is not None:
                return known
            root = self._registry.root_of(name)
            return self.container(root) if root is not None else None

    def __getstate__(self) -> tuple[Any, ...]:
        return self._durable, self._disk, self._registry

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._prepare(*state)


class SaverContainers:
    """The containers that one saver saves into: one, as a rule. May be used by several threads.

    DCP asks for the copy of a state before it tells which checkpoint it is for.

    Args:
        manager: opens them.
    """

    def __init__(self, manager: CheckpointObjectManager) -> None:
        self._manager = manager
        self._last: Path | None = None
        self._elsewhere: Container | None = None

    def at(self, base: CheckpointContainerId) -> Container:
        """A container. Raises: CheckpointError, ValueError if it cannot be used."""
        container = self._manager.container(base)
        self._last = container.root
        return container

    def for_a_copy(self) -> Container:
        """The container that was used last, or of the only one that is known.

        If none is known it may be any place in memory: on the same file system, a new name makes a shard of a copy.

        Raises:
            CheckpointError: there is no place for one.
        """
        if self._last is None:
            names = self._manager._registry.names()
            self._last = self._manager._registry.root_of(names[0]) if len(names) == 1 else None
        if self._last is None:
            if self._elsewhere is None:
                self._elsewhere = Container(job_container(f"copies-{os.getpid()}"))
                atexit.register(self._elsewhere.remove_all)
            return self._elsewhere
        if self._elsewhere is not None:
            self._elsewhere.close()  # what it takes back from now on goes to the system
            self._elsewhere.reclaim()
        return self._manager.container(self._last)


def _base_of(object_id: CheckpointObjectId) -> CheckpointContainerId:
    """The container of the job."""
    try:
        return parts_of(object_id.get_parent() or "")[0]
    except ValueError as error:
        raise ValueError(
            f"{object_id} lies in no container of a step, such as /dev/shm/jobs/145/step-20_ckpt"
        ) from error
