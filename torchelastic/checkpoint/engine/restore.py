"""How a rank gets the shards that it wants: from another rank, checked, kept or not; what is damaged is passed over.

Another copy of a damaged shard is tried, then the next older checkpoint. What is planned is in `store/restore_plan.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.format.disk import HIDDEN
from torchelastic.checkpoint.format.partial import Fetch, PartialCopy
from torchelastic.checkpoint.format.shard_reader import ShardReader
from torchelastic.checkpoint.format.stage import tensors_of
from torchelastic.checkpoint.replicas.receive import Destination
from torchelastic.checkpoint.replicas.replica_client import Transferred, pull_into
from torchelastic.checkpoint.replicas.replication_errors import ReplicationError
from torchelastic.checkpoint.replicas.topology import root_id
from torchelastic.checkpoint.store.folder_tier import FolderTier
from torchelastic.checkpoint.store.manifest import decode_manifest, encode_manifest
from torchelastic.checkpoint.store.memory_tier import MemoryTier
from torchelastic.checkpoint.store.owner import locked
from torchelastic.checkpoint.store.reading import require_shard, stated
from torchelastic.checkpoint.store.restore_plan import Candidate, ShardSource
from torchelastic.checkpoint.store.save_id import SaveId, ShardId, shard_file_name
from torchelastic.metrics import publish_metric

log = logging.getLogger(__name__)

#: Fetches a shard from where it is; see `ReplicaClient.pull`.
Pull = Callable[[ShardId, ShardSource, Destination], Transferred]

Got = TypeVar("Got")
Key = TypeVar("Key")

#: For how long another process of this host is waited for that fetches the same shard.
FETCHING_ELSEWHERE_S = 600.0
#: How many damaged checkpoints an error names.
_SHOWN = 5


def newest_readable(
    found: Iterable[Candidate],
    read: Callable[[Candidate], Got],
    report: Callable[[str], None],
    faults: dict[SaveId, str],
) -> tuple[Candidate, Got] | None:
    """The first checkpoint that can be read, and what `read` returned for it; None if there is none.

    Args:
        found: newest first; what was never completed is passed over, with a text.
        read: reads one. If several ranks read together, it raises on all of them alike.
        report: is called with a text for each that is of no use, and how many steps that costs; on all ranks alike.
        faults: what is known to be of no use, and why; what proves so is added.
    """
    skipped: list[SaveId] = []
    for candidate in found:
        if candidate.save in faults:
            continue
        fault = candidate.fault
        if candidate.is_complete:
            try:
                got = read(candidate)
            except CorruptCheckpointError as error:
                fault = f"{candidate.save} is damaged: {error}"
            else:
                if skipped:
                    report(_price(skipped[0], candidate.save))
                for remark in candidate.remarks:
                    report(remark)
                return candidate, got
        elif not candidate.is_committed and not fault:
            skipped.append(candidate.save)  # no fault: the first save of a run may have been stopped here
            report(f"{candidate.save} has no manifest: it counts as never completed; looking for an older one")
        if fault:
            skipped.append(candidate.save)
            faults[candidate.save] = fault
            report(f"{fault}; looking for an older one")
    return None


def _price(newest: SaveId, chosen: SaveId) -> str:
    steps = max(0, newest.step - chosen.step)  # none after a rollback
    return f"{chosen} is restored, since {newest} cannot be put together: {steps} step(s) are trained again"


def because(faults: Mapping[SaveId, str]) -> str:
    """Why there is no checkpoint to restore, newest first; of a few, for people."""
    more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    return "; ".join(list(faults.values())[:_SHOWN]) + more


def first_good_copy(shard: object, sources: Sequence[ShardSource], take: Callable[[ShardSource], Got]) -> Got:
    """What `take` returns for the first source that has a good copy; the others are named in warnings.

    Args:
        shard: for people.
        sources: best first.
        take: reads and checks one. A `CorruptCheckpointError` or `ReplicationError` means: try the next; anything else
            would be no better there.

    Raises:
        CorruptCheckpointError: no source has a good copy; tells why of each.
    """
    failures = []
    for source in sources:
        try:
            return take(source)
        except (CorruptCheckpointError, ReplicationError) as error:
            failures.append(f"{source}: {error}")
            log.warning("%s is of no use at %s: %s", shard, source, error)
    raise CorruptCheckpointError(f"no good copy of {shard} is left ({'; '.join(failures) or 'nobody holds one'})")


def read_good_copies(
    sources: Mapping[Key, list[ShardSource]],
    open_at: Callable[[Key, ShardSource], ShardReader],
    take: Callable[[Mapping[Key, ShardReader]], Got],
    skip_copy: Callable[[Key, list[ShardSource], CheckpointError], tuple[str, bool]],
) -> Got:
    """What `take` returns for several shards that it reads together, each from the first good copy of it.

    Args:
        sources: of each shard, best first; where they were read when this returns, that is the first.
        open_at: opens a copy.
        take: reads; if it raises because a reader did, that copy is passed over, and all is read again.
        skip_copy: removes the first source, and others that are no better; returns why, and whether that is damage.

    Raises:
        CorruptCheckpointError: a shard has no good copy, and all that were passed over are damaged.
        CheckpointError: it has none that can be read now; or `take` raised it and no reader did.
    """
    faults: list[tuple[str, bool]] = []

    def opened(shard: Key, stack: ExitStack) -> ShardReader:
        while sources[shard]:
            try:
                return stack.enter_context(open_at(shard, sources[shard][0]))
            except CheckpointError as error:
                faults.append(skip_copy(shard, sources[shard], error))
        kind = CorruptCheckpointError if all(is_damage for _, is_damage in faults) else CheckpointError
        raise kind("; ".join(text for text, _ in faults) or f"nobody has the shard {shard}")

    while True:
        with ExitStack() as stack:
            readers = {shard: opened(shard, stack) for shard in sources}
            try:
                return take(readers)
            except CheckpointError:
                failures = {shard: reader.failure for shard, reader in readers.items() if reader.failure is not None}
                if not failures:
                    raise
        faults += [skip_copy(shard, sources[shard], failure) for shard, failure in failures.items()]


def shards_of(candidate: Candidate) -> list[ShardId]:
    """All that a save consists of, by the ranks that wrote them."""
    return [ShardId(candidate.save, rank, candidate.world_size) for rank in range(candidate.world_size)]


# --- bringing shards to a rank ----------------------------------------------------------------------------------------


def fetch(
    tier: MemoryTier,
    shard: ShardId,
    sources: Sequence[ShardSource],
    pull: Pull,
    *,
    instead_of: CheckpointError | None = None,
) -> int:
    """Fetches a shard into a tier of this host, where it counts like one that was put there. From any thread.

    One process of a host fetches it; the others find it there. The sources are tried until a copy is good: a holder's
    disk may have gone bad since it verified its copy.

    Args:
        tier: where it goes.
        shard: which.
        sources: where it may be, best first.
        pull: asks one.
        instead_of: why what lay there under its name is of no use; it is replaced. None: it is as good, if it is whole.

    Returns:
        How many bytes came; 0 if it was there by now.

    Raises:
        CorruptCheckpointError: nobody gives it, or all copies are damaged.
        CheckpointError: there is no room for it, or it cannot replace what lay there.
    """

    def take(source: ShardSource) -> int:
        return pull_into(tier.shelf.fetching(), str(shard), partial(pull, shard, source), check)

    def check(view: memoryview) -> None:
        where = f"the copy of {shard}"
        header, _ = tensors_of(torch.frombuffer(view, dtype=torch.uint8), where)
        require_shard(shard, header.meta, where)
        tier.remove_damaged(shard)  # nobody would have asked if what lies there were of use

    root, disk = tier.shelf.root, tier.shelf.disk
    lock = root / f"{HIDDEN}fetch-{shard.name}.{shard_file_name(shard.rank, shard.world_size)}"
    try:
        disk.make_folder(root)  # somebody may have removed it, with all that was in it
        with locked(lock, FETCHING_ELSEWHERE_S):
            is_wanted = instead_of is not None or not tier.has_whole(shard)
            came = first_good_copy(shard, sources, take) if is_wanted else 0
            disk.remove(lock)  # who waits for it has it open
            return came
    except CheckpointError as error:
        if instead_of is None:
            raise
        kind = CorruptCheckpointError if isinstance(error, CorruptCheckpointError) else CheckpointError
        raise kind(f"{instead_of}; and on other hosts: {error}") from error


def folder_id(tier: FolderTier, rank: int) -> str:
    """Equal for the ranks that share the folder of a tier that each host has for itself."""
    try:
        return root_id(tier.root)
    except OSError:  # nobody could prepare it
        return f"rank {rank}"


def verify(tier: MemoryTier, shards: Iterable[ShardId]) -> list[int]:
    """Compares shards that lie in a tier with their checksums; what is damaged is removed, with a warning.

    What cannot be read now stays: no other copy may be left, and somebody may mend that.

    Args:
        tier: where they are.
        shards: which, all of one save.

    Returns:
        The ranks of the good ones.
    """
    good = []
    for shard in shards:
        try:
            with tier.open(shard.name, shard.rank) as opened:
                opened.verify()
                good.append(shard.rank)
        except CorruptCheckpointError as error:
            log.warning("%s is of no use and is removed: %s", shard, error)
            tier.remove_damaged(shard)
        except CheckpointError as error:
            log.warning("%s cannot be read: %s", shard, error)
    return good


def open_remote(shard: ShardId, fetch: Fetch) -> ShardReader:
    """Opens a shard of another rank; the parts that are read are fetched into memory, which the reader frees.

    Args:
        shard: which.
        fetch: asks its holder; see `ReplicaClient.read`.

    Raises:
        CheckpointError: what `fetch` raises, or it is no shard, or another one.
    """
    where = f"the copy of {shard}"
    copy = PartialCopy(fetch)
    return stated(ShardReader(copy.path, where, copy), shard, where)


def give_manifest(
    tier: FolderTier, save: SaveId, rank: int, run_on_all: Callable[[Callable[[], Any]], list[Any]]
) -> bool:
    """Has every folder of a group get the manifest of a checkpoint, if one of them has it. Collective.

    Where it cannot be written, a warning says so: what lies there counts for less, and can still be read.

    Args:
        tier: of this rank; each host has its own.
        save: which checkpoint; it was restored.
        rank: of this process.
        run_on_all: has each rank do something, and returns what each of them returned.

    Returns:
        Whether some folder has it.
    """

    def look() -> list[Any]:
        return [folder_id(tier, rank), tier.manifest_of(save) is not None]

    def report() -> str | None:
        manifest = tier.manifest_of(save) if rank == giver else None
        return None if manifest is None else encode_manifest(manifest).decode()

    looked = run_on_all(look)
    folders, has = [folder for folder, _ in looked], [has_it for _, has_it in looked]
    if not any(has) and rank == 0:
        log.warning("%s has no manifest on any host: it can be read, and counts for nothing when there is more", save)
    if all(has) or not any(has):
        return any(has)
    giver = has.index(True)
    told = run_on_all(report)[giver]
    if told is not None and not has[rank] and folders.index(folders[rank]) == rank:
        try:
            tier.adopt(decode_manifest(told.encode()))
        except CheckpointError as error:
            log.warning("%s has no manifest on this host, and gets none: %s", save, error)
    return True


def make_copies(
    tier: MemoryTier,
    copies: Iterable[tuple[ShardId, Sequence[ShardSource]]],
    pull: Pull,
    is_wanted: Callable[[], bool] = lambda: True,
    *,
    instead_of: Mapping[ShardId, CheckpointError] = MappingProxyType({}),
) -> bool:
    """Makes copies again that were lost; one that cannot be made costs a warning, and the next save makes its own.

    Args:
        tier: where they go.
        copies: what this rank fetches, and where it is, best first.
        pull: asks one of these.
        is_wanted: whether the checkpoint still is the one to keep.
        instead_of: of these, why what lies here is of no use though it is whole.

    Returns:
        Whether they are there, or not wanted any more.
    """
    failed = False
    for shard, sources in copies:
        if not is_wanted():
            break
        try:
            came = fetch(tier, shard, sources, pull, instead_of=instead_of.get(shard))
        except Exception as error:  # noqa: BLE001 - training goes on
            if not is_wanted():
                break
            failed = True
            publish_metric("torchelastic", "checkpoint.replication.failures", 1)
            log.warning("there is no new copy of %s: %s", shard, str(error) or type(error).__name__)
        else:
            publish_metric("torchelastic", "checkpoint.replication.remade.bytes", came)
    return not failed
