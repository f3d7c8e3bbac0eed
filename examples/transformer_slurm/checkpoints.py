"""The checkpoints of an experiment: `ckpt_STEP.shard` (one file) or `ckpt_STEP/` (each rank its part).

Both hold weights, optimizer, random numbers of each rank and what the training adds (scheduler, position in the data),
under names that do not depend on DDP or torch.compile; both are read whatever is written. One rename publishes: a job
that is killed while it saves leaves the checkpoint before. Everything is verified before anything is changed.
"""

from __future__ import annotations

import base64
import json
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from examples.transformer_slurm.checkpoint_names import SavedName, newest_first, superfluous
from torchelastic.checkpoint import DCPState
from torchelastic.checkpoint.compat.velastic import random_numbers
from torchelastic.checkpoint.compat.velastic.training_objects import TrainingObjects
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.format.disk import REAL_DISK, Disk
from torchelastic.checkpoint.format.pool import remove_left_overs
from torchelastic.checkpoint.format.tensor_parts import contiguous, dtype_name, dtype_named, memory_of
from torchelastic.checkpoint.shards import ShardReader, flatten, load_tree, save_tree, unflatten
from torchelastic.checkpoint.store import MANIFEST_NAME, list_checkpoints, open_checkpoint
from torchelastic.checkpoint.store.fence import Fence
from torchelastic.checkpoint.store.reading import names_in
from torchelastic.group.rank_group import RankGroup

log = logging.getLogger(__name__)

#: Where parts are written, and the fence that keeps a job that was replaced from publishing.
SAVING = ".saving"
#: Where checkpoints go that the present run has not gone on from: torn ones, and later ones than it has resumed.
SET_ASIDE = "set-aside"
_GONE = ".tmp-gone-"
KIND = "transformer_slurm"
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Resumed:
    """What a resume has found.

    Attributes:
        path: of the checkpoint.
        extra: what this rank, or with other ranks the one that it stands for, has added.
    """

    path: Path
    extra: Mapping[str, Any]


