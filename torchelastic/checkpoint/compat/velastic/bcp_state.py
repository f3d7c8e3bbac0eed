"""BCPState: save and resume model, optimizer, random numbers and a script's own values, on all ranks together."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from torchelastic.checkpoint.compat.velastic import random_numbers
from torchelastic.checkpoint.compat.velastic.optimizer_trees import differing
from torchelastic.checkpoint.compat.velastic.shard import Loaded, ShardMaker, read
from torchelastic.checkpoint.compat.velastic.training_objects import OptimizerOrSeveral, TrainingObjects, state_dict_of
from torchelastic.checkpoint.engine.read_rules import AllOnEachRank
from torchelastic.checkpoint.engine.tiered_manager import TieredCheckpointManager
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.format.disk import REAL_DISK, Disk
from torchelastic.checkpoint.format.header import Header
from torchelastic.checkpoint.format.shard_reader import ShardReader
from torchelastic.checkpoint.policy import KeepLast
from torchelastic.checkpoint.replicas.topology import address_among, network_id
from torchelastic.checkpoint.store.disk_tier import DiskTier
from torchelastic.checkpoint.store.kinds import Kind
from torchelastic.checkpoint.store.manifest import MANIFEST_NAME
from torchelastic.checkpoint.store.reading import names_in, open_checkpoint
from torchelastic.checkpoint.store.save_id import SaveId
from torchelastic.checkpoint.store.tier import Tier
from torchelastic.group.peers import Alone, Peers
from torchelastic.group.rank_group import ProgramPeers, RankGroup
from torchelastic.inventory.generators import draw_from
from torchelastic.processes.background import in_background

log = logging.getLogger(__name__)


class BCPState:
    """What a training job needs to go on after it was stopped: saved and resumed by all ranks together.

    All ranks call `save`, `load`, `maybe_resume_from_ckpt` and `wait`, in the same order, from the thread that trains;
    without a process group a process is rank 0 of 1. Where one rank fails, all raise; a rank that does not come is
    named after `timeout_s`. A checkpoint appears by one rename when all of it is on the disk, so a job that is killed
    while it saves resumes from the checkpoint before.

    Args:
        model: plain, in DDP, or sharded by `fully_shard` (FSDP2); compiled or not.
        optimizer: one, several (a list or a dict), or None.
        framework: "ddp" (also for a plain model), "fsdp" or "fsdp2" (both: FSDP2).
        get_extra_fn: called by each save on each rank; returns a dict of plain values and tensors: counters, the data
            position, state dicts of a scheduler or scaler. Or None, for an empty one.
        default_ckpt_path: the folder of checkpoints where a method is given none; all ranks must see the same. Default:
            `.velastic/checkpoint`. With an `IterManager`, give `manager.velastic_dir / "checkpoint"`.
        tiers: save here instead of in a folder: `MemoryTier`, `DiskTier`, `DurableTier`, freshest and fastest first,
            each with a policy of what it keeps. All ranks give the same.
        replicas: on how many other hosts the `MemoryTier` of each rank is copied.
        host: names this host for that: ranks that give the same name are lost together. Default: the host name.
        keep: how many complete checkpoints stay in a folder, 1 or more. With 2, one that a disk damages has a
            predecessor.
        timeout_s: for how long a rank that does not come is waited for.
        process_group: whose ranks save together; None: the default one.
        run_id: names the run. If given, a folder in which another run is alive is refused (`OwnedError`); if not, a job
            that saves there takes the folder over, and the one before gets a `FencedError` at its next save.
        allow_pickles: let the extra state hold any object, as a pickle, and read such. Only where nobody else can write
            into the folder.
        disk: what touches files.

    Raises:
        ValueError: an argument is wrong, or the model is not of that framework (FSDP1 is not supported).
    """

    DEFAULT_PATH = ".velastic/checkpoint"

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: OptimizerOrSeveral,
        framework: str = "ddp",
        get_extra_fn: Callable[[], Mapping[str, Any] | None] | None = None,
        default_ckpt_path: str | os.PathLike[str] | None = None,
        *,
        tiers: Sequence[Tier] | None = None,
        replicas: int = 0,
        host: str | None = None,
        keep: int = 2,
        timeout_s: float = 600.0,
        process_group: dist.ProcessGroup | None = None,
        run_id: str | None = None,
        allow_pickles: bool = False,
        disk: Disk = REAL_DISK,
    ) -> None:
        if keep < 1 or timeout_s <= 0:
            raise ValueError(f"keep={keep} and timeout_s={timeout_s}: give 1 or more, and more than 0 seconds")
        if tiers is None and replicas:
            raise ValueError(f"replicas={replicas} copies a MemoryTier: give one in tiers")
        if tiers is not None and default_ckpt_path is not None:
            raise ValueError("default_ckpt_path and tiers both say where to save: give one of them")
        if get_extra_fn is not None and not callable(get_extra_fn):
            raise ValueError(f"get_extra_fn is a {type(get_extra_fn).__name__}: give a function without arguments")
        self._objects = TrainingObjects(model, optimizer, framework)
        self._get_extra_fn = get_extra_fn
        self._default_path = Path(default_ckpt_path or self.DEFAULT_PATH)
        self._tiers, self._replicas, self._host, self._keep = tiers, replicas, host, keep
        self._timeout_s = timeout_s
        self._run_id = run_id
        self._allow_pickles = allow_pickles
        self._disk = disk
        self._ranks = RankGroup(process_group, timeout_s)
        self._source: dist.ProcessGroup | None = None
        self._group: Peers | None = None
        self._maker = ShardMaker(allow_pickles=allow_pickles)
        self._managers: dict[Path | None, TieredCheckpointManager] = {}
        self._running: list[Future[None]] = []
        self._failure: BaseException | None = None
        self._step = 0
        if tiers is not None:
            self._place(None)  # refuses what cannot be

    # --- saving -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What would be saved now: "model", "optimizer" (a list) and "extra_state". The tensors are the live ones."""
        return {**state_dict_of(self._objects.tree()), "extra_state": self._extra()}

    def save(self, ckpt_path: str | os.PathLike[str] | None = None, sync: bool = True) -> None:
        """Saves a checkpoint. Called on all ranks. What is saved are the values at the call.

        Args:
            ckpt_path: the folder of checkpoints.
            sync: return when it is published. Else return after the copy, and finish in the background: before the next
                save (in tiers behind the first, and behind the `MemoryTier`, it goes on), before `wait` returns, and
                before the interpreter ends. If it fails, that is logged, `wait` raises it, and the next save is tried.

        Raises:
            CheckpointError: it could not be saved (a full disk, a rank that failed); the checkpoint before stays.
            FencedError: another job has taken the folder over.
            TypeError, ValueError: something cannot be saved; names it. Nothing was written.
            OutOfStepError: a rank does not come; names it.
        """
        manager, _ = self._place(ckpt_path)
        call = f"save(ckpt_path={self._named(ckpt_path)!r}, sync={bool(sync)})"
        running = self._begin(call, manager, self._settle(everywhere=sync))
        if sync:
            self._ranks.run_on_all(f"{call}, publishing", lambda: self._ended(running))
            return
        self._running.append(running)
        # the interpreter does not end before it is published, nor rank 0, which may have the store, before the others
        in_background(manager.end_run, "checkpoint-end", is_waited_for=True)

    def wait(self) -> None:
        """Returns when the save in the background is published. Called on all ranks.

        Raises:
            CheckpointError: it failed, on whichever rank. What a tier's own library has raised is raised there as it
                is.
        """

        def settled() -> None:
            error = self._settle()
            self._failure = None
            if error is not None:
                raise error

        self._ranks.run_on_all("wait()", settled)

    def close(self) -> None:
        """Waits for this rank's part of a save, and gives memory and locks back. Not a collective; may be repeated."""
        self._settle()
        for manager in self._managers.values():
            manager.close()
        self._managers.clear()
        self._ranks.close()

    # --- resuming -----------------------------------------------------------------------------------------------------

    def maybe_resume_from_ckpt(self, ckpt_path: str | os.PathLike[str] | None = None) -> dict[str, Any] | None:
        """Goes on from the newest intact checkpoint, if there is one. Called on all ranks, which decide alike.

        Model, optimizer and random numbers are set; all was read and verified before, so a resume that fails has
        changed nothing. A damaged checkpoint is named in a warning, and the next older one is taken.

        With another number of ranks, rank r gets the extra state of rank r modulo the number that saved, and a rank
        that did not exist then draws from those of that one, and from its own number; a warning says so.

        Args:
            ckpt_path: the folder of checkpoints, or of one checkpoint.

        Returns:
            What `get_extra_fn` returned on this rank ({} if there was none); None if there is no checkpoint at all.

        Raises:
            CorruptCheckpointError: there are checkpoints, and none is intact; on all ranks.
            OwnedError: another run than `run_id` is alive there, and the first save would be refused: `load` begins
                with what another run saves.
            CheckpointError: it does not fit this model or these optimizers, or cannot be read; on all ranks.
            OutOfStepError: a rank does not come; names it.
        """
        _, path = self._place(ckpt_path)
        extra = self._resume(f"maybe_resume_from_ckpt({self._named(ckpt_path)!r})", ckpt_path, goes_on=True)
        if extra is None and self._ranks.rank == 0:
            log.info("no checkpoint in %s yet: starting afresh", path)
        return extra

    def load(self, ckpt_path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """The same where there must be a checkpoint. Raises besides: CheckpointError if there is none."""
        _, path = self._place(ckpt_path)
        extra = self._resume(f"load({self._named(ckpt_path)!r})", ckpt_path)
        if extra is None:
            raise CheckpointError(
                f"there is no checkpoint in {path}: give the ckpt_path that was saved to; maybe_resume_from_ckpt "
                "starts afresh where there is none"
            )
        return extra

    # --- how ----------------------------------------------------------------------------------------------------------

    def _place(self, ckpt_path: str | os.PathLike[str] | None) -> tuple[TieredCheckpointManager, str]:
        """Who saves to a folder, or to the tiers that were given; and where that is, alike on all ranks."""
        folder = None if ckpt_path is None and self._tiers is not None else Path(ckpt_path or self._default_path)
        if folder not in self._managers:
            tiers = self._tiers if folder is None else [DiskTier(folder, KeepLast(self._keep), disk=self._disk)]
            assert tiers is not None
            self._managers[folder] = TieredCheckpointManager(
                tiers,
                policy=None,
                replicas=self._replicas if folder is None else 0,
                host=self._host,
                run_id=self._run_id or "any",
                patience_s=self._timeout_s / 2,  # rank 0 is to give up before the others give up rank 0
                slot_wait_s=self._timeout_s,
                end_wait_s=2 * self._timeout_s,
                kind=Kind.TRAINING_STATE,
            )
        manager = self._managers[folder]
        return manager, ", ".join(tier.where for tier in manager.tiers) if folder is None else str(folder)

    def _named(self, ckpt_path: str | os.PathLike[str] | None) -> str:
        """The same for the name of a call, alike on all ranks, whose hosts may each have a folder of their own."""
        manager, path = self._place(ckpt_path)
        is_folder = ckpt_path is not None or self._tiers is None
        return path if is_folder else ", ".join(tier.name for tier in manager.tiers)

    def _peers(self) -> Peers:
        """The ranks, after a first call of all of them."""
        if self._group is None or self._source is not self._ranks.source:
            self._source = self._ranks.source
            if self._ranks.world_size == 1:
                self._group = Alone()
            else:
                networks = self._ranks.all_gather("meeting", network_id()) if self._replicas else [""]
                self._group = ProgramPeers(self._ranks, address_among(networks))
        return self._group

    def _extra(self) -> dict[str, Any]:
        if self._get_extra_fn is None:
            return {}
        extra = self._get_extra_fn()
        if extra is None:
            return {}
        if not isinstance(extra, Mapping):
            raise TypeError(f"get_extra_fn returned a {type(extra).__name__}: return a dict")
        return dict(extra)

    def _settle(self, *, everywhere: bool = True) -> BaseException | None:
        """Waits for this rank's part of the saves before; what failed in them and was not raised yet.

        Args:
            everywhere: also in tiers that work on a thread of their own, and hold up no other save.
        """
        for manager in self._managers.values() if not everywhere else ():
            if not manager.wait(2 * self._timeout_s, everywhere=False):
                raise CheckpointError(f"the save before is not done after {2 * self._timeout_s:g} s")
        for running in [one for one in self._running if everywhere or one.done()]:
            try:
                self._ended(running)
            except Exception as error:  # a place may raise whatever its library raises
                if not running.done():
                    raise
                self._failure = error
            self._running.remove(running)
        return self._failure

    def _ended(self, running: Future[None]) -> None:
        """Waits for a save. Raises: CheckpointError."""
        if not wait([running], 2 * self._timeout_s).done:
            raise CheckpointError(
                f"the save before is not done after {2 * self._timeout_s:g} s: the disk does not answer"
            )
        running.result()

    def _begin(self, call: str, manager: TieredCheckpointManager, before: BaseException | None) -> Future[None]:
        """Copies what this rank saves; nothing is published if a rank fails."""
        is_checked = self._ranks.world_size > 1 and not self._objects.is_sharded and not self._objects.is_kept_equal
        may_part = self._ranks.world_size > 1 and self._objects.is_sharded

        def prepare() -> tuple[int, str, str]:
            plain = self._objects.plain_digests() if may_part else {}
            return (
                self._step,
                self._objects.digest() if is_checked else "",
                xxhash.xxh3_64_hexdigest(repr(plain).encode()),
            )

        answers = self._ranks.run_on_all(call, prepare)
        odd = [number for number, (_, digest, _) in enumerate(answers) if digest != answers[0][1]]
        if odd:
            raise ValueError(
                f"framework='ddp', but model or optimizer of rank {odd[0]} differ from those of rank 0: wrap the "
                "model in DistributedDataParallel, or let each group of equal ranks have a process_group; nothing "
                "was saved"
            )
        if before is not None:
            warnings.warn(f"the save before failed on this rank: {before}", RuntimeWarning, stacklevel=3)
            self._failure = None
        are_apart = len({plain for _, _, plain in answers}) > 1
        apart = (
            differing(self._ranks.run_on_all(f"{call}, comparing", self._objects.plain_digests)) if are_apart else ()
        )
        lay_out = partial(self._lay_out, apart)
        peers, step = self._peers(), max(step for step, _, _ in answers) + 1
        manager.join(peers)
        copied: list[Future[None]] = []
        try:
            self._ranks.run_on_all(f"{call}, copying", lambda: copied.append(manager.save_shard(lay_out, step, peers)))
        except BaseException:
            wait(copied, 2 * self._timeout_s)  # a rank has notified the others that it takes no part
            raise
        self._step = step
        return copied[0]

    def _lay_out(self, apart: Collection[str], meta: Mapping[str, Any]) -> tuple[Header, Sequence[torch.Tensor]]:
        rank, world_size = self._ranks.rank, self._ranks.world_size
        own: dict[str, Any] = {"random": random_numbers.capture(), "extra": self._extra()}
        tree = self._objects.tree()
        if world_size > 1 and self._objects.has_own_buffers:
            own |= {name: tree["model"].pop(name) for name in ("others", "buffers")}
        elif world_size > 1:
            own["others"] = self._objects.extra_states(tree["model"]["others"])
        if apart:
            own["optimizers"] = self._objects.take_apart(tree, apart)
        return self._maker.lay_out(meta, tree, own, rank, world_size, is_replicated=not self._objects.is_sharded)

    def _resume(
        self, call: str, ckpt_path: str | os.PathLike[str] | None, *, goes_on: bool = False
    ) -> dict[str, Any] | None:
        failure = self._settle()
        if failure is not None:
            log.warning("the save before failed on this rank: %s", failure)
        manager, path = self._place(ckpt_path)
        is_folder = self._tiers is None or ckpt_path is not None

        def look() -> list[Any]:
            if is_folder and (Path(path) / MANIFEST_NAME).exists():
                return [True, []]  # of one checkpoint
            for tier in manager.tiers:
                tier.require_own()
                if goes_on and self._run_id and not (tier.is_shared and self._ranks.rank):
                    tier.require_free(self._run_id)
            staged = map(SaveId.find_staged, names_in(Path(path)) if is_folder else [])
            return [False, sorted(name.folder_name for name in staged if name is not None)]

        is_one, unfinished = self._ranks.run_on_all(call, look)[0]
        self._warn([f"skipped: {name} in {path} was never finished: its job was stopped" for name in unfinished])
        rank = self._ranks.rank

        def take(shards: Sequence[ShardReader]) -> Loaded:
            ranks = self._ranks.world_size
            return read(shards, self._objects, rank, ranks, allow_pickles=self._allow_pickles)

        if is_one:

            def read_one() -> Loaded:
                with open_checkpoint(path) as checkpoint:
                    return take(checkpoint.shards)

            self._apply(call, path, loaded := self._ranks.own_on_all(f"{call}, reading", read_one))
            return dict(loaded.own["extra"])
        restored = manager.restore_shards(AllOnEachRank(take), self._peers(), lambda text: self._warn([text]))
        if restored is None:
            return None
        self._step = max(self._step, restored.name.step)
        read_from = ", ".join(tier.where for tier in manager.tiers if tier.name in restored.tiers)
        self._apply(call, f"{restored.name} in {read_from or path}", restored.content)
        return dict(restored.content.own["extra"])

    def _warn(self, texts: list[str]) -> None:
        if self._ranks.rank == 0:
            for text in texts:
                warnings.warn(text, RuntimeWarning, stacklevel=4)

    def _apply(self, call: str, folder: str, loaded: Loaded) -> None:
        own = loaded.own.get("optimizers")
        try:
            told = self._ranks.run_on_all(
                f"{call}, applying", partial(self._objects.apply, loaded.shared, loaded.shapes, own)
            )
        except Exception as error:
            raise CheckpointError(
                f"{folder} was read and verified, and model or optimizer did not take it: {type(error).__name__}: "
                f"{error}. They may hold a part of it now: end this job"
            ) from error
        rank, world_size = self._ranks.rank, self._ranks.world_size
        for note in told[0] if rank == 0 else ():
            log.warning("resumed from %s: %s", folder, note)
        notes = []
        if rank == loaded.own_rank:
            missing = random_numbers.restore(loaded.own["random"])
            notes += [missing] if missing else []
        else:
            draw_from(loaded.own["random"]["torch"].numpy().tobytes(), rank)
        if world_size != loaded.saved_world_size and rank == 0:
            notes.append(
                f"it was saved by {loaded.saved_world_size} rank(s), and there are {world_size}: rank r has the extra "
                f"state of rank r modulo {loaded.saved_world_size}"
                + (
                    "; new ranks draw from the random numbers of that one, and from their number"
                    if world_size > loaded.saved_world_size
                    else ""
                )
                + ("; that of the other ranks is not used" if world_size < loaded.saved_world_size else "")
            )
        for note in notes:
            warnings.warn(f"resumed from {folder}, but not all of it: {note}", RuntimeWarning, stacklevel=4)
        log.info("resumed from %s", folder)


class DCPState(BCPState):
    """The same with the folder that velastic's class of this name has: `.velastic/dcp_checkpoint`."""

    DEFAULT_PATH = ".velastic/dcp_checkpoint"
