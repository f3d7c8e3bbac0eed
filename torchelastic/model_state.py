"""ModelState: a State for a model, its optimizer and all that goes with them, with the five hooks done."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from torchelastic.checkpoint.format import torch_stream
from torchelastic.errors import NonRetryableException, UnfitError
from torchelastic.group.step_course import StepCourse, digest_of_usual
from torchelastic.inventory.generators import (
    Generators,
    digests_of_generators,
    drawn_alike,
    generators,
    put_row_of_generators,
    put_rows_of_generators,
    row_of_generators,
    rows_draw_alike,
)
from torchelastic.inventory.module_structure import ModuleStructure
from torchelastic.inventory.names import named_parameters
from torchelastic.model import newcomers, wrapping
from torchelastic.model.companions import Companions, Large, Snapshot, Trained, WithCompanions
from torchelastic.model.compute_check.options import ComputeCheck
from torchelastic.model.one_or_many import GivenOnce, OneOrMany
from torchelastic.model.optimizers import OptimizerProgress, Optimizers
from torchelastic.model.replica_checks import ComparesReplicas
from torchelastic.model.step_gradients import Needs, Salvaged, StepGradients
from torchelastic.model.step_kind import kind_text
from torchelastic.model.stored_form import OF_EACH_RANK, StoredForm
from torchelastic.model.strangers import Strangers
from torchelastic.model.transfer import (
    check_sendable,
    gathered_numbers,
    message_device,
    synchronize,
)
from torchelastic.model.weight_undo import SNAPSHOT_MODES, WeightUndo
from torchelastic.model.withdrawn_steps import EarlierNumbers, standing, text_of
from torchelastic.model.world_change import WorldWatch
from torchelastic.model.wrapping import check_unsharded
from torchelastic.rendezvous.records import StateProgress, StateStatus
from torchelastic.state import ReplicaDigests, State

log = logging.getLogger(__name__)

OUT_OF_SYNC_MODES = ("log", "raise")


class ModelState(WithCompanions, ComparesReplicas, State):
    """Model, optimizer, scheduler, sampler, random numbers and counters, kept in sync and whole.

    In a train step use `state.model` (wrapped for the present group), `state.optimizer` and so on. Gradients are
    averaged over the global batch: with an `ElasticBatchSampler` or an `ElasticStream` each rank counts by its share of
    the samples, else all alike.

    The step may fail anywhere. Where that is cheap, weights and optimizers are copied before each step, and all that it
    has done is undone. Else it is undone by a rule: before the optimizer has stepped no weight has changed; after that
    the weights come from a peer, and where every survivor had stepped already, the step is committed. Then only an
    optimizer that fails half-way on the only worker leaves nothing: `snapshot="full"` always copies. Gradients that a
    step leaves for the next one, with no optimizer step in it, are copied before each step and sent to newcomers.

    Every rank builds it with the same arguments, on the training thread, and uses it there.

    Args:
        model: the plain module, already on its device.
        optimizer: for its parameters; or a list, a tuple or a dict of several.
        scheduler: of the learning rate; anything with state_dict/load_state_dict, or several. Step it in the step.
        sampler: an `ElasticBatchSampler` or `ElasticStream`, or anything with state_dict/load_state_dict (and
            set_world, commit, weight).
        extra: your own values: rolled back, sent to newcomers, saved. Plain ones, tensors, and objects with
            state_dict/load_state_dict (a GradScaler, an EMA), which stay the same objects; see docs/state.md.
        snapshot: "auto" measures in the first ten steps what a copy costs, and goes on with copies if that is at most
            3 percent of a step (or 0.5 ms) and a quarter of the memory that is free. "full" always copies, "commit"
            never.
        on_out_of_sync: after each sync digests are compared; if members differ where they must not, "log" an error or
            "raise" a NonRetryableException on every rank.
        find_unused_parameters: as for DDP; for steps whose backward passes do not reach every parameter (a GAN).
        ddp: further options of DDP, by name: static_graph, broadcast_buffers, gradient_as_bucket_view, bucket_cap_mb.
        logical_shards: cut each global batch into this many shards and have the same bits at any world size; the step
            goes through `shards` then. See docs/salvage.md.
        salvage: what becomes of a step in which a worker is lost: "discard" repeats it, "drop" commits what the
            survivors have computed and trains the rest later in the epoch, "recompute" computes the rest at once. The
            last two need an `ElasticBatchSampler` or an `ElasticStream`, and, without `logical_shards`, steps in which
            every parameter is used.
        check: a `ComputeCheck`: workers that compute wrong are found. None: it is taken that all compute right.

    Attributes:
        module: the user's module.
        model: the module to call in a step; see there.
        step: committed steps.
        replica_comparison: what the comparison after the last sync has found; None before the first.
        epoch: the sampler's epoch where it has one, else yours to set.

    Raises:
        ValueError: an unknown snapshot mode, a sharded, lazy or already wrapped module, a sampler that cannot be saved,
            an option of DDP that would break a promise.
    """

    optimizer, scheduler = GivenOnce(), GivenOnce()
    step_course: StepCourse
    _ahead: Snapshot | None = None  # what is rolled forward to, where every survivor had completed a step that failed
    _random_when_failed: tuple[int, Generators] | None = None
    _random_rows: torch.Tensor | None = None  # of a checkpoint that was loaded, until the next sync gives them

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer],
        *,
        scheduler: Any = None,
        sampler: Any = None,
        extra: dict[str, Any] | None = None,
        snapshot: str = "auto",
        on_out_of_sync: str = "log",
        find_unused_parameters: bool = False,
        ddp: Mapping[str, Any] | None = None,
        logical_shards: int | None = None,
        salvage: str = "discard",
        check: ComputeCheck | None = None,
    ) -> None:
        modes = (("snapshot", snapshot, SNAPSHOT_MODES), ("on_out_of_sync", on_out_of_sync, OUT_OF_SYNC_MODES))
        for name, value, known in modes:
            if value not in known:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(known)}")
        check_unsharded(model)
        self._own = Companions(sampler, extra)
        self.module = model
        self.optimizer, self.scheduler = optimizer, scheduler
        self.replica_comparison = None
        self._schedulers = OneOrMany("scheduler", scheduler)
        self._gradients = StepGradients(model, self._own, logical_shards, salvage, find_unused_parameters, ddp, check)
        self._backward, self.rollback = self._gradients.backward, self._gradients.rollback
        self._optimizers = Optimizers(optimizer, self._own.extras.keep_large, self._gradients.check_reduced)
        self._structure = ModuleStructure(model)
        given = (self._optimizers.objects, self._schedulers.objects, self._own.extras.objects)
        self._strangers = Strangers(model, self._structure, *given, is_averaged_by_ddp=logical_shards is None)
        self.step_course = self._gradients.course(self._own.batches, self._optimizers.begun, self._strangers.check_end)
        self._world = WorldWatch()
        self._on_out_of_sync = on_out_of_sync
        are_salvaged, extras = self._gradients.are_salvaged, self._own.extras
        self._undo = WeightUndo(snapshot, model, self._structure, self._optimizers, extras, are_watched=are_salvaged)
        self._status = StateStatus.INITIAL
        self._awaits_sync = False  # no step comes before the next one, which changes no weight before all have arrived
        self._replaced = 0  # times that this process's state was replaced by another whole one
        self._earlier_numbers = EarlierNumbers()
        self._stored = StoredForm(model, self._optimizers, self._own)
        self._types_of_extra: set[type] = set()
        self._tried: list[int] = []  # the kind of content of which it is known whether it can be sent
        wrapping.warm_up()

    @property
    def model(self) -> torch.nn.Module:
        """The module to call in a train step: as the user's, at any size of the group, but for its call.

        It has the user's class, attributes, methods and names; its call goes through the DDP of the present group, and
        `module` and `no_sync()` are there as on DDP. Where the user's class does not allow that (TorchScript) it is the
        module itself, or DDP, and another object after each change of the group.
        """
        return self._gradients.model

    def no_sync(self) -> AbstractContextManager[Any]:
        """Around forward and backward passes of all micro batches but the last: gradients add up and stay here."""
        return self._gradients.no_sync()

    def shards(self, loader: Iterator[Any]) -> Iterator[Any]:
        """Draw this rank's share of the next global batch: in one piece, or with `logical_shards` shard by shard.

        Write forward and backward passes inside the loop, and `optimizer.step()` behind it::

            for inputs, targets in state.shards(loader):
                loss_function(state.model(inputs), targets).backward()
            state.optimizer.step()

        With `logical_shards` call `backward` once for each shard, on its mean loss. Gradients of before the loop are
        dropped. A rank may have no shard of a small batch.

        Args:
            loader: an `ElasticLoader` over the state's sampler, or the `ElasticStream` that is the sampler.

        Raises:
            StopIteration: the last epoch is over; let it end the step.
            RuntimeError: a peer was lost.
        """
        return self._gradients.shards(loader, self.step)

    @property
    def salvaged(self) -> Salvaged | None:
        """The last step of which a part of the gradients was kept, and how much of it; None: there was none."""
        return self._gradients.salvaged

    @property
    def status(self) -> StateStatus:
        """How complete this state is, as a source for others."""
        return self._status

    # --- undoing a step ---------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """What `apply` needs; where weights are not copied its cost does not depend on their size.

        Copies are valid as long as the snapshot is kept, and their memory is used again after that.
        """
        copies = self._undo.copies and not self._awaits_sync
        self._optimizers.begin(is_copied_whole=copies)
        self.step_course.begin(self.step)
        snapshot = self._capture(self._undo.copy if copies else lambda: None)
        self._gradients.begin_step(self.step)
        self._strangers.begin_step(self.step, is_first=self.step_course.before is None)
        self._earlier_numbers.keep(snapshot.step, snapshot.random)
        return snapshot

    def apply(self, snapshot: Snapshot) -> None:
        """Undo the step that began with this snapshot."""
        if snapshot.replaced != self._replaced:
            return  # another whole state has come since, by a sync that failed afterwards: there is no step to undo
        self._awaits_sync = True
        if self._random_when_failed is None:  # else a sync has failed, behind the step
            self._random_when_failed = (snapshot.step + 1, generators())
        is_untouched = self._optimizers.progress is OptimizerProgress.UNTOUCHED
        if is_untouched:
            self._gradients.keep(snapshot.step, self._structure.buffers())
        if snapshot.large is not None:
            if not is_untouched:
                self._gradients.forget()
        else:
            self._judge_weights(snapshot)
            self._optimizers.zero_grad()
            self._optimizers.put_members(snapshot.members)
            self._optimizers.zero_grad()  # of those that the step had taken from its optimizer, too
        self._own.restore(snapshot, self._trained)
        self._forget_if_wrong()

    def commit(self) -> None:
        """Called by the train loop when the step has succeeded."""
        self._own.count_step()
        self.step_course.committed()
        self._gradients.commit(self._structure.buffers)
        self._optimizers.commit()
        self._undo.step_succeeded()
        kind = self._kind_of_content()
        if kind != self._tried:
            self._tried = kind
            self.content_changes += 1
            self._try_to_send()

    def skip(self, snapshot: Snapshot) -> int:
        """See `State`: called where no optimizer has begun."""
        self._gradients.skip()
        if snapshot.large is None:
            self._optimizers.zero_grad()
        self.step_course.committed()
        return self._own.skip(snapshot, self._trained)

    def _is_untouched(self) -> bool:
        return self._optimizers.progress is OptimizerProgress.UNTOUCHED

    def _rank(self) -> int:
        return self._gradients.rank

    def _judge_weights(self, snapshot: Snapshot) -> None:
        """How complete the weights are, now that the step has failed."""
        if self._gradients.have_gone_on:
            self._optimizers.goes_on()
        progress = self._optimizers.progress
        was_complete = self._status is StateStatus.COMPLETE and self.step == snapshot.step
        if progress is OptimizerProgress.UNTOUCHED:
            return
        if progress is OptimizerProgress.UNDOABLE:
            self._optimizers.undo()
            self._own.extras.restore_kept()
        elif progress is OptimizerProgress.COMPLETE and was_complete:
            self.commit()
            self._ahead = self._capture(lambda: None).with_flags_of(snapshot)
            self._status = StateStatus.UNCOMMITTED
        else:
            self._status = StateStatus.PARTIAL
        self._gradients.forget()

    @property
    def _trained(self) -> Trained:
        return Trained((), self._optimizers, self._schedulers, self._structure)

    def _capture(self, copy_large: Callable[[], Large | None]) -> Snapshot:
        return self._own.snapshot(self._trained, copy_large=copy_large, replaced=self._replaced)

    # --- synchronizing members --------------------------------------------------------------------

    def sync(self, world_size: int | None = None, rank: int | None = None) -> None:
        """Synchronize all members with the best state there is, and wrap the module for the new group.

        Bytes move only to members that lack them. A receiver's own state stays whole until all has arrived.

        Raises:
            NonRetryableException: nobody holds a whole state, and there was no checkpoint to load. Its subclass
                UnfitError: this one has other logical shards, another salvage mode or another model than the source.
            RuntimeError: a peer was lost meanwhile.
        """
        self._gradients.leave_group()
        distributed = dist.is_available() and dist.is_initialized()
        world_size = world_size if world_size is not None else (dist.get_world_size() if distributed else 1)
        rank = rank if rank is not None else (dist.get_rank() if distributed else 0)
        device = message_device()
        self._stored.look()
        all_progress, offers, thawing, needs = self._gather_progress(world_size, rank, device)
        best = max(all_progress)
        if best.state_status is StateStatus.PARTIAL:
            raise NonRetryableException(
                "no member holds a whole state: the step failed inside the optimizer on every worker, or between more "
                "optimizer steps than any step before it had. Use ModelState(..., snapshot='full'), or give train() a "
                "checkpoint manager to go back to"
            )
        was_moved = self._synchronize(all_progress, rank, device)
        self._status, self._awaits_sync = StateStatus.COMPLETE, False
        self._ahead = self._random_when_failed = self._random_rows = None
        self._compare(world_size, device, thorough=was_moved, when="after the sync")
        if self.replica_comparison is not None and self.replica_comparison.names.get("frozen"):
            self._freeze_as(all_progress.index(best), world_size, device)
        self._own.extras.measure()
        self._undo.watch()
        in_sync = [best.state_status is StateStatus.COMPLETE and one == best for one in all_progress]
        offers = [offer if ok else 0 for offer, ok in zip(offers, in_sync, strict=True)]
        self._gradients.share_thawing(thawing, device)
        self._gradients.enter_group(offers, needs, self.step, rank, device)
        self._world.changed(world_size, rank)

    def _synchronize(self, all_progress: Sequence[StateProgress], rank: int, device: torch.device) -> bool:
        """Move the source's state to those who lack it; returns whether there are any."""
        world_size, best = len(all_progress), max(all_progress)
        source = all_progress.index(best)
        if all_progress[rank] == best and self._status is StateStatus.UNCOMMITTED:
            self._roll_forward()  # on every rank that is as good as the source: nothing is sent to those
        fresh = best.state_status is StateStatus.INITIAL
        stale = [other for other in range(world_size) if other != source and (fresh or all_progress[other] < best)]
        own = partial(newcomers.own_tensors, self.module)
        move = partial(synchronize, source=source, rank=rank, world_size=world_size, device=device, own=own)
        if stale:
            tree = self._sent() if rank == source else None
            received = move(tree, stale=stale)
            if fresh and tree is not None:
                check_sendable(tree, own)  # what no other can receive fails here too, before this one trains alone
            if received is not None:
                was_in_sync = self._status is not StateStatus.INITIAL
                newcomers.receive(
                    received, self.module, self._own, self._trained, was_in_sync=was_in_sync, source=source
                )
                self._status = StateStatus.COMPLETE
                self._drawn_alike = received["drawn_alike"]
                self._replaced += 1
                if self.step_course.goes_back and self._earlier_numbers.put(self.step):
                    pass  # as this rank has drawn them
                elif received["random_rows"] is not None:
                    put_rows_of_generators(received["random_rows"], rank)
                else:
                    if self._random_when_failed is not None and self._random_when_failed[0] == self.step:
                        self._random_when_failed[1].put()  # of after the step, which others have committed
                    put_row_of_generators(received["drawing"], self._drawn_alike)
        if best.state_status is StateStatus.UNCOMMITTED:
            equals = [other for other in range(world_size) if other != source and all_progress[other] == best]
            self._own.synchronize(self._trained, equals, move)
            self._replaced += 1  # not before: if a peer is lost until here, all this comes again
        return bool(stale)

    def _sent(self) -> dict[str, Any]:
        tree = newcomers.sent(self.module, self._own, self._trained, self._stored.changed_attributes())
        drawing = {"drawn_alike": sorted(self._drawn_alike), "drawing": row_of_generators()}
        return {**tree, **drawing, "random_rows": self._random_rows}

    def _kind_of_content(self) -> list[int]:
        """Changes when the state gets content of a new kind; computed after each step, so it looks at no value."""
        values = self._own.extras.values
        self._types_of_extra.update(map(type, values.values()))
        # a name that is new in each step is nothing new, and neither is a value that is of one type now and then
        kind = [len(values).bit_length(), len(self._types_of_extra)]
        for optimizer in self._optimizers.objects:
            of_one = next(iter(optimizer.state.values()), ())
            kind += (bool(optimizer.state), len(optimizer.param_groups), len(of_one) if isinstance(of_one, dict) else 0)
        return kind

    def _try_to_send(self) -> None:
        """Take the state apart and put it together as if it had been sent: else it shows when a worker is lost."""
        try:
            check_sendable(self._sent(), partial(newcomers.own_tensors, self.module))
        except Exception as error:  # noqa: BLE001 - whatever it is, this worker does not need it yet
            log.warning(
                "step %d: no worker that joins, or is started again, could receive this state, so the run goes on with "
                "those that it has, and each that is lost is lost for good: %s",
                self.step, error,
            )  # fmt: skip

    def _gather_progress(
        self, world_size: int, rank: int, device: torch.device
    ) -> tuple[list[StateProgress], list[int], list[int], Needs]:
        """By rank: how complete and recent its state is, what it has kept of a failed step; what any rank needs."""
        gradients, random = self._gradients, digests_of_generators()
        needs, kind, course = gradients.needs, gradients.kind, digest_of_usual(self.step_course.usual)
        offer, thaws, withdrawn = gradients.offer(self.step), gradients.thaws, self.step_course.withdrawn
        mine = [int(self._status), self.step, offer, thaws, course, withdrawn, *random, *needs, *kind]
        rows = gathered_numbers(mine, world_size, device)
        said = [StateProgress.of(StateStatus(status), step) for status, step, *_ in rows]
        everyones = [Needs(*row[6 + len(random) : -len(kind)]) for row in rows]
        progress = self._standing(said, [one.gone_back for one in everyones], rank)
        progress = standing(progress, [row[5] for row in rows])
        self.step_course.goes_back = progress != said or self._is_to_go_back
        if self.step_course.goes_back and self.step_course.withdrawn:
            log.warning("%s", text_of(self.step_course.withdrawn))
        best = max(progress)
        source = progress.index(best)
        drawing = [row[6 : 6 + len(random)] for row, one in zip(rows, progress, strict=True) if one == best]
        if len(drawing) > 1:
            self._drawn_alike = drawn_alike(drawing)
        self.step_course.is_common = len({row[4] for row in rows}) == 1
        here, there = rows[rank][-len(kind) :], rows[source][-len(kind) :]
        if here != there:
            raise UnfitError(
                f"this worker's ModelState has {kind_text(here)}, and that of rank {source}, which the others go by, "
                f"{kind_text(there)}: start every worker with the same"
            )
        most = Needs(*(max(column) for column in zip(*everyones, strict=True)))
        return progress, [row[2] for row in rows], [row[3] for row in rows], most

    def _roll_forward(self) -> None:
        """Everybody's optimizer had stepped when the step failed, so what is left of the weights is after that step."""
        assert self._ahead is not None
        log.warning("step %d: every survivor had completed it when it failed, so it is committed", self._ahead.step)
        self._own.restore(self._ahead, self._trained)

    def begin_replica_comparison(self) -> Callable[[], ReplicaDigests] | None:
        """Of the weights, which part where anything else has, and of where optimizers keep state. See `State`."""
        if self.replica_comparison is not None and not self.replica_comparison.is_in_sync:
            return None  # that was said
        of_state = self._begun_digest()
        of_random = digests_of_generators()
        return lambda: ReplicaDigests(of_state() >> 2, *of_random)

    # --- saving -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything, as a tree of plain values and tensors; the tensors are not copied."""
        return self._stored.plain_tree(self._trained)

    def load_state_dict(self, tree: dict[str, Any], *, with_random: bool = True) -> None:
        """The inverse of `state_dict`; raises what the parts raise if it does not fit them."""
        was_trained = self._status is not StateStatus.INITIAL
        is_all_known = type(self).load_state_dict is ModelState.load_state_dict
        self._random_rows = self._stored.load(
            tree, self._trained, with_random=with_random, was_trained=was_trained, is_all_known=is_all_known
        )
        if self._random_rows is not None:
            self._drawn_alike = rows_draw_alike(self._random_rows)
        self._status = StateStatus.COMPLETE
        self._replaced += 1

    def checkpoint_tree(self) -> dict[str, Any]:
        """What is saved, see `model.stored_form`; no weight is copied."""
        tree = self.state_dict()
        return {**tree, **self._stored.beside(tree)}

    def load_checkpoint_tree(self, tree: dict[str, Any]) -> None:
        """Set the whole state from what was saved, in any form."""
        self.load_state_dict(tree)

    def replicated(self, names: Sequence[str]) -> Collection[str]:
        """Weights and the optimizer's tensors are equal on all ranks; buffers and `extra` may be each rank's own."""
        weights = {f"module/{name}" for name in named_parameters(self.module)}
        return {name for name in names if name.startswith("optimizer/") or name in weights}

    def of_each_rank(self, names: Sequence[str]) -> Collection[str]:
        """The random numbers."""
        return {name for name in names if name.startswith(OF_EACH_RANK)}

    def save(self, stream: BinaryIO) -> None:
        """Write everything to a file-like object. Raises TypeError for what `load` would refuse."""
        torch_stream.write(self.checkpoint_tree(), stream)

    def load(self, stream: BinaryIO) -> None:
        """Read what `save` wrote; executes no pickled code."""
        self.load_state_dict(torch_stream.read(stream))

    def check_savable(self) -> None:
        """See `State`."""
        torch_stream.check(self.checkpoint_tree())

    # --- inside -----------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # a half-made step belongs to this process alone
        return {**self.__dict__, "_ahead": None, "_random_when_failed": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