class Checkpoints:
    """Saves and resumes, on all ranks together: each method is called by all of them, on the training thread.

    Args:
        folder: of the experiment; all ranks see the same.
        model: plain or in DDP, compiled or not.
        optimizer: over its parameters.
        ranks: that save and resume.
        each_rank: whether each rank writes its part; else rank 0 writes one file.
        keep: how many to keep, see `superfluous`.
        verify: read each checkpoint back after the save.
        disk: what touches files.
    """

    def __init__(
        self,
        folder: Path,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        ranks: RankGroup,
        *,
        each_rank: bool,
        keep: int,
        verify: bool,
        disk: Disk = REAL_DISK,
    ) -> None:
        self.folder = folder
        self._objects = TrainingObjects(model, optimizer, "ddp")
        self._ranks = ranks
        self._each_rank, self._keep, self._verify, self._disk = each_rank, keep, verify, disk
        self._extra: Mapping[str, Any] = {}
        self._parts = DCPState(
            model, optimizer, "ddp", lambda: self._extra, folder / SAVING, keep=1, timeout_s=TIMEOUT_S, disk=disk
        )
        self._fence: tuple[Fence, int] | None = None

    # --- saving -------------------------------------------------------------------------------------------------------

    def save(self, step: int, extra: Mapping[str, Any], *, is_final: bool = False) -> Path:
        """Saves a checkpoint; it is on the disk when this returns. Older ones that are not kept go after that.

        Args:
            step: how many steps are done.
            extra: of this rank; plain values and tensors.
            is_final: because the time is nearly over.

        Raises:
            CheckpointError: it could not be saved, on whichever rank; those before stay.
            FencedError: another job has taken the experiment over.
        """
        name = SavedName(step, is_final, is_file=not self._each_rank)
        target, call = self.folder / name.text, f"saving {name.text}"
        (self._save_parts if self._each_rank else self._save_file)(call, target, step, extra)

        def after() -> None:
            if self._verify:
                verify(target)
            self._prune()

        self._on_first(f"{call}, afterwards", after)
        return target

    def _save_file(self, call: str, target: Path, step: int, extra: Mapping[str, Any]) -> None:
        own = self._ranks.run_on_all(call, lambda: _as_text({"random": random_numbers.capture(), "extra": dict(extra)}))

        def write() -> None:
            fence, epoch = self._claimed()
            ranks = [_from_text(text) for text in own]
            fence.check(epoch, 0)
            tree = {**self._objects.tree(), "ranks": ranks}
            save_tree(target, tree, meta={"kind": KIND, "step": step}, disk=self._disk)

        self._on_first(f"{call}, writing", write)

    def _save_parts(self, call: str, target: Path, step: int, extra: Mapping[str, Any]) -> None:
        self._extra = {**extra, "step": step}
        self._parts.save(sync=True)
        saving = self.folder / SAVING

        def publish() -> None:
            self._disk.rename(list_checkpoints(saving)[0].folder, target)
            self._disk.sync_folder(self.folder)

        self._on_first(f"{call}, publishing", publish)

    def _claimed(self) -> tuple[Fence, int]:
        """On rank 0: the folder is this job's, and what killed ones have left in it is gone."""
        if self._fence is None:
            fence = Fence(self.folder / SAVING, self._disk)
            self._fence = fence, fence.claim("any", KIND)
            remove_left_overs(self.folder, self._disk)
        return self._fence

    def _prune(self) -> None:
        try:
            for name in superfluous(newest_first(names_in(self.folder)), self._keep):
                gone = self.folder / f"{_GONE}{secrets.token_hex(4)}"
                if name.is_file:
                    self._disk.remove(self.folder / name.text)
                else:
                    self._disk.rename(self.folder / name.text, gone)  # nobody is to take what is left for a checkpoint
            for left in names_in(self.folder):
                if left.startswith(_GONE):
                    self._disk.remove_folder(self.folder / left)
        except CheckpointError as error:  # what is saved is saved
            log.warning("old checkpoints could not be removed: %s", error)

    # --- resuming -----------------------------------------------------------------------------------------------------

    def names(self) -> list[SavedName]:
        """What is in the folder, newest first; as rank 0 sees it. Raises: CheckpointError."""
        texts = self._on_first("looking for checkpoints", lambda: [n.text for n in newest_first(names_in(self.folder))])
        return newest_first(texts)

    def resume_latest(self) -> Resumed | None:
        """Goes on from the newest intact checkpoint; those that are damaged are named, and set aside.

        Returns:
            None: there is no checkpoint, so nothing was changed.

        Raises:
            CorruptCheckpointError: there are some, and none is intact.
            CheckpointError: it does not fit the model, or cannot be read; names what differs. Nothing was changed.
        """
        damages: list[str] = []
        for name in self.names():
            path = self.folder / name.text
            try:
                extra = self._load(path)
            except CorruptCheckpointError as error:
                damages.append(f"{path.name}: {error}")
                self._say(f"{path} is damaged, so the one before is taken: {error}")
                continue
            self._set_aside(lambda other, name=name: other > name)  # type: ignore[misc]
            return Resumed(path, extra)
        if damages:
            raise CorruptCheckpointError(
                f"no checkpoint in {self.folder} can be loaded: {'; '.join(damages)}. Bring one back from a copy; to "
                "start from scratch, give another --experiment_name"
            )
        return None

    def resume(self, path: Path) -> Resumed:
        """Goes on from one checkpoint. Later ones of this experiment are set aside; errors as `resume_latest`."""

        def look() -> None:
            if not path.exists():
                there = ", ".join(name.text for name in newest_first(names_in(path.parent))[:5])
                raise CheckpointError(f"{path}: no such checkpoint" + (f"; beside it are {there}" if there else ""))
            if path.is_dir() and not (path / MANIFEST_NAME).exists():
                raise CheckpointError(
                    f"{path} is no checkpoint (a ckpt_STEP.shard, or a folder with a {MANIFEST_NAME}): give one of "
                    "those in it, or say `latest` with its --checkpoint-dir and --experiment_name"
                )

        self._ranks.run_on_all(f"resuming from {path}", look)
        extra = self._load(path)
        is_ours = path.resolve().parent == self.folder.resolve()
        name = SavedName.find(path.name) if is_ours else None
        self._set_aside(lambda other: name is None or other > name)
        return Resumed(path, extra)

    def _load(self, path: Path) -> Mapping[str, Any]:
        if path.is_dir():
            self._ranks.run_on_all(f"looking at {path.name}", lambda: _require_manifest(path))
            return self._parts.load(path)
        trees: list[dict[str, Any]] = []

        def read() -> None:
            tree = load_tree(path)
            if not isinstance(tree, dict) or not {"model", "optimizers", "ranks"} <= tree.keys():
                raise CheckpointError(f"{path} is no checkpoint of this program")
            self._objects.require_fitting(tree)
            trees.append(tree)

        self._ranks.run_on_all(f"reading {path.name}", read)
        (tree,) = trees
        self._ranks.run_on_all(f"applying {path.name}", lambda: self._objects.apply(tree, tree))
        rank, saved_ranks = self._ranks.rank, len(tree["ranks"])
        own: dict[str, Any] = tree["ranks"][rank % saved_ranks]
        missing = random_numbers.restore(own["random"]) if rank < saved_ranks else "random numbers of a new rank"
        if missing:
            log.warning("%s was resumed without %s", path, missing)
        return dict(own["extra"])

    def _set_aside(self, is_meant: Callable[[SavedName], bool]) -> None:
        """Moves checkpoints away that are not of the course that goes on now; nothing is deleted."""

        def move() -> list[str]:
            meant = [name for name in newest_first(names_in(self.folder)) if is_meant(name)]
            for name in meant:
                place = self.folder / SET_ASIDE / f"{secrets.token_hex(4)}-{name.text}"
                self._disk.make_folder(place.parent)
                self._disk.rename(self.folder / name.text, place)
            return [name.text for name in meant]

        moved = self._on_first("setting checkpoints aside", move)
        if moved:
            self._say(f"{', '.join(moved)} moved to {self.folder / SET_ASIDE}: this run does not go on from there")

    def close(self) -> None:
        """Gives memory and locks back. Not a collective."""
        self._parts.close()
        if self._fence is not None:
            self._fence[0].release()

    def _on_first(self, call: str, work: Callable[[], Any]) -> Any:
        """What rank 0's work returned, on all ranks."""
        return self._ranks.run_on_all(call, lambda: work() if self._ranks.rank == 0 else None)[0]

    def _say(self, text: str) -> None:
        if self._ranks.rank == 0:
            log.warning("%s", text)


