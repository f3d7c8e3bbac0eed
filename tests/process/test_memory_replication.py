"""Objects on their way between ranks: who may push what, what becomes of it, and what a lost or silent peer costs."""

from __future__ import annotations

import gc
import os
import pickle
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from tests.process import memory_ranks as ranks
from tests.process.local_ranks import Crew, succeeded
from tests.process.memory_ranks import JOB, Member
from torchelastic.checkpoint.compat.flashpoint.ids import object_of
from torchelastic.checkpoint.compat.flashpoint.object_manager import CheckpointObjectManager
from torchelastic.checkpoint.memory import CheckpointContainerId, DefaultCheckpointSaver, MemoryStorageWriter
from torchelastic.checkpoint.replicas.replica_client import ReplicaClient
from torchelastic.checkpoint.replicas.replica_server import ReplicaServer
from torchelastic.checkpoint.replicas.replication_errors import AuthenticationError, ReplicaRefusedError
from torchelastic.checkpoint.replication import ReplicationError, ReplicationManager, ReplicationRetryConfig
from torchelastic.checkpoint.store.received_shards import sealed_bytes
from torchelastic.network.ports import unused_ports

dcp: Any = torch.distributed.checkpoint  # its names are not exported explicitly

CREW_SIZE = 3


def address_of(each: Member, rank: int) -> tuple[str, int]:
    topology = each.replication._topology
    assert topology is not None
    return topology.addresses[rank]


def everything_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def in_turn(each: Member, rank: int, function: Any) -> Any:
    """Has one rank do something while the others wait; what it returns."""
    answer = function() if each.rank == rank else None
    each.meet()
    return answer


# --- pushes -----------------------------------------------------------------------------------------------------------


def save_beside_a_deaf_partner(root: str, needs_replicas: bool, steps: int = 1) -> list[Any]:
    """One of three ranks gives its shard to one that does not listen; how that ended, who has which shard."""
    rank, base = dist.get_rank(), Path(root) / f"host-{dist.get_rank()}" / JOB
    os.environ["TORCHELASTIC_FAILURE_DOMAIN"] = f"host-{rank}"
    start = ReplicaServer.start
    if rank == 1:
        ReplicaServer.start = ReplicaServer.close  # type: ignore[method-assign]
    objects, replication = CheckpointObjectManager(), ReplicationManager()
    try:
        replication.initialize(objects, 0, ReplicationRetryConfig(max_retries=1, timeout_seconds=5.0), timeout_s=30.0)
        saver = DefaultCheckpointSaver(ckpt_obj_manager=objects, replication_manager=replication)
        writer = MemoryStorageWriter(saver, on_failure="raise", needs_replicas=needs_replicas)
        for step in range(steps):
            id_ = base / CheckpointContainerId.format_version_container(step)
            try:
                dcp.save({f"w{rank}": torch.full((9,), rank)}, checkpoint_id=str(id_), storage_writer=writer)
                ended = "saved"
            except CheckpointException as error:
                ended = str(error)
            gc.collect()  # errors hold what they are about
        dist.barrier()
        return [ended, replication.partners, sorted(int(path.name[6:11]) for path in base.glob("step-*/*.shard"))]
    finally:
        replication.shutdown()
        objects.teardown_pool()
        ReplicaServer.start = start  # type: ignore[method-assign]


@pytest.mark.parametrize("needs_replicas", [True, False])
def test_a_partner_that_does_not_listen_costs_the_save_or_where_that_is_wanted_its_replica(
    crew: Crew, root: Path, needs_replicas: bool
) -> None:
    told = succeeded(crew.run(save_beside_a_deaf_partner, str(root), needs_replicas, ranks=3))
    (gives,) = [rank for rank, (_, partners, _) in enumerate(told) if 1 in partners]
    if needs_replicas:
        assert all("rank 1" in ended and "has no copy of" in ended for ended, _, _ in told)
        return
    assert [ended for ended, _, _ in told] == ["saved"] * 3
    holders = [rank for rank, (_, _, shards) in enumerate(told) if gives in shards]
    assert holders == [gives], "its shard is where it was saved, and nowhere else"
    assert all(3 in shards for _, _, shards in (told[0], told[2])), "who listens has the commit"


def test_partners_keep_no_replicas_of_saves_that_have_failed(crew: Crew, root: Path) -> None:
    for ended, _, shards in succeeded(crew.run(save_beside_a_deaf_partner, str(root), True, 5, ranks=3)):
        assert "has no copy of" in ended
        assert len(shards) <= 2, "its own and its partner's, of the last save"


