"""BCPState: save and resume model, optimizer, random numbers and a script's own values, on all ranks together."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.kinds import Kind, require_own_folder
from torchelastic.checkpoint.policy import KeepLast
from torchelastic.checkpoint.restore import newest_readable
from torchelastic.checkpoint.shards.disk import REAL_DISK, Disk
from torchelastic.checkpoint.shards.pool import SlotPool
from torchelastic.checkpoint.store.fence import Fence
from torchelastic.checkpoint.store.manifest import ShardRecord
from torchelastic.checkpoint.store.reading import names_in
from torchelastic.checkpoint.store.save_id import SaveId
from torchelastic.checkpoint.training_state import random_numbers
from torchelastic.checkpoint.training_state.objects import OptimizerOrSeveral, TrainingObjects
from torchelastic.checkpoint.training_state.reading import Loaded, find, read
from torchelastic.checkpoint.training_state.shard import ShardMaker, StateLayout
from torchelastic.checkpoint.training_state.writing import StateSave, Writer, record_as_plain
from torchelastic.group.rank_group import RankGroup, begun

if TYPE_CHECKING:
    import torch.distributed as dist

log = logging.getLogger(__name__)

_SHOWN = 5


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
            position, state dicts of a scheduler or scaler.
        default_ckpt_path: the folder of checkpoints where a method is given none; all ranks must see the same. Default:
            `.velastic/checkpoint`. With an `IterManager`, give `manager.velastic_dir / "checkpoint"`.
        keep: how many complete checkpoints stay, 1 or more. With 2, one that a disk damages has a predecessor.
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
        get_extra_fn: Callable[[], Mapping[str, Any]] | None = None,
        default_ckpt_path: str | os.PathLike[str] | None = None,
        *,
        keep: int = 2,
        timeout_s: float = 600.0,
        process_group: dist.ProcessGroup | None = None,
        run_id: str | None = None,
        allow_pickles: bool = False,
        disk: Disk = REAL_DISK,
    ) -> None:
        if keep < 1 or timeout_s <= 0:
            raise ValueError(f"keep={keep} and timeout_s={timeout_s}: give 1 or more, and more than 0 seconds")
        if get_extra_fn is not None and not callable(get_extra_fn):
            raise ValueError(f"get_extra_fn is a {type(get_extra_fn).__name__}: give a function without arguments")
        self._objects = TrainingObjects(model, optimizer, framework)
        self._get_extra_fn = get_extra_fn
        self._default_path = Path(self.DEFAULT_PATH if default_ckpt_path is None else default_ckpt_path)
        self._timeout_s = timeout_s
        self._run_id = run_id
        self._allow_pickles = allow_pickles
        self._disk = disk
        self._ranks = RankGroup(process_group, timeout_s)
        self._maker = ShardMaker(allow_pickles=allow_pickles)
        self._pool = SlotPool(None)
        # half of it: rank 0 is to give up before the others give up rank 0
        self._writer = Writer(self._pool, disk, KeepLast(keep), timeout_s / 2)
        self._running: Future[None] | None = None
        self._failure: BaseException | None = None
        self._fences: dict[Path, tuple[Fence, int]] = {}
        self._generation = 0

    # --- saving -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What would be saved now: "model", "optimizer" (a list) and "extra_state". The tensors are the live ones."""
        tree = self._objects.tree()
        model = {**tree["model"]["parameters"], **tree["model"]["others"]}
        return {"model": model, "optimizer": tree["optimizers"], "extra_state": self._extra()}

    def save(self, ckpt_path: str | os.PathLike[str] | None = None, sync: bool = True) -> None:
        """Saves a checkpoint. Called on all ranks. What is saved are the values at the call.

        Args:
            ckpt_path: the folder of checkpoints.
            sync: return when it is published. Else return after the copy, and finish in the background: before the next
                save, before `wait` returns, and before the interpreter ends. If it fails, that is logged, `wait` raises
                it, and the next save is tried.

        Raises:
            CheckpointError: it could not be saved (a full disk, a rank that failed); the checkpoint before stays.
            FencedError: another job has taken the folder over.
            TypeError, ValueError: something cannot be saved; names it. Nothing was written.
            OutOfStepError: a rank does not come; names it.
        """
        path = self._path(ckpt_path)
        call = f"save(ckpt_path={str(path)!r}, sync={bool(sync)})"
        save = self._begin(call, path, self._settle())
        fence = self._fences[path][0] if save.rank == 0 else None
        try:
            self._ranks.run_on_all(f"{call}, beginning", lambda: self._writer.begin(save))
            if sync:
                self._finish_on_all(call, save, fence)
        except BaseException:
            if save.rank == 0:
                self._writer.abandon(save)
            self._pool.give_back(save.stage)
            raise
        if sync:
            self._pool.give_back(save.stage)
            return

        def job() -> None:
            try:
                self._writer.finish(save, fence)
            except Exception as error:
                log.error("%s could not be saved; training goes on: %s", save.name, error)
                raise
            finally:
                self._pool.give_back(save.stage)

        self._running = begun(job, is_waited_for=True)

    def wait(self) -> None:
        """Returns when the save in the background is published. Called on all ranks.

        Raises:
            CheckpointError: it failed, on whichever rank.
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
        for fence, _ in self._fences.values():
            fence.release()
        self._fences.clear()
        self._pool.close()
        self._ranks.close()

    # --- resuming -----------------------------------------------------------------------------------------------------

    def maybe_resume_from_ckpt(self, ckpt_path: str | os.PathLike[str] | None = None) -> dict[str, Any] | None:
        """Goes on from the newest intact checkpoint, if there is one. Called on all ranks, which decide alike.

        Model, optimizer and random numbers are set; all was read and verified before, so a resume that fails has
        changed nothing. A damaged checkpoint is named in a warning, and the next older one is taken.

        With another number of ranks, rank r gets the extra state of rank r modulo the number that saved, and a rank
        that did not exist then keeps its random numbers; a warning says so.

        Args:
            ckpt_path: the folder of checkpoints, or of one checkpoint.

        Returns:
            What `get_extra_fn` returned on this rank ({} if there was none); None if there is no checkpoint at all.

        Raises:
            CorruptCheckpointError: there are checkpoints, and none is intact; on all ranks.
            CheckpointError: it does not fit this model or these optimizers, or cannot be read; on all ranks.
            OutOfStepError: a rank does not come; names it.
        """
        path = self._path(ckpt_path)
        extra = self._resume(f"maybe_resume_from_ckpt({str(path)!r})", path)
        if extra is None and self._ranks.rank == 0:
            log.info("no checkpoint in %s yet: starting afresh", path)
        return extra

    def load(self, ckpt_path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """The same where there must be a checkpoint. Raises besides: CheckpointError if there is none."""
        path = self._path(ckpt_path)
        extra = self._resume(f"load({str(path)!r})", path)
        if extra is None:
            raise CheckpointError(
                f"there is no checkpoint in {path}: give the ckpt_path that was saved to; maybe_resume_from_ckpt "
                "starts afresh where there is none"
            )
        return extra

    # --- how ----------------------------------------------------------------------------------------------------------

    def _path(self, ckpt_path: str | os.PathLike[str] | None) -> Path:
        return self._default_path if ckpt_path is None else Path(ckpt_path)

    def _extra(self) -> dict[str, Any]:
        if self._get_extra_fn is None:
            return {}
        extra = self._get_extra_fn()
        if not isinstance(extra, Mapping):
            raise TypeError(f"get_extra_fn returned a {type(extra).__name__}: return a dict")
        return dict(extra)

    def _settle(self) -> BaseException | None:
        """Waits for this rank's part of the save before; what failed in it and was not raised yet."""
        if self._running is not None:
            if not wait([self._running], 2 * self._timeout_s).done:
                raise CheckpointError(
                    f"the save before is not done after {2 * self._timeout_s:g} s: the disk does not answer"
                )
            self._failure = self._running.exception() or self._failure
            self._running = None
        return self._failure

    def _begin(self, call: str, path: Path, before: BaseException | None) -> StateSave:
        """Copies what this rank saves; all ranks agree on the name. Nothing is kept if one of them fails."""
        rank, world_size = self._ranks.rank, self._ranks.world_size
        copied: list[StateSave] = []

        def prepare() -> list[Any]:
            layout = self._layout(rank, world_size)
            epoch = self._claimed(path) if rank == 0 else 0
            stage = self._pool.take(layout.header)
            name = SaveId(0, 0, 0, 0)  # not known yet
            copied.append(StateSave(path, name, self._run_id or "", rank, world_size, layout.header, stage))
            stage.copy(layout.sources)
            is_checked = world_size > 1 and not self._objects.is_sharded and not self._objects.is_kept_equal
            return [epoch, self._generation, self._objects.digest() if is_checked else ""]

        try:
            answers = self._ranks.run_on_all(call, prepare)
            odd = [number for number, (_, _, digest) in enumerate(answers) if digest != answers[0][2]]
            if odd:
                raise ValueError(
                    f"framework='ddp', but model or optimizer of rank {odd[0]} differ from those of rank 0: wrap the "
                    "model in DistributedDataParallel, or let each group of equal ranks have a process_group; nothing "
                    "was saved"
                )
        except BaseException:
            for save in copied:
                self._pool.give_back(save.stage)
            raise
        if before is not None:
            warnings.warn(f"the save before failed on this rank: {before}", RuntimeWarning, stacklevel=3)
            self._failure = None
        self._generation = max(int(generation) for _, generation, _ in answers) + 1
        (save,) = copied
        save.name = SaveId(int(answers[0][0]), 0, self._generation, self._generation)
        return save

    def _layout(self, rank: int, world_size: int) -> StateLayout:
        own: dict[str, Any] = {"random": random_numbers.capture(), "extra": self._extra()}
        tree = self._objects.tree()
        if world_size > 1 and self._objects.has_own_buffers:
            own["others"] = tree["model"].pop("others")
        return self._maker.lay_out(tree, own, rank, world_size, is_replicated=not self._objects.is_sharded)

    def _claimed(self, path: Path) -> int:
        """On rank 0: the epoch in which this job writes into a folder. Raises: CheckpointError."""
        if path not in self._fences:
            require_own_folder(path, Kind.TRAINING_STATE)
            fence = Fence(path, self._disk)
            epoch = fence.claim(self._run_id or "any", f"BCPState on {socket.gethostname()}")
            self._fences[path] = (fence, epoch)
            names = filter(None, map(SaveId.find, names_in(path)))
            self._generation = max([self._generation, *(name.generation for name in names)])
        fence, epoch = self._fences[path]
        fence.check(epoch, 0)
        return epoch

    def _finish_on_all(self, call: str, save: StateSave, fence: Fence | None) -> None:
        records = self._ranks.run_on_all(f"{call}, writing", lambda: record_as_plain(self._writer.write(save)))

        def publish() -> None:
            if fence is not None:
                self._writer.publish(save, [ShardRecord(**record) for record in records], fence)

        self._ranks.run_on_all(f"{call}, publishing", publish)

    def _resume(self, call: str, path: Path) -> dict[str, Any] | None:
        failure = self._settle()
        if failure is not None:
            log.warning("the save before failed on this rank: %s", failure)
        rank = self._ranks.rank

        def look() -> list[Any]:
            if rank != 0:
                return [[], {}, []]
            found = find(path)
            return [found.folders, found.damaged, found.unfinished]

        folders, damaged, unfinished = self._ranks.run_on_all(call, look)[0]
        damages = [f"{folder}: {damage}" for folder, damage in damaged.items()]
        self._warn([*damages, *(f"{name} in {path} was never finished: its job was stopped" for name in unfinished)])

        def attempt(folder: str) -> tuple[Path, Loaded]:
            work = partial(read, Path(folder), self._objects, rank, allow_pickles=self._allow_pickles)
            return Path(folder), self._ranks.own_on_all(f"{call}, reading {Path(folder).name}", work)

        def pass_over(folder: str, error: CorruptCheckpointError) -> None:
            damages.append(f"{folder}: {error}")
            self._warn(damages[-1:])

        if found := newest_readable(folders, attempt, pass_over):
            self._apply(call, *found)
            return dict(found[1].own["extra"])
        if damages:
            more = f"; and {len(damages) - _SHOWN} more" if len(damages) > _SHOWN else ""
            raise CorruptCheckpointError(
                f"no checkpoint in {path} can be loaded, and nothing was changed: {'; '.join(damages[:_SHOWN])}{more}. "
                "Restore one from a copy; to start from scratch, move the folder away"
            )
        return None

    def _warn(self, texts: list[str]) -> None:
        if self._ranks.rank == 0:
            for text in texts:
                warnings.warn(f"passed over: {text}", RuntimeWarning, stacklevel=4)

    def _apply(self, call: str, folder: Path, loaded: Loaded) -> None:
        try:
            self._ranks.run_on_all(f"{call}, applying", partial(self._objects.apply, loaded.shared, loaded.shapes))
        except Exception as error:
            raise CheckpointError(
                f"{folder} was read and verified, and model or optimizer did not take it: {type(error).__name__}: "
                f"{error}. They may hold a part of it now: end this job"
            ) from error
        rank, world_size = self._ranks.rank, self._ranks.world_size
        notes = []
        if rank == loaded.own_rank:
            missing = random_numbers.restore(loaded.own["random"])
            notes += [missing] if missing else []
        if world_size != loaded.saved_world_size and rank == 0:
            notes.append(
                f"it was saved by {loaded.saved_world_size} rank(s), and there are {world_size}: rank r has the extra "
                f"state of rank r modulo {loaded.saved_world_size}"
                + ("; new ranks keep their random numbers" if world_size > loaded.saved_world_size else "")
                + ("; that of the other ranks is not used" if world_size < loaded.saved_world_size else "")
            )
        for note in notes:
            warnings.warn(f"resumed from {folder}, but not all of it: {note}", RuntimeWarning, stacklevel=4)
        log.info("resumed from %s", folder)


class DCPState(BCPState):
    """The same with the folder that velastic's class of this name has: `.velastic/dcp_checkpoint`."""

    DEFAULT_PATH = ".velastic/dcp_checkpoint"
