"""Tiers on real folders, and durable ones in memory and in S3: what is put is found again, by whoever can reach it."""

from __future__ import annotations

import concurrent.futures
import faulthandler
import os
import re
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
import torch
from fsspec import AbstractFileSystem
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from tests.process.command_checkpoints import add_checkpoint
from tests.process.s3_server import NEEDS_S3, bucket
from tests.process.small_tmpfs import small_tmpfs
from tests.process.tier_saves import context_of, hidden_in, name_at, require_whole, restore, save, sealed
from torchelastic.checkpoint.engine import durable_copies
from torchelastic.checkpoint.engine.group_folders import GroupFolders
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError, FencedError
from torchelastic.checkpoint.policy import KeepLast
from torchelastic.checkpoint.replicas.receive import Destination
from torchelastic.checkpoint.replicas.replica_client import Transferred
from torchelastic.checkpoint.shards import read_tree
from torchelastic.checkpoint.store import (
    MANIFEST_NAME,
    DiskTier,
    DurableTier,
    Manifest,
    MemoryTier,
    Tier,
    TierContext,
    TierEntry,
    list_checkpoints,
    reading,
)
from torchelastic.checkpoint.store.kinds import Kind
from torchelastic.checkpoint.store.restore_plan import Candidate, ShardSource, candidates
from torchelastic.checkpoint.store.save_id import ShardId

KINDS = ["memory", "private", "shared", "file", "object", pytest.param("s3", marks=NEEDS_S3)]


def restorable(inventories: Sequence[Mapping[str, Sequence[TierEntry]]]) -> list[Candidate]:
    held = [[replace(entry, place=tier) for tier, each in mine.items() for entry in each] for mine in inventories]
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
    if kind == "s3":
        store, options = bucket()
        return DurableTier(f"{store}/{place.parent.name}/run", KeepLast(keep), storage_options=options)
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


