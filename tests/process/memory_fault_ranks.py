"""Ranks that are killed or stopped in the middle of a save into memory, and the job that starts after them.

What these functions do on each rank is run by `forked_ranks.run_ranks`.
"""

from __future__ import annotations

import errno
import re
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.process.forked_ranks import ANSWER_S
from tests.process.log_ears import heard
from tests.process.memory_ranks import base_of
from tests.process.memory_saves import Saving, State, blank, same, saving
from torchelastic.checkpoint.compat.flashpoint.ids import is_commit
from torchelastic.checkpoint.format.disk import REAL_DISK, Disk
from torchelastic.checkpoint.memory import (
    MemoryStorageWriter,
)
from torchelastic.checkpoint.replicas.protocol import ReplicaConnection
from torchelastic.checkpoint.replicas.receive import Reception
from torchelastic.checkpoint.replicas.replica_client import ReplicaClient
from torchelastic.checkpoint.replication import ReplicationError
from torchelastic.checkpoint.store.manifest import MANIFEST_NAME
from torchelastic.checkpoint.store.reading import read_manifest
from torchelastic.checkpoint.store.save_id import ShardId
from torchelastic.testing.disk_faults import DiskFault, FaultyDisk, fail_at, kill_at

OLD, NEW = 10, 20
SIZE = 3000
EXTRA = "common.pt"
#: How long a peer may be silent.
SILENT_S = 4.0