def drop_and_count(root: str) -> list[int]:
    """How many descriptors there are when a manager was dropped with all that it had, and another one, and so on."""
    counts = []
    for _ in range(4):
        objects, replication = CheckpointObjectManager(), ReplicationManager()
        replication.initialize(objects)
        objects.container(Path(root) / JOB)
        replication.all_gather("met", None)
        del objects, replication
        gc.collect()
        dist.barrier()
        counts.append(psutil.Process().num_fds())
    return counts


def test_managers_that_are_dropped_leave_nothing_open(crew: Crew, root: Path) -> None:
    for counts in succeeded(crew.run(drop_and_count, str(root), ranks=2)):
        assert len(set(counts[1:])) == 1, counts


# --- who may not ------------------------------------------------------------------------------------------------------

SHARD, COMMIT = ranks.shard(0, 2, 5, 0), ranks.shard(2, 2, 5, 0)
TRICKS = (f"{JOB}/../{COMMIT}", f"../{JOB}/{COMMIT}", f"/{JOB}/{COMMIT}")
NOT_WANTED = (
    f"other/{COMMIT}",
    f"{JOB}/{SHARD.name}/manifest.json",
    f"{JOB}/step-5_ckpt/evil.pt",
    f"{JOB}/{SHARD.name}/shard-00003-of-00003.shard",
)


def intrude(root: str, hosts: str) -> list[str]:
    rank = dist.get_rank()
    with ranks.member(root, hosts, rank) as each:
        each.meet()
        before = everything_below(Path(root))
        outcomes: list[str] = []

        def try_all() -> None:
            good = object_of(JOB, SHARD)
            topology = each.replication._topology
            assert topology is not None
            stranger = ReplicaClient(address_of(each, 1), "x" * 32, timeout_s=5, retry_s=0)
            for _ in range(2):
                with pytest.raises(AuthenticationError):
                    stranger.push(good, b"evil", token_round=0)
                with pytest.raises(AuthenticationError):
                    stranger.ids()
            friend = ReplicaClient(address_of(each, 1), topology.token, timeout_s=5, retry_s=0)
            for name in TRICKS:
                with pytest.raises(ValueError, match="no id of an object"):
                    friend.push(name, b"evil", token_round=0)
            for name in NOT_WANTED:
                with pytest.raises(ReplicaRefusedError) as caught:
                    friend.push(name, b"evil", token_round=0)
                outcomes.append(str(caught.value))
            for name in (good, object_of(JOB, COMMIT)):  # of the right form, and no shard
                with pytest.raises(ReplicaRefusedError, match="the shelf failed"):
                    friend.push(name, b"evil" * 5000, token_round=0)

        in_turn(each, 0, try_all)
        hidden = [name for name in everything_below(Path(root)) if ".tmp-" not in name]
        assert hidden == [name for name in before if ".tmp-" not in name]
        each.meet()
        return outcomes


def test_strangers_and_objects_outside_of_the_container_write_nothing(crew: Crew, root: Path) -> None:
    outcomes, _ = succeeded(crew.run(intrude, str(root), "ab", ranks=2))  # R15
    assert len(outcomes) == len(NOT_WANTED)
    assert "no container named 'other' is in use here" in outcomes[0]
    assert all("is no object of a checkpoint" in text for text in outcomes[1:])


def push_after_the_group_was_formed_anew(root: str, hosts: str, port: int) -> str:
    rank = dist.get_rank()
    with ranks.member(root, hosts, rank, port=port) as each:
        path = ranks.publish(each, 5, 0)
        old = pickle.loads(pickle.dumps(each.replication))
        each.replication.initialize(each.objects, port, ReplicationRetryConfig(1, 5.0))
        content = sealed_bytes(path)
        assert content is not None

        def push_as_before() -> str:
            with pytest.raises(ReplicationError) as caught:
                old.push(ranks.object_at(path), content)
            assert isinstance(caught.value.__cause__, AuthenticationError)
            return str(caught.value)

        text = in_turn(each, 0, push_as_before)
        theirs = ranks.base_of(root, hosts[1 - rank]) / path.relative_to(each.container.root)
        assert not theirs.exists()
        each.meet()
        ranks.push(each, path)  # as a member of the new group
        each.meet()
        assert theirs.exists()
        each.meet()
        return str(text)