def verify(path: Path) -> None:
    """Compares every byte of a checkpoint with its checksum. Raises: CorruptCheckpointError."""
    if path.is_dir():
        with open_checkpoint(path) as checkpoint:
            checkpoint.verify()
    else:
        with ShardReader(path) as shard:
            shard.verify()


def read_state(path: Path) -> dict[str, Any]:
    """Weights ("model") and "optimizers" of a checkpoint of either sort, verified, on the CPU.

    Raises:
        CheckpointError: there is none, it is damaged, or it is something else.
    """
    if path.is_dir():
        with open_checkpoint(path) as checkpoint:
            tree = checkpoint.read_tree()
    else:
        tree = load_tree(path)
    if not isinstance(tree, dict) or not isinstance(tree.get("model"), dict):
        raise CheckpointError(f"{path} is no checkpoint of this program")
    return tree


def _require_manifest(folder: Path) -> None:
    if not (folder / MANIFEST_NAME).exists():
        raise CorruptCheckpointError(f"{folder} has no {MANIFEST_NAME}: it is not complete")


def _as_text(tree: Any) -> str:
    """A small tree as text, for the other ranks; `_from_text` executes nothing."""
    flat = flatten(tree)
    tensors = {
        named.name: [
            dtype_name(named.tensor.dtype),
            named.shape,
            base64.b64encode(memory_of(contiguous(named.tensor))).decode(),
        ]
        for named in flat.tensors
    }
    return json.dumps([flat.structure, tensors])


def _from_text(text: str) -> Any:
    structure, tensors = json.loads(text)
    return unflatten(
        structure,
        {
            name: torch.frombuffer(bytearray(base64.b64decode(data)), dtype=dtype_named(dtype)).view(shape)
            if data
            else torch.empty(shape, dtype=dtype_named(dtype))
            for name, (dtype, shape, data) in tensors.items()
        },
    )
