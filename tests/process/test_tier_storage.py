"""Tiers on real folders, and durable ones in memory: what is put is found again, by whoever can reach it."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from tests.process.tier_saves import context_of, hidden_in, name_at, require_whole, restore, save, sealed
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError, FencedError
from torchelastic.checkpoint.policy import KeepLast
from torchelastic.checkpoint.replication import ReplicaShelf
from torchelastic.checkpoint.restore_plan import Candidate, candidates
from torchelastic.checkpoint.shards import read_tree
from torchelastic.checkpoint.store import (
    DiskTier,
    DurableTier,
    Manifest,
    MemoryTier,
    SaveId,
    Tier,
    TierContext,
    TierEntry,
)
from torchelastic.checkpoint.store.durable import without_credentials
from torchelastic.checkpoint.store.fence import OwnedError

KINDS = ["memory", "private", "shared", "file", "object"]


def restorable(inventories: Sequence[Mapping[str, Sequence[TierEntry]]]) -> list[Candidate[SaveId, int]]:
    held = [[entry.held(tier) for tier, each in mine.items() for entry in each] for mine in inventories]
    return [candidate for candidate in candidates(held) if candidate.is_complete]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    parent = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=parent if parent.is_dir() else tmp_path) as folder:
        yield Path(folder) / "tier"


def tier_of(kind: str, place: Path, keep: int = 2) -> Tier:
    if kind == "memory":
        return MemoryTier(place, KeepLast(keep))
    if kind in ("file", "object"):
        url = f"file://{place}" if kind == "file" else f"memory://{place.parent.name}"
        return DurableTier(url, KeepLast(keep))
    return DiskTier(place, KeepLast(keep), shared=kind == "shared")


def group_of(kind: str, place: Path, world_size: int, *, round_number: int = 1, keep: int = 2) -> list[Tier]:
    """One tier per rank, all on one host."""
    tiers = [tier_of(kind, place, keep) for _ in range(world_size)]
    epoch = context_of(tiers[0]).epoch
    for rank, tier in enumerate(tiers):
        tier.prepare(TierContext("run", epoch, round_number, rank, world_size))
    return tiers


def close(tiers: list[Tier]) -> None:
    for tier in tiers:
        tier.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_group_puts_is_found_by_the_next_one_and_the_old_ones_go(kind: str, place: Path) -> None:
    tiers = group_of(kind, place, 2)
    for step in (1, 2, 3):
        save(tiers, name_at(step))
        assert restore(tiers[1]) == step
    entries = tiers[0].inventory()
    assert [entry.name.step for entry in entries] == [3, 2]
    assert [(e.world_size, e.ranks, e.is_committed, e.damage) for e in entries] == [(2, (0, 1), True, None)] * 2
    close(tiers)
    following = group_of(kind, place, 1)
    assert restore(following[0]) == 3
    epoch = context_of(following[0]).epoch
    following[0].prepare(TierContext("run", epoch, 1, 0, 1))
    save(following, name_at(2, epoch=epoch))  # it went back to an older step
    assert restore(following[0]) == 2
    assert [entry.name.step for entry in following[0].inventory()] == [2, 3]
    close(following)
    assert hidden_in(place.parent) == []


@pytest.mark.parametrize("kind", ["memory", "private", "shared", "file"])
def test_a_damaged_checkpoint_does_not_count_as_one_that_is_kept(kind: str, place: Path) -> None:
    tiers = group_of(kind, place, 1)
    for step in (1, 2):
        save(tiers, name_at(step))
    (path,) = place.glob(f"{name_at(2).folder_name}/*.shard")
    os.truncate(path, 5000)
    save(tiers, name_at(3))
    whole = [entry.name.step for entry in tiers[0].inventory() if entry.ranks]
    assert whole == [3, 1]
    close(tiers)


@pytest.mark.parametrize("kind", ["private", "shared", "file"])
def test_a_missing_shard_is_damage_where_all_should_be(kind: str, place: Path) -> None:
    tiers = group_of(kind, place, 2)
    save(tiers, name_at(1))
    (path,) = place.rglob("shard-00001-of-00002.shard")
    path.unlink()
    (entry,) = tiers[0].inventory()
    assert entry.ranks == (0,)
    assert (entry.damage is None) == (kind == "private")
    assert restorable([{"tier": [entry]}]) == []
    close(tiers)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_not_committed_does_not_count_and_goes(kind: str, place: Path) -> None:
    tiers = group_of(kind, place, 2)
    save(tiers, name_at(1))
    tiers[0].put(sealed(name_at(2), 0, 2))
    assert restore(tiers[0]) == 1
    inventories = [{"tier": tier.inventory()} for tier in tiers]
    assert [candidate.save for candidate in restorable(inventories)] == [name_at(1)]
    for tier in tiers:
        tier.abandon(name_at(2))
    assert [entry.name for entry in tiers[0].inventory()] == [name_at(1)]
    tiers[1].put(sealed(name_at(3), 1, 2))  # and nobody abandons it
    save(tiers, name_at(4))
    close(tiers)
    following = group_of(kind, place, 2)
    save(following, name_at(5, epoch=9))
    assert [entry.name.step for entry in following[0].inventory()] == [5, 4]
    close(following)
    assert hidden_in(place.parent) == []


@pytest.mark.parametrize("kind", ["memory", "private"])
def test_a_host_that_dies_before_it_commits_has_its_shards_all_the_same(kind: str, place: Path) -> None:
    """The other host has committed, and removed the checkpoint before it."""
    hosts = [tier_of(kind, place / host, keep=1) for host in "ab"]
    for rank, tier in enumerate(hosts):
        tier.prepare(TierContext("run", 1, 1, rank, 2))
    for step, committing in ((1, hosts), (2, hosts[:1])):
        records = tuple(tier.put(sealed(name_at(step), rank, 2)) for rank, tier in enumerate(hosts))
        for tier in committing:
            tier.commit(Manifest(name_at(step), "run", 2, records))
            tier.prune()
    close(hosts)
    following = [tier_of(kind, place / host, keep=1) for host in "ab"]
    for rank, tier in enumerate(following):
        tier.prepare(TierContext("run", 1, 2, rank, 2))
    (newest,) = restorable([{"tier": tier.inventory()} for tier in following])
    shards = [following[each[0].rank].open(newest.save, shard) for shard, each in newest.sources.items()]
    assert require_whole(read_tree(shards)) == 2
    close(following)


@pytest.mark.parametrize("kind", KINDS)
def test_a_commit_without_the_shard_of_a_rank_publishes_nothing(kind: str, place: Path) -> None:
    tiers = group_of(kind, place, 2)
    record = tiers[0].put(sealed(name_at(1), 0, 2))
    other = sealed(name_at(1), 1, 2).record
    committing = tiers[0] if tiers[0].is_shared else tiers[1]
    with pytest.raises(CorruptCheckpointError, match="the shard of rank 1"):
        committing.commit(Manifest(name_at(1), "run", 2, (record, other)))
    assert restore(tiers[0]) is None
    close(tiers)


@pytest.mark.parametrize("kind", ["shared", "file", "object"])
def test_a_group_that_was_replaced_publishes_nothing(kind: str, place: Path) -> None:
    (old,) = group_of(kind, place, 1)
    name = name_at(1, epoch=1, round_number=1)
    record = old.put(sealed(name))
    new = tier_of(kind, place)
    new.prepare(TierContext("run", 1, 2, 0, 1))
    with pytest.raises((FencedError, CorruptCheckpointError)):
        old.commit(Manifest(name, "run", 1, (record,)))
    with pytest.raises(FencedError, match=r"was replaced by run 'run'.*round 2"):
        old.prepare(TierContext("run", 1, 1, 0, 1))
    assert new.inventory() == []
    close([old, new])


@pytest.mark.parametrize("kind", ["memory", "private", "shared"])
def test_two_runs_do_not_share_a_folder(kind: str, place: Path) -> None:
    (mine,) = group_of(kind, place, 1)
    theirs = tier_of(kind, place)
    epoch = theirs.known_epoch("other")
    assert epoch == 2
    with pytest.raises(OwnedError, match=r"belongs to run 'run'.*give this run a folder of its own"):
        theirs.prepare(TierContext("other", epoch, 1, 0, 1))
    mine.close()
    theirs.prepare(TierContext("other", epoch, 1, 0, 1))
    theirs.close()


def test_saving_into_memory_copies_nothing_and_allocates_nothing_after_the_first_saves(place: Path) -> None:
    tier = MemoryTier(place)
    tier.prepare(context_of(tier))
    inodes = set()
    for step in range(1, 8):
        shard = sealed(name_at(step), take=tier.stage)
        assert shard.stage is not None
        assert shard.stage.slot.path is not None
        inode = shard.stage.slot.path.stat().st_ino
        record = tier.put(shard)
        path = place / name_at(step).folder_name / record.file
        assert path.stat().st_ino == inode  # the slot is the file
        tier.commit(Manifest(name_at(step), "run", 1, (record,)))
        tier.prune()
        inodes.add(inode)
        with tier.open(name_at(step), 0) as reader:
            reader.verify()
    assert len(inodes) == 2
    tier.close()


def test_each_rank_takes_its_own_slot_back(place: Path) -> None:
    tiers = group_of("memory", place, 2, keep=1)
    for step in range(1, 6):
        save(tiers, name_at(step))
    files = {path.stat().st_ino for path in place.rglob("*.shard")}
    slots = {path.stat().st_ino for path in place.glob(".tmp-*")}
    assert (len(files), len(slots)) == (2, 2)
    assert [entry.name.step for entry in tiers[0].inventory()] == [5]
    close(tiers)


def test_replicas_count_like_shards_that_were_put_here_and_their_memory_is_used_again(place: Path) -> None:
    hosts = [MemoryTier(place / host) for host in ("a", "b")]
    for rank, host in enumerate(hosts):
        host.prepare(TierContext("run", 1, 1, rank, 2))
    shelf: ReplicaShelf = hosts[1].shelf
    slots = set()
    for step in (1, 2, 3):
        records = [host.put(sealed(name_at(step), rank, 2, host.stage)) for rank, host in enumerate(hosts)]
        (object_id,) = hosts[0].shelf.ids()[-1:]
        data = hosts[0].shelf.source(object_id)
        assert data is not None
        destination = shelf.destination(object_id, len(data))
        assert destination is not None
        memoryview(destination)[:] = data
        shelf.received(object_id, "its digest")
        assert shelf.digest(object_id) == "its digest"
        for host in hosts:
            host.commit(Manifest(name_at(step), "run", 2, tuple(records)))
        for host in hosts:
            host.prune()
        replica = place / "b" / name_at(step).folder_name / records[0].file
        slots.add(replica.stat().st_ino)
        assert [entry.ranks for entry in hosts[1].inventory()] == [(0, 1)]
        assert [entry.ranks for entry in hosts[0].inventory()] == [(0,)]
        assert len(shelf.ids()) == 2
    assert len(slots) == 2
    assert restore(hosts[1]) == 3
    close([*hosts])


def test_a_replica_that_is_damaged_or_unwanted_is_not_taken(place: Path) -> None:
    tier = MemoryTier(place)
    tier.prepare(context_of(tier))
    destination = tier.shelf.destination(f"{name_at(1).folder_name}/shard-00000-of-00001.shard", 5000)
    assert destination is not None
    destination[:] = bytes(5000)
    with pytest.raises(CorruptCheckpointError):
        tier.shelf.received(f"{name_at(1).folder_name}/shard-00000-of-00001.shard", "digest")
    tier.shelf.abandon(f"{name_at(1).folder_name}/shard-00000-of-00001.shard")
    for wrong in ("", "step-000000001.e1.r1.g1", "../../etc/passwd", "step-000000001.e1.r1.g1/../x"):
        with pytest.raises(ValueError, match="is no "):
            tier.shelf.destination(wrong, 10)
    assert tier.inventory() == []
    tier.close()


def test_shards_of_several_hosts_and_tiers_are_one_checkpoint(place: Path) -> None:
    """Two hosts with private folders; one of them is replaced, and its shard comes from the shared disk."""
    hosts = [MemoryTier(place / "a"), MemoryTier(place / "b")]
    disk = DiskTier(place / "disk")
    name = name_at(5)
    disk.prepare(TierContext("run", 1, 1, 0, 2))
    for rank, host in enumerate(hosts):
        host.prepare(TierContext("run", 1, 1, rank, 2))
        disk.put(sealed(name, rank, 2))
    manifest = Manifest(name, "run", 2, tuple(host.put(sealed(name, r, 2)) for r, host in enumerate(hosts)))
    for tier in (*hosts, disk):
        tier.commit(manifest)
    hosts[1].close()
    hosts[1] = MemoryTier(place / "new")
    reachable = [{"memory": host, "disk": disk} for host in hosts]
    inventories = [{name: tier.inventory() for name, tier in tiers.items()} for tiers in reachable]
    (chosen,) = restorable(inventories)
    best = [
        min(sources, key=lambda source: ["memory", "disk"].index(source.place)) for sources in chosen.sources.values()
    ]
    assert [source.place for source in best] == ["memory", "disk"]
    shards = [reachable[each.rank][each.place].open(chosen.save, shard) for shard, each in enumerate(best)]
    assert require_whole(read_tree(shards)) == 5
    close([*hosts, disk])


@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_that_cannot_be_read_is_named(kind: str, place: Path) -> None:
    tiers = group_of(kind, place, 1)
    save(tiers, name_at(1))
    with pytest.raises(CorruptCheckpointError, match="rank 1"):
        tiers[0].open(name_at(1), 1)
    with pytest.raises(CorruptCheckpointError, match="rank 0 is not in"):
        tiers[0].open(name_at(9), 0)
    close(tiers)


def test_a_durable_shard_that_was_changed_is_found_when_it_is_opened_or_read(place: Path) -> None:
    (tier,) = group_of("file", place, 1)
    save([tier], name_at(1))
    (path,) = place.rglob("*.shard")
    data = path.read_bytes()
    path.write_bytes(data[:100] + b"?" + data[101:])
    with pytest.raises(CorruptCheckpointError, match="header is damaged"):
        tier.open(name_at(1), 0)
    path.write_bytes(data[:-1] + b"?")
    with tier.open(name_at(1), 0) as shard, pytest.raises(CorruptCheckpointError, match="checksum"):
        shard.verify()
    path.write_bytes(data[:-1])
    (entry,) = tier.inventory()
    assert (entry.ranks, entry.is_committed) == ((), True)
    assert f"the shard of rank 0, has {len(data) - 1} bytes of {len(data)}: it was cut" in (entry.damage or "")
    (path.parent / "manifest.json").write_bytes(b"{}")
    (entry,) = tier.inventory()
    assert not entry.is_committed
    assert "the manifest is damaged" in (entry.damage or "")


def test_what_is_removed_from_durable_storage_loses_its_manifest_first(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tier,) = group_of("file", place, 1, keep=1)
    save([tier], name_at(1))
    remove = LocalFileSystem.rm

    def fails_on_folders(files: LocalFileSystem, path: str, recursive: bool = False) -> None:
        if recursive:
            raise PermissionError("may not remove folders")
        remove(files, path)

    monkeypatch.setattr(LocalFileSystem, "rm", fails_on_folders)
    with pytest.raises(CheckpointError, match=rf"remove a checkpoint at file://{place}: PermissionError: may not"):
        save([tier], name_at(2))
    assert [entry.name.step for entry in tier.inventory()] == [2]
    assert (place / name_at(1).folder_name).exists()


def test_a_download_leaves_nothing_behind(place: Path, tmp_path: Path) -> None:
    tier = DurableTier(f"memory://{uuid.uuid4()}", download_folder=tmp_path)
    tier.prepare(context_of(tier))
    save([tier], name_at(1))
    with tier.open(name_at(1), 0) as shard:
        assert [*tmp_path.iterdir()] == []
        shard.verify()
    assert not place.exists()


def test_no_secret_of_a_url_is_shown() -> None:
    assert without_credentials("s3://key:secret@bucket/a?token=t#f") == "s3://bucket/a"
    assert without_credentials("/plain/folder") == "/plain/folder"
    with pytest.raises((ValueError, CheckpointError)) as raised:
        DurableTier("nosuch://key:sec-ret@bucket/run?token=to-ken")
    assert "nosuch://bucket/run" in str(raised.value)
    assert "sec-ret" not in str(raised.value)
    assert "to-ken" not in str(raised.value)
    with pytest.raises(ValueError, match="is empty"):
        DurableTier("")


def test_storage_that_fails_is_an_error_that_names_the_url(place: Path) -> None:
    place.mkdir()
    (place / "file").write_bytes(b"")
    tier = DurableTier(f"file://{place}/file")
    with pytest.raises(CheckpointError, match=f"could not read from the storage at file://{place}/file: NotADir"):
        tier.prepare(TierContext("run", 1, 1, 0, 1))
