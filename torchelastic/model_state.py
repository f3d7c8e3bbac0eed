"""ModelState: a State for a model, its optimizer and all that goes with them, with the five hooks done."""

from __future__ import annotations

import copy
import logging
from typing import Any, BinaryIO, NamedTuple

import torch
import torch.distributed as dist

from torchelastic.coordinator import NonRetryableException
from torchelastic.model import random_state, wrapping
from torchelastic.model.random_state import RandomState
from torchelastic.model.transfer import Packed, bring_level, pack, unpack
from torchelastic.rendezvous.records import Standing
from torchelastic.state import State

log = logging.getLogger(__name__)

SNAPSHOT_MODES = ("commit", "full")


class Snapshot(NamedTuple):
    """What undoes a step. Its size does not grow with the weights, except for `full`."""

    step: int
    epoch: int
    buffers: tuple[torch.Tensor, ...]
    random: RandomState
    groups: tuple[dict[str, Any], ...]
    scheduler: Any
    sampler: Any
    extra: dict[str, Any]
    full: Packed | None


class ModelState(State):
    """Model, optimizer, scheduler, sampler, random numbers and counters, kept level and whole.

    In a train step use `state.model` (wrapped for the present group), `state.optimizer` and so on. Gradients are
    averaged over the global batch: with an `ElasticBatchSampler` each rank counts by its share of the samples, else
    all alike.

    The step may fail anywhere. Before the optimizer has stepped nothing large has changed, and undoing costs no copy of
    the weights. After that the weights come from a peer; where every survivor had stepped already, the step stands.
    Only if the optimizer itself fails half-way on the only worker is nothing left: `snapshot="full"` copies weights
    and optimizer state before each step for that case. Accumulate gradients within one step: those kept from one step
    to the next survive a rollback only with `snapshot="full"`.

    Every rank builds it with the same arguments, on the training thread, and uses it there.

    Args:
        model: the plain module, already on its device.
        optimizer: for its parameters.
        scheduler: of the learning rate; anything with state_dict/load_state_dict. Step it inside the train step.
        sampler: an `ElasticBatchSampler`, or anything with state_dict/load_state_dict (and set_world, commit, weight).
        extra: your own values, plain or tensors: rolled back, sent to newcomers, saved.
        snapshot: "commit" or "full", see above.

    Attributes:
        module: the user's module.
        model: the module to call in a step: DDP where the group has several members.
        step: committed steps.
        epoch: the sampler's epoch where it has one, else yours to set.

    Raises:
        ValueError: an unknown snapshot mode, a sharded or already wrapped module, a sampler that cannot be saved.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Any = None,
        sampler: Any = None,
        extra: dict[str, Any] | None = None,
        snapshot: str = "commit",
    ) -> None:
        if snapshot not in SNAPSHOT_MODES:
            raise ValueError(f"snapshot={snapshot!r} is not one of {', '.join(SNAPSHOT_MODES)}")
        _refuse_sharded(model)
        _refuse_stateless("scheduler", scheduler)
        _refuse_stateless("sampler", sampler)
        self.module = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.sampler = sampler
        self.extra = {} if extra is None else extra
        self.step = 0
        self._epoch = 0
        self._mode = snapshot
        self._standing = Standing.FRESH
        self._wrapped: torch.nn.parallel.DistributedDataParallel | None = None
        self._buffers: list[torch.Tensor] = list(model.buffers())
        self._optimizer_steps_begun = 0
        self._optimizer_steps_done = 0
        self._optimizer_steps_usual = 1
        self._ahead: Snapshot | None = None
        self._random_when_failed: tuple[int, RandomState] | None = None
        self._watch_optimizer()
        wrapping.warm_up()

    @property
    def model(self) -> torch.nn.Module:
        """The module to call in a train step; another object after each change of the group."""
        return self.module if self._wrapped is None else self._wrapped

    @property
    def epoch(self) -> int:
        """The sampler's epoch where it has one, else what was set."""
        return int(getattr(self.sampler, "epoch", self._epoch))

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._epoch = value

    @property
    def standing(self) -> Standing:
        """What this state is worth as a source for others."""
        return self._standing

    # --- undoing a step ---------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """What `apply` needs; in the "commit" mode its cost does not depend on the size of the weights."""
        self._optimizer_steps_begun = self._optimizer_steps_done = 0
        return self._capture(self._copy_weights() if self._mode == "full" else None)

    def apply(self, snapshot: Snapshot) -> None:
        """Undo the step that began with this snapshot."""
        self._random_when_failed = (snapshot.step + 1, random_state.capture())
        if snapshot.full is not None:
            self._load_weights(unpack(snapshot.full))
        else:
            self._judge_weights(snapshot)
            self.optimizer.zero_grad(set_to_none=True)
        self._restore(snapshot)

    def commit(self) -> None:
        """Called by the train loop when the step has succeeded."""
        self.step += 1
        if hasattr(self.sampler, "commit"):
            self.sampler.commit()
        if self._optimizer_steps_done:
            self._optimizer_steps_usual = self._optimizer_steps_done

    def _judge_weights(self, snapshot: Snapshot) -> None:
        """What the weights are worth now that the step has failed."""
        if not self._optimizer_steps_begun:
            return
        complete = self._optimizer_steps_begun == self._optimizer_steps_done == self._optimizer_steps_usual
        if complete and self._standing is Standing.WHOLE and self.step == snapshot.step:
            self.commit()
            self._ahead = self._capture(None)
            self._standing = Standing.UNCOMMITTED
        else:
            self._standing = Standing.TORN

    def _capture(self, full: Packed | None) -> Snapshot:
        return Snapshot(
            step=self.step,
            epoch=self._epoch,
            buffers=tuple(buffer.clone() for buffer in self._buffers),
            random=random_state.capture(),
            groups=tuple(_hyperparameters(group) for group in self.optimizer.param_groups),
            scheduler=None if self.scheduler is None else copy.deepcopy(self.scheduler.state_dict()),
            sampler=None if self.sampler is None else copy.deepcopy(self.sampler.state_dict()),
            extra=copy.deepcopy(self.extra) if self.extra else {},
            full=full,
        )

    def _restore(self, snapshot: Snapshot) -> None:
        self.step, self._epoch = snapshot.step, snapshot.epoch
        with torch.no_grad():
            for buffer, value in zip(self._buffers, snapshot.buffers, strict=True):
                buffer.copy_(value)
        random_state.restore(snapshot.random)
        for group, values in zip(self.optimizer.param_groups, snapshot.groups, strict=True):
            group.update(_hyperparameters(values))
        if self.scheduler is not None:
            self.scheduler.load_state_dict(copy.deepcopy(snapshot.scheduler))
        if self.sampler is not None:
            self.sampler.load_state_dict(copy.deepcopy(snapshot.sampler))
        _replace(self.extra, copy.deepcopy(snapshot.extra))

    def _copy_weights(self) -> Packed:
        packed = pack(self._weights())
        return Packed(packed.skeleton, tuple(tensor.clone() for tensor in packed.tensors))

    # --- bringing members level -------------------------------------------------------------------

    def sync(self, world_size: int | None = None, rank: int | None = None) -> None:
        """Bring all members level with the best state there is, and wrap the module for the new group.

        Bytes move only to members that lack them. A receiver's own state stays whole until all has arrived.

        Raises:
            NonRetryableException: nobody holds a whole state, and there was no checkpoint to load.
            RuntimeError: a peer was lost meanwhile.
        """
        wrapping.unwrap(self._wrapped)
        self._wrapped = None
        distributed = dist.is_available() and dist.is_initialized()
        world_size = world_size if world_size is not None else (dist.get_world_size() if distributed else 1)
        rank = rank if rank is not None else (dist.get_rank() if distributed else 0)
        device = _message_device()
        worths = self._gather_worths(world_size, device)
        best = max(worths)
        source = worths.index(best)
        if best[0] is Standing.TORN:
            raise NonRetryableException(
                "no member holds a whole state: the step failed inside the optimizer on every worker. Use "
                "ModelState(..., snapshot='full'), or give train() a checkpoint manager to go back to"
            )
        if worths[rank] == best and self._standing is Standing.UNCOMMITTED:
            self._roll_forward()  # on every rank that is as good as the source: nothing is sent to those
        fresh = best[0] is Standing.FRESH
        stale = [other for other in range(world_size) if other != source and (fresh or worths[other] < best)]
        if stale:
            tree = self.state_dict() if rank == source else None
            received = bring_level(tree, source=source, stale=stale, rank=rank, world_size=world_size, device=device)
            if received is not None:
                # random numbers are each rank's own: a newcomer that copied them would augment like its source
                self.load_state_dict(received, with_random=False)
                self._catch_up_random()
        self._standing = Standing.WHOLE
        self._ahead = self._random_when_failed = None
        self._wrap(rank, world_size)

    def _gather_worths(self, world_size: int, device: torch.device) -> list[tuple[Standing, int]]:
        mine = torch.tensor([int(self._standing), self.step], device=device)
        gathered = [mine]
        if world_size > 1:
            gathered = [torch.empty_like(mine) for _ in range(world_size)]
            dist.all_gather(gathered, mine)
        return [(Standing(int(worth[0])), int(worth[1])) for worth in gathered]

    def _catch_up_random(self) -> None:
        """Others had committed the step that failed here: go on with the random numbers of after it, as they do."""
        if self._random_when_failed is not None and self._random_when_failed[0] == self.step:
            random_state.restore(self._random_when_failed[1])

    def _roll_forward(self) -> None:
        """Everybody's optimizer had stepped when the step failed, so what is left of the weights is after that step."""
        assert self._ahead is not None
        log.warning("every survivor had completed the optimizer step %d when it failed: it stands", self._ahead.step)
        self._restore(self._ahead)

    def _wrap(self, rank: int, world_size: int) -> None:
        self._buffers = list(self.module.buffers())
        if hasattr(self.sampler, "set_world"):
            self.sampler.set_world(rank, world_size)
        if world_size > 1 and any(parameter.requires_grad for parameter in self.module.parameters()):
            self._world_size = world_size
            self._wrapped = wrapping.wrap(self.module, self._gradient_weight)

    def _gradient_weight(self) -> float:
        return float(getattr(self.sampler, "weight", 1.0 / self._world_size))

    # --- saving -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything, as a tree of plain values and tensors; the tensors are not copied."""
        return {
            **self._weights(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "sampler": None if self.sampler is None else self.sampler.state_dict(),
            "extra": self.extra,
            "step": self.step,
            "epoch": self._epoch,
            "random": torch.get_rng_state(),
        }

    def load_state_dict(self, tree: dict[str, Any], *, with_random: bool = True) -> None:
        """The inverse of `state_dict`; raises what the parts raise if it does not fit them."""
        self._load_weights(tree)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(tree["scheduler"])
        if self.sampler is not None:
            self.sampler.load_state_dict(tree["sampler"])
        _replace(self.extra, tree["extra"])
        self.step, self._epoch = int(tree["step"]), int(tree["epoch"])
        if with_random:
            torch.set_rng_state(tree["random"].cpu())
        self._standing = Standing.WHOLE

    def save(self, stream: BinaryIO) -> None:
        """Write everything to a file-like object."""
        torch.save(self.state_dict(), stream)

    def load(self, stream: BinaryIO) -> None:
        """Read what `save` wrote; executes no pickled code."""
        self.load_state_dict(torch.load(stream, map_location="cpu", weights_only=True))

    def _weights(self) -> dict[str, Any]:
        return {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def _load_weights(self, tree: dict[str, Any]) -> None:
        self.module.load_state_dict(tree["module"])
        self.optimizer.load_state_dict(tree["optimizer"])

    # --- inside -----------------------------------------------------------------------------------

    def _watch_optimizer(self) -> None:
        """Know whether a failed step had reached the optimizer, and whether that had come to its end."""
        self.optimizer.register_step_pre_hook(self._optimizer_begins)
        self.optimizer.register_step_post_hook(self._optimizer_ends)

    def _optimizer_begins(self, *_: Any) -> None:
        self._optimizer_steps_begun += 1

    def _optimizer_ends(self, *_: Any) -> None:
        self._optimizer_steps_done += 1

    def __getstate__(self) -> dict[str, Any]:
        # a group's wrapper and a half-made step belong to this process alone
        return {**self.__dict__, "_wrapped": None, "_ahead": None, "_random_when_failed": None, "_buffers": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._buffers = list(self.module.buffers())
        self._watch_optimizer()


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """One parameter group's settings; the list of parameters in it is the very same object."""
    values = dict(group)
    if isinstance(values.get("lr"), torch.Tensor):
        values["lr"] = values["lr"].clone()  # the scheduler changes it in place
    return values


def _replace(target: dict[str, Any], values: dict[str, Any]) -> None:
    """Set a dict's content; the object stays, because the user's code holds it."""
    target.clear()
    target.update(values)


def _message_device() -> torch.device:
    uses_nccl = dist.is_available() and dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if uses_nccl else torch.device("cpu")


def _refuse_sharded(model: torch.nn.Module) -> None:
    names = {type(module).__name__ for module in model.modules()}
    if "DistributedDataParallel" in names or "DataParallel" in names:
        raise ValueError("give ModelState the plain module: it wraps it anew for each group")
    sharded = "FullyShardedDataParallel" in names or any(hasattr(p, "device_mesh") for p in model.parameters())
    if sharded:
        raise ValueError(
            "ModelState keeps one whole model per worker, and this module is sharded (FSDP, DTensor): write a State of "
            "your own around torch.distributed.checkpoint.state_dict"
        )


def _refuse_stateless(name: str, value: Any) -> None:
    if value is not None and not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
        raise ValueError(
            f"{name} is a {type(value).__name__} without state_dict and load_state_dict: it cannot be kept"
        )