def test_what_a_former_group_pushes_is_refused_on_the_same_port_and_the_new_one_goes_on(crew: Crew, root: Path) -> None:
    (port,) = unused_ports("127.0.0.1")
    text, _ = succeeded(crew.run(push_after_the_group_was_formed_anew, str(root), "ab", port, ranks=2))
    assert "rank 1 on host-b has no copy" in text
    assert "authentication failed" in text


# --- bulk, and alone --------------------------------------------------------------------------------------------------


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def retrieve_bulk(root: str, hosts: str) -> list[Any]:
    rank = dist.get_rank()
    with ranks.member(root, hosts, rank) as each:
        ranks.save(each, 5, 0, replicate=False, spread=False)
        step = each.container.folder_of(5)
        got: list[Any] = []
        containers: list[Any] = []
        ok, missing = False, True
        if rank == 1:
            theirs = [each.container.path_of(SHARD)]
            with pytest.raises(ValueError, match="keeps its name"):
                each.replication.sync_bulk_retrieve(0, theirs, [], [each.container.root / "another"])
            assert not each.replication.sync_bulk_retrieve(2, theirs), "there is no rank 2"
            ok = each.replication.sync_bulk_retrieve(0, theirs, [step], got, containers)
            missing = each.replication.sync_bulk_retrieve(0, [each.container.path_of(ranks.shard(0, 2, 5, 1))])
        each.meet()
        return [ok, missing, len(got), len(containers), sorted(ranks.files_of(root, hosts[rank], 5)), files_in(step)]


def test_a_whole_container_of_a_step_is_retrieved_from_one_rank(crew: Crew, root: Path) -> None:
    _, (ok, missing, got, containers, files, attached) = succeeded(crew.run(retrieve_bulk, str(root), "ab", ranks=2))
    assert (ok, missing, got, containers) == (True, False, 1, 1)
    assert files == ["manifest.json", *(f"shard-0000{rank}-of-00003.shard" for rank in (0, 1, 2))]
    assert attached == ["common.pt"]


def test_what_is_asked_for_before_the_ranks_know_each_other_is_not_here(caplog: pytest.LogCaptureFixture) -> None:
    assert not ReplicationManager().sync_bulk_retrieve(0, [f"/dev/shm/{JOB}/{SHARD}"])
    assert "call ReplicationManager.initialize()" in caplog.text


# --- containers and buffers -------------------------------------------------------------------------------------------


def test_two_containers_of_one_name_are_refused_also_when_another_process_has_opened_the_first(root: Path) -> None:
    objects = CheckpointObjectManager()
    objects.container(root / "a" / JOB)
    assert objects.container(f"{root}/a/{JOB}/") is objects.container(root / "a" / JOB)
    beside = pickle.loads(pickle.dumps(objects))
    for manager in (objects, beside):
        with pytest.raises(ValueError, match="has the same name as"):
            manager.container(root / "b" / JOB)
    objects.teardown_pool()
    beside.container(root / "b" / JOB)
    with pytest.raises(ValueError, match="has the same name as"):
        objects.container(root / "a" / JOB)
    beside.teardown_pool()


def test_buffers_are_written_read_and_deleted(root: Path) -> None:
    objects = CheckpointObjectManager()
    name = root / JOB / "step-5_ckpt" / "notes.bin"
    with objects.acquire_buffer(name, 4) as buffer:
        buffer.write(b"more than four bytes")
    read = objects.get_buffer(name)
    assert read is not None
    assert read.read() == b"more than four bytes"
    objects.close_buffer(read)
    with pytest.raises(FileExistsError, match="is there already"):
        objects.acquire_buffer(name, 4, overwrite=False)
    with pytest.raises(ValueError, match="lies in no container of a step"):
        objects.acquire_buffer(root / "x.bin")
    objects.delete_object(name)
    assert not name.exists()
    assert objects.get_buffer(name) is None
    objects.close_buffer(None)
    objects.close_buffer(objects.acquire_buffer(name, 4))
    objects.delete_container(name.parent)
    assert not name.exists()
    objects.delete_container(root / JOB)
    objects.delete_container(root / JOB)
    assert not (root / JOB).exists()
    assert objects.shelf.ids() == []


@pytest.mark.parametrize("name", [JOB, f"{JOB}/step-5_ckpt"])
def test_a_file_is_no_container_and_stays(root: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).touch()
    CheckpointObjectManager().delete_container(root / name)
    assert (root / name).exists()
    assert f"{root / name} is no folder" in caplog.text
