"""Who gives a shard away is killed (SIGKILL) in the middle of it: another copy is taken, and the peer is named."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import torchelastic
from tests.process import tiered_work as work
from tests.process.fork_server import fork_server, started
from tests.process.forked_ranks import run_ranks
from torchelastic.checkpoint import TieredCheckpointManager
from torchelastic.checkpoint.engine.group_folders import GroupFolders
from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.checkpoint.format.header import lay_out
from torchelastic.checkpoint.format.stage import image_of
from torchelastic.checkpoint.format.tree import flatten
from torchelastic.checkpoint.replicas.receive import Destination
from torchelastic.checkpoint.replicas.replica_client import ReplicaClient, Transferred
from torchelastic.checkpoint.replicas.replica_server import ReplicaServer
from torchelastic.checkpoint.store import MemoryTier
from torchelastic.checkpoint.store.restore_plan import ShardSource
from torchelastic.checkpoint.store.save_id import SaveId, ShardId
from torchelastic.p2p import group_peers as p2p_peers

TOKEN = "a token of these tests"
SHARD = ShardId(SaveId(1, 1, 1, 1), 0, 1)
#: Far more than the buffers of a connection hold, so that no peer has sent all of it when it is killed.
LENGTH = 8 * 2**20


# --- one shard --------------------------------------------------------------------------------------------------------


@dataclass
class Holder:
    """A process that gives a shard away.

    Attributes:
        process: it.
        address: of its server.
    """

    process: BaseProcess
    address: tuple[str, int]


def weights() -> torch.Tensor:
    return torch.arange(LENGTH, dtype=torch.float32)


def give(folder: str, end: Connection) -> None:
    tier = MemoryTier(folder)
    flat = flatten({"w": weights()})
    image = image_of(lay_out(flat, SHARD.stated), [named.tensor for named in flat.tensors])
    tier.receive(SHARD.name, SHARD.rank, SHARD.world_size, memoryview(image.numpy()))  # type: ignore[arg-type] # numpy's
    server = ReplicaServer(tier.shelf, TOKEN, host="127.0.0.1")
    server.start()
    end.send(server.address)
    time.sleep(600)


@pytest.fixture
def holders(root: Path) -> Iterator[list[Holder]]:
    """Two, which are called ranks 0 and 1."""
    with ExitStack() as stack:
        made = []
        for rank in range(2):
            here, there = fork_server().Pipe()
            process = started(give, str(root / f"host-{rank}"), there)
            stack.callback(process.kill)
            assert here.poll(60), "the holder does not answer"
            made.append(Holder(process, here.recv()))
        yield made


@pytest.mark.parametrize("others", [[1], []], ids=["another copy", "the only copy"])
def test_a_holder_that_is_killed_while_it_gives_a_shard_is_named_and_another_one_asked(
    holders: list[Holder], root: Path, others: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    tier = MemoryTier(root / "mine")

    def pull(shard: ShardId, source: ShardSource, destination: Destination) -> Transferred:
        def begun(size_bytes: int) -> Any:
            if source.rank == 0:
                holders[0].process.kill()
                holders[0].process.join()
            return destination(size_bytes)

        return ReplicaClient(holders[source.rank].address, TOKEN, retry_s=0.2).pull(str(shard), begun)

    named = f"rank 0: 127.0.0.1:{holders[0].address[1]}"
    folders = GroupFolders(tier, 0, [], [], [], pull)
    if others:
        assert folders.fetch(SHARD, list(map(ShardSource, [0, *others]))) > 4 * LENGTH
        with tier.open(SHARD.name, SHARD.rank) as shard:
            assert torch.equal(shard.read_one("w"), weights())
        assert named in caplog.text.replace("at rank 0", "rank 0")
    else:
        with pytest.raises(CorruptCheckpointError, match=named):
            folders.fetch(SHARD, [ShardSource(0)])
        assert not tier.path_of(SHARD).exists()


# --- a restore of all ranks -------------------------------------------------------------------------------------------


def make_state(value: float) -> torchelastic.ModelState:
    module = torch.nn.Linear(4096, 4096, bias=False)
    torch.nn.init.constant_(module.weight, value)
    return torchelastic.ModelState(module, torch.optim.SGD(module.parameters(), lr=0.1))


def make_manager(folder: str, host: int) -> TieredCheckpointManager:
    tier = MemoryTier(Path(folder) / f"host-{host}")
    return TieredCheckpointManager([tier], run_id="test", replicas=1, host=f"host-{host}", patience_s=20.0)


def save(folder: str) -> list[str]:
    peers = work.join()
    manager = make_manager(folder, peers.rank)
    manager.save_step(make_state(7.0), 3, peers)
    manager.wait()
    work.close(manager)
    return list(manager.failures)


class Heard(logging.Handler):
    """Keeps what is logged as a warning or worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def restore_while_a_holder_is_killed(folder: str) -> dict[str, Any]:
    """Rank 0 kills rank 1 as soon as that begins to send its shard; the survivors form a group, and restore again."""
    host, heard, p2p_peers.CHECK_S = dist.get_rank(), Heard(), 0.5
    logging.getLogger("torchelastic").addHandler(heard)
    peers = work.join(2)
    pids = peers.all_gather(os.getpid())
    manager, state = make_manager(folder, host), make_state(0.0)
    manager.enter_group(peers)

    def raise_if_broken() -> None:
        os.kill(pids[1], 0)  # a zombie is there still: its parent says when it has ended
        if Path(f"/proc/{pids[1]}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX":
            raise RuntimeError("rank 1 is lost")

    peers._raise_if_broken = raise_if_broken
    pull = ReplicaClient.pull

    def killing(self: ReplicaClient, object_id: str, destination: Destination, **more: Any) -> Transferred:
        def begun(size_bytes: int) -> Any:
            if "shard-00001-" in object_id:
                os.kill(pids[1], signal.SIGKILL)
            return destination(size_bytes)

        return pull(self, object_id, begun, **more)

    lost = ""
    with mock.patch.object(ReplicaClient, "pull", killing):
        try:
            manager.restore(state, peers)
        except (RuntimeError, ProcessLookupError) as error:
            lost = str(error)
    store, survivor = f"file://{folder}/again", int(host == 2)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=store, rank=survivor, world_size=2, timeout=timedelta(seconds=30))
    again = work.join(3)
    manager.enter_group(again)
    step = manager.restore(state, again)
    (weight,) = state.module.parameters()
    value = float(weight.detach().min()) if host == 0 else 7.0
    result = {"lost": bool(lost), "step": step, "value": value, "heard": heard.texts}
    again.barrier()
    work.close(manager)
    return result


def test_a_restore_in_which_a_holder_is_killed_names_it_and_the_survivors_restore_from_its_replica(root: Path) -> None:
    saved = run_ranks(save, str(root), ranks=3)
    assert [(each.error, each.value) for each in saved] == [(None, [])] * 3
    first, killed, last = run_ranks(restore_while_a_holder_is_killed, str(root), ranks=3, others_go_on=True)
    assert killed.was_killed
    for survivor in (first, last):
        assert survivor.error is None, survivor.error
        assert (survivor.value["lost"], survivor.value["step"], survivor.value["value"]) == (True, 3, 7.0)
    named = [text for text in first.value["heard"] if "shard 1 in the memory tier of rank 1: 127.0.0.1:" in text]
    assert named, first.value["heard"]