# --- faults -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """What happens to one rank while a step is saved.

    Attributes:
        rank: whose.
        at: the number of the call to the disk since the save began; or a call as `Calls` names it, such as
            "rename manifest.json"; or "receive shard", "receive commit": in the middle of it.
        verb: "kill", "pause", or "fail" (with EIO).
    """

    rank: int
    at: int | str
    verb: str = "kill"


class Calls(FaultyDisk):
    """Counts the calls since `begin`, of all threads, and names each by its method and the kind of its file."""

    def __init__(self) -> None:
        super().__init__()
        self._own_lock = threading.Lock()
        self._fault: Fault | None = None
        self._has_begun = False
        self.kinds: list[str] = []

    def begin(self, fault: Fault | None) -> None:
        with self._own_lock:
            self._fault, self._has_begun = fault, True

    def _reach(self, name: str, path: Path | None) -> DiskFault | None:
        with self._own_lock:
            if not self._has_begun:
                return None
            number, kind = len(self.kinds), f"{name} {kind_of(path)}".strip()
            self.kinds.append(kind)
            if self._fault is None or self._fault.at not in (number, kind):
                return None
            verb, self._fault = self._fault.verb, None
            if verb != "pause":
                self._faults = [kill_at(name) if verb == "kill" else fail_at(name, errno.EIO)]
                return super()._reach(name, path)
        strike(verb)
        return None


def strike(verb: str) -> None:
    """Kills or stops this process. This thread goes no further: another one would take a signal to the process."""
    signal.pthread_kill(threading.get_ident(), {"kill": signal.SIGKILL, "pause": signal.SIGSTOP}[verb])


def kind_of(path: Path | None) -> str:
    """The name of a file, without what differs from save to save."""
    name = "" if path is None else path.name
    for pattern, kind in ((r"shard-.*", "shard"), (r"\.fence\..*", "fence"), (r"\.tmp-.*", "hidden")):
        name = re.sub(pattern, kind, name)
    return name


def kind_of_object(object_id: str) -> str:
    """What is received: the shard of a rank, or the commit."""
    shard = ShardId.parse("/".join(object_id.split("/")[-2:]))
    return "commit" if is_commit(shard) else "shard"


def _strike_while_receiving(fault: Fault) -> None:
    """Half of the first piece of an object is there, and not what was sent."""
    begin, pull, fill = Reception.begin, ReplicaClient.pull, ReplicaConnection.fill
    coming = threading.local()

    def begin_and_tell(reception: Any, object_id: str, *arguments: Any) -> Any:
        coming.what = kind_of_object(object_id)
        return begin(reception, object_id, *arguments)

    def pull_and_tell(client: Any, object_id: str, destination: Any) -> Any:
        coming.what = kind_of_object(object_id)
        return pull(client, object_id, destination)

    def fill_half(connection: Any, piece: memoryview | bytearray) -> None:
        if isinstance(piece, memoryview) and fault.at == f"receive {coming.what}":
            half = piece.nbytes // 2
            fill(connection, piece[:half])
            strike(fault.verb)
            fill(connection, piece[half:])
        else:
            fill(connection, piece)

    Reception.begin, ReplicaClient.pull = begin_and_tell, pull_and_tell  # type: ignore[assignment,method-assign]
    ReplicaConnection.fill = fill_half  # type: ignore[assignment,method-assign]


# --- what ranks do ----------------------------------------------------------------------------------------------------


class WriterWithExtra(MemoryStorageWriter):
    """Attaches a file that tells the save, as frameworks do."""

    attempt = 0

    def reset(self, checkpoint_id: Any = None) -> None:
        super().reset(checkpoint_id)
        self.attach(EXTRA, f"{Path(str(checkpoint_id)).name} {self.attempt}".encode())


@contextmanager
def rank_of(root: str, hosts: str, disk: Disk = REAL_DISK, silent_s: float = SILENT_S) -> Iterator[Saving]:
    """A rank of a job; `hosts` has a letter per rank."""
    with saving(root, hosts, disk=disk, silent_s=silent_s, kind=WriterWithExtra, thread_count=1) as each:
        each.manager.container(each.base)
        each.replication.all_gather("ready", None)  # who pushes before its partner has opened the container is refused
        yield each


def state_of(step: int, attempt: int, rank: int) -> State:
    """A part that only this rank has, and one that all have."""
    noise = torch.Generator().manual_seed(10_000 * step + 10 * attempt + rank)
    shared = torch.full((100,), step + attempt / 1000)
    return {f"w{rank}": torch.randn(SIZE, generator=noise), "shared": shared, "step": step, "attempt": attempt}


def whole_state(step: int, attempt: int, ranks: int) -> State:
    return {name: value for rank in range(ranks) for name, value in state_of(step, attempt, rank).items()}


def save_one(each: Saving, step: int, attempt: int = 0, is_async: bool = False) -> None:
    state = state_of(step, attempt, each.replication.rank)
    assert isinstance(each.writer, WriterWithExtra)
    each.writer.attempt = attempt
    if is_async:
        each.async_save(state, step).result(ANSWER_S)
    else:
        each.save(state, step)


def life(
    root: str, hosts: str, fault: Fault | None, is_async: bool = False, silent_s: float = SILENT_S
) -> dict[str, Any]:
    """A job from its start on: saves OLD, and the next step; then a rank may be killed."""
    disk = Calls()
    with rank_of(root, hosts, disk, silent_s) as each, heard() as warnings_heard:
        save_one(each, OLD, is_async=is_async)
        assert OLD in each.steps()
        each.replication.all_gather("begun", None)
        mine = fault if fault is not None and fault.rank == each.replication.rank else None
        if mine is not None and str(mine.at).startswith("receive "):
            _strike_while_receiving(mine)
        _tell_failed_pushes(each, Path(root) / "push-failed")
        disk.begin(mine)
        save_one(each, NEW, is_async=is_async)
        told = {"calls": disk.kinds, "steps": each.steps()}
        return told | {"skipped": each.saver.skipped.count(), "warnings": warnings_heard}


def _tell_failed_pushes(each: Saving, file: Path) -> None:
    push = each.replication.push

    def push_and_tell(*arguments: Any) -> int:
        try:
            return push(*arguments)
        except ReplicationError:
            file.touch()
            raise

    vars(each.replication)["push"] = push_and_tell


def recovered(roots: Sequence[str], hosts: str) -> list[dict[str, Any]]:
    """What a rank of the job that starts after it finds, in each of several copies of what was left, and saves then."""
    return [_recovered(root, hosts) for root in roots]


def _recovered(root: str, hosts: str) -> dict[str, Any]:
    with rank_of(root, hosts) as each, heard() as warnings_heard:
        step = each.latest()
        outcome = {"found": _loaded(each, step, len(hosts)), "made": each.loader.wait_for_replicas(ANSWER_S)}
        each.replication.all_gather("made", None)
        save_one(each, OLD if step is None else step + 10, 1)
        outcome["skipped"] = each.saver.skipped.count()
        outcome["next"] = _loaded(each, each.latest(), len(hosts))
        outcome["warnings"] = warnings_heard
        return outcome


def _loaded(each: Saving, step: int | None, ranks: int) -> Any:
    """Step and attempt of what is loaded; or what is wrong with it."""
    if step is None:
        return None
    loaded = each.load(blank(whole_state(step, 0, ranks)), step)
    extra = (each.container.folder_of(step) / EXTRA).read_text()
    each.replication.all_gather("loaded", None)
    if (
        not same(loaded, whole_state(step, loaded["attempt"], ranks))
        or extra != f"step-{step}_ckpt {loaded['attempt']}"
    ):
        return f"step {loaded['step']} of attempt {loaded['attempt']} is mixed or torn; {extra}"
    return (step, loaded["attempt"])


# --- what is left -----------------------------------------------------------------------------------------------------


def copies_of(root: Path, hosts: str) -> dict[str, Path]:
    """What is left of a job, once whole ("") and once without each host."""
    copies = {}
    for lost in ("", *sorted(set(hosts))):
        copies[lost] = copy_of(root, f"{root.name}-without-{lost}")
        if lost:
            shutil.rmtree(base_of(copies[lost], lost))
    return copies


def copy_of(root: Path, name: str) -> Path:
    return Path(shutil.copytree(root, root.with_name(name)))


def newest_commit(root: Path, hosts: str) -> int:
    """The step of the newest commit on any of these hosts; -1 if there is none."""
    found = [(-1, -1)]
    for host in set(hosts):
        for path in base_of(root, host).glob(f"step-*/{MANIFEST_NAME}"):
            save = read_manifest(path.parent).name
            found.append((save.generation, save.step))
    return max(found)[1]