def test_of_a_shard_in_durable_storage_only_that_is_downloaded_which_is_read(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []

    def cat_file(files: LocalFileSystem, path: str, *which: int | None, **more: Any) -> bytes:
        sent.append(len(content := AbstractFileSystem.cat_file(files, path, *which, **more)))
        return bytes(content)

    tier = tier_of("file", place)
    tier.prepare(TierContext("run", 1, 1, 0, 1))
    state = {"first": torch.arange(100.0), "long": torch.arange(10**6), "last": torch.ones(3)}
    shard = sealed(name_at(1), state=state)
    tier.commit(Manifest(name_at(1), "run", 1, (tier.put(shard),)))
    monkeypatch.setattr(LocalFileSystem, "cat_file", cat_file)
    with tier.open(name_at(1), 0) as reader:
        assert torch.equal(reader.read_one("last"), state["last"])
        assert sum(sent) < 10**5
        assert torch.equal(reader.read_one("long"), state["long"])
    assert sum(sent) > 8 * 10**6
    tier.close()


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
    (older,) = (place / "b" / name_at(2).folder_name).glob("*.shard")  # no manifest tells what it has to be
    older.rename(older.with_name("shard-00000-of-00002.shard"))
    with pytest.raises(CorruptCheckpointError, match="holds another shard than its name says, that of rank 1"):
        following[1].open(name_at(2), 0)
    close(following)


def test_a_rank_leaves_to_another_one_of_its_host_the_shards_whose_memory_that_uses_again(place: Path) -> None:
    first, second = group_of("memory", place, 2, keep=1)
    for step in (1, 2):
        name = name_at(step)
        records = tuple(tier.put(sealed(name, rank, 2)) for rank, tier in enumerate((first, second)))
        for tier in (first, second):
            tier.commit(Manifest(name, "run", 2, records))
    first.prune()
    assert [path.name for path in (place / name_at(1).folder_name).glob("*.shard")] == ["shard-00001-of-00002.shard"]
    second.prune()
    assert not (place / name_at(1).folder_name).exists()
    assert restore(first) == 2
    close([first, second])


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


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_that_was_replaced_publishes_nothing(kind: str, place: Path) -> None:
    (old,) = group_of(kind, place, 1)
    name = name_at(1, epoch=1, round_number=1)
    record = old.put(sealed(name))
    new = tier_of(kind, place)
    has_name = kind in ("memory", "private")  # the shard; then only another job fences this one off
    new.prepare(TierContext("run", 2, 1, 0, 1) if has_name else TierContext("run", 1, 2, 0, 1))
    with pytest.raises(FencedError if has_name else (FencedError, CorruptCheckpointError)):
        old.commit(Manifest(name, "run", 1, (record,)))
    with pytest.raises(FencedError, match=rf"was replaced by run 'run'.*{'epoch' if has_name else 'round'} 2"):
        old.prepare(TierContext("run", 1, 1, 0, 1))
    assert [entry for entry in new.inventory() if entry.is_committed] == []
    close([old, new])


def test_a_replica_that_is_damaged_or_unwanted_is_not_taken(place: Path) -> None:
    tier = MemoryTier(place)
    tier.prepare(context_of(tier))
    destination = tier.shelf.destination(f"{name_at(1).folder_name}/shard-00000-of-00001.shard", 5000)
    assert destination is not None
    destination[:] = bytes(5000)
    with pytest.raises(CorruptCheckpointError):
        tier.shelf.received(f"{name_at(1).folder_name}/shard-00000-of-00001.shard", "digest")
    tier.shelf.abort(f"{name_at(1).folder_name}/shard-00000-of-00001.shard")
    for wrong in ("", "step-000000001.e1.r1.g1", "../../etc/passwd", "step-000000001.e1.r1.g1/../x"):
        with pytest.raises(ValueError, match="is no "):
            tier.shelf.destination(wrong, 10)
    assert tier.inventory() == []
    tier.close()


def test_a_replica_that_was_cut_is_taken_once_more(place: Path) -> None:
    tier, shard = MemoryTier(place), str(ShardId(name_at(1), 0, 1))
    tier.prepare(context_of(tier))
    content = sealed(name_at(1)).data
    for _ in range(2):
        tier.shelf.destination(shard, content.nbytes)[:] = content
        tier.shelf.received(shard, "digest")
        assert tier.shelf.digest(shard) == "digest"
        assert tier.has_whole(ShardId(name_at(1), 0, 1))
        os.truncate(tier.shelf.path_of(shard), 100)
        assert tier.shelf.digest(shard) is None, "who sends it again is not told that it is here"
    tier.close()


def test_a_holder_that_gives_another_shard_is_passed_over(place: Path) -> None:
    """Both are whole: a file that has got another name is served under that."""
    tier, wanted = MemoryTier(place), ShardId(name_at(5), 0, 2)

    def pull(_: ShardId, source: ShardSource, destination: Destination) -> Transferred:
        given = sealed(name_at(5), 1 - source.rank, 2).data
        memoryview(destination(given.nbytes))[:] = given
        return Transferred(given.nbytes, "", given.nbytes)

    GroupFolders(tier, 0, [], [], [], pull).fetch(wanted, [ShardSource(0), ShardSource(1)])
    with tier.open(wanted.name, 0) as shard:
        assert shard.header.meta["rank"] == 0
    close([tier])


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


@pytest.mark.parametrize("is_given", [True, False])
def test_a_folder_that_is_too_small_for_a_download_is_named_with_the_remedy(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_given: bool
) -> None:
    (saved,) = group_of("file", place, 1)
    save([saved], name_at(1))
    with small_tmpfs(tmp_path / "small", 4096) as folder:
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        tier = DurableTier(saved.where, download_folder=folder if is_given else None)
        with (
            pytest.raises(CheckpointError, match=r"(?s)download_folder=.*TMPDIR") as raised,
            tier.open(name_at(1), 0) as shard,
        ):
            shard.verify()
    assert str(folder) in str(raised.value)
    assert re.search(r"No space left on device after .* of .*B: give DurableTier", str(raised.value))


@NEEDS_S3
def test_no_bucket_is_made_of_a_misspelt_name() -> None:
    store, options = bucket()
    tier = DurableTier(f"{store}s/run", storage_options=options)
    with pytest.raises(CheckpointError, match=f"write the fence at {store}s/run: FileNotFoundError: .*bucket"):
        tier.prepare(context_of(tier))
    assert "buckets" not in fsspec.filesystem("s3", **options).ls("")


def test_storage_that_is_silent_when_a_job_begins_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()

    class Silent(DurableTier):
        def require_own(self) -> None:
            assert answers.wait(30)

    monkeypatch.setattr(durable_copies, "ANSWER_S", 0.1)
    # as on Python 3.10: the error of a future is not the builtin one
    monkeypatch.setattr(concurrent.futures._base, "TimeoutError", type("TimeoutError", (Exception,), {}))
    copies = durable_copies.DurableCopies(Silent(f"file://{tmp_path}"), Kind.LOCAL)
    assert copies.known_epoch("run") > 1_000_000_000
    assert "is silent for 0.1 s" in caplog.text
    answers.set()


class Far(AsyncFileSystemWrapper):  # type: ignore[misc]
    """Files of this host behind a thread of fsspec's own, as all storage that is reached over a network."""

    protocol = "far"

    def __init__(self, **options: Any) -> None:
        super().__init__(LocalFileSystem(auto_mkdir=True), asynchronous=False, **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("far://")

    def open(self, path: str, *rest: Any, **options: Any) -> Any:
        self.exists(path)  # on that thread
        return self.sync_fs.open(path, *rest, **options)


@pytest.mark.parametrize("is_used_before", [False, True])
def test_a_durable_tier_that_was_made_before_a_fork_works_in_the_child_and_in_the_parent(
    place: Path, is_used_before: bool
) -> None:
    fsspec.register_implementation("far", Far, clobber=True)
    tier, steps = DurableTier(f"far://{place}", KeepLast(9)), [1, 2, 3] if is_used_before else [2, 3]
    if is_used_before:
        save([tier], name_at(1))
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            faulthandler.dump_traceback_later(30, exit=True)
            save([tier], name_at(2))
            with tier.open(name_at(2), 0) as shard:
                shard.verify()
            status = 7
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    save([tier], name_at(3))
    assert [entry.name.step for entry in tier.inventory()] == steps[::-1]


def test_no_secret_of_a_url_is_shown() -> None:
    with pytest.raises((ValueError, CheckpointError)) as raised:
        DurableTier("nosuch://key:sec-ret@bucket/run?token=to-ken")
    assert "nosuch://bucket/run" in str(raised.value)
    assert "sec-ret" not in str(raised.value)
    assert "to-ken" not in str(raised.value)
    with pytest.raises(ValueError, match="is empty"):
        DurableTier("")


def test_a_checkpoint_that_is_published_while_somebody_looks_at_it_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = add_checkpoint(tmp_path, 1) / MANIFEST_NAME
    content, look = manifest.read_bytes(), reading.sizes_in
    manifest.unlink()

    def after_it_was_published(folder: Path) -> dict[str, int | None]:
        manifest.write_bytes(content)
        return look(folder)

    monkeypatch.setattr(reading, "sizes_in", after_it_was_published)
    for whole in (False, True):
        manifest.unlink(missing_ok=True)
        (info,) = list_checkpoints(tmp_path, whole=whole)
        assert (info.damage, info.manifest is None) == (None, False)
