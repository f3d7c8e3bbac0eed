"""ShardedState: a State for a model of which every worker holds a part (FSDP2, HSDP), for groups that change.

What becomes of a step in which a worker is lost is decided in `commit_rule`, who moves which part to whom in `offers`.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from torchelastic.checkpoint.engine.read_rules import StoredParts
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.errors import NonRetryableException, RetryableException
from torchelastic.group.communicators import wait_for_collectives
from torchelastic.group.step_course import BACKWARD, COUNTED, FORWARD, REDUCTION, StepCourse
from torchelastic.inventory.generators import put_rows_of_generators, seeded
from torchelastic.inventory.stored_values import Built as AsBuilt
from torchelastic.metrics import publish_metric
from torchelastic.model import wrapping
from torchelastic.model.batch_norms import has_single_samples, least_local_batch, require_several_values
from torchelastic.model.companions import Companions, Snapshot, WithCompanions
from torchelastic.model.stored_form import OF_EACH_RANK
from torchelastic.model.transfer import message_device
from torchelastic.model.world_change import WorldWatch
from torchelastic.rendezvous.records import StateStatus
from torchelastic.sharded.built import Build, Built, other_parameters
from torchelastic.sharded.commit_rule import ChosenState, NoWholeState, choose, whole_in_copies
from torchelastic.sharded.companions import checkpoint_tree, from_bytes, load_companions
from torchelastic.sharded.copies import Copies, copy_partners, say_if_memory_is_short
from torchelastic.sharded.handover import (
    HeldState,
    check_same_models,
    control_group,
    held_of_checkpoint,
    offer_of,
    rows_in,
    take_over,
)
from torchelastic.sharded.initial import Initialize, complete_model, initialize_model
from torchelastic.sharded.live import Live
from torchelastic.sharded.mesh import FullShard, MeshRule, data_place, forget_earlier_meshes
from torchelastic.sharded.offers import STORED, Offer, Phase, Version, describe_missing
from torchelastic.sharded.plain_tensors import PlainTensorComparison, plain_names
from torchelastic.sharded.stored_names import names_of_saved
from torchelastic.sharded.transfers import all_gather
from torchelastic.sharded.weighting import GradientWeights
from torchelastic.state import State

log = logging.getLogger(__name__)

NOT_ALONE = (
    "no worker has the whole of a ShardedState, so one alone can neither save nor load it: give train() a "
    "TieredCheckpointManager, to which every worker writes its parts"
)


class ShardedState(WithCompanions, State):
    """A sharded model with its optimizer and all that goes with them; lives through losses, joins and drains.

    For each new group your `build` makes model and optimizer anew, on the mesh of that group; their contents come from
    the memory of the ranks that are left, each rank receiving only its own parts. What a lost rank held comes from a
    copy that another rank keeps of it. In a train step use `state.model`, `state.optimizer` and `state.scheduler`: they
    are other objects after each change of the group.

    Every rank makes one with the same arguments, on the training thread, and uses it there.

    Args:
        build: given the mesh, returns (model, optimizer) or (model, optimizer, scheduler), the same for any mesh:
            makes the model (on the meta device, if it does not fit into one worker), calls `fully_shard` on it with
            this mesh, and makes the optimizer of its parameters after that.
        mesh: how a world size becomes a mesh: `FullShard`, `HybridShard`, or a function of yours.
        replicas: on how many other ranks, on other hosts where there are any, each rank's parts are copied. 0: none;
            with `HybridShard` over two hosts or more every part is there twice already.
        every: steps from one copy to the next; after a loss so many are repeated at most, with the same samples. One
            more where a copy takes longer than that.
        initialize: see `initialize_model`; for models that are built on the meta device.
        seed: of the first values: `build` and `initialize` draw from it, alike on all ranks.
        sampler: as for `ModelState`. It deals the samples out to the ranks that have different ones (see `data_dims`).
        extra: as for `ModelState`; small.
        data_dims: the dimensions of the mesh whose ranks have different samples. Default: all but those with the usual
            names of others ("tp", "cp", "pp", "ep").
        host: names what is lost together with this rank; default: the host name.

    Attributes:
        step: committed steps.
        mesh: of the present group; None before the first.

    Raises:
        ValueError: a number that is out of range, or a sampler that cannot be kept.
    """

    def __init__(
        self,
        build: Build,
        *,
        mesh: MeshRule = FullShard(),  # noqa: B008 - a value
        replicas: int = 1,
        every: int = 1,
        initialize: Initialize | None = None,
        seed: int = 0,
        sampler: Any = None,
        extra: dict[str, Any] | None = None,
        data_dims: Collection[str] | None = None,
        host: str | None = None,
    ) -> None:
        if replicas < 0 or every < 1:
            raise ValueError(f"replicas={replicas} must be at least 0, and every={every} at least 1")
        self._build, self._mesh_rule, self._initialize, self._seed = build, mesh, initialize, seed
        self._replicas, self._every, self._data_dims = replicas, every, data_dims
        self._host = host or socket.gethostname()
        self._own = Companions(sampler, extra)
        self._as_built: dict[str, AsBuilt] = {}
        self._live = Live(self._own)
        self._copies = Copies()
        self._plain = PlainTensorComparison()
        self._world = WorldWatch()
        self.step_course = StepCourse(self._own.batches, self._live.votes, self._live.optimizer_steps)
        self._gradients = GradientWeights(sampler, self._own.counts, self._backward_begins)
        self._backward = self._gradients.backward
        self._control: dist.ProcessGroup | None = None
        self._unconfirmed: HeldState | None = None  # from a sync of which it is not known whether all have ended it
        self._loaded: tuple[Any, Sequence[StoredParts], int] | None = None  # from a checkpoint
        self._lost_step = -1
        self._domains: list[str] = []  # of the ranks of the present group
        self._has_looked_at_memory = False
        wrapping.warm_up()  # fully_shard imports it too, and the others would wait for this worker

    step_course: StepCourse

    # --- what the step uses ---------------------------------------------------------------------------------------

    @property
    def model(self) -> torch.nn.Module:
        """What `build` has made for the present group."""
        return self._live.present.model

    @property
    def optimizer(self) -> Any:
        """The same, as `build` returned it."""
        return self._live.present.optimizer

    @property
    def scheduler(self) -> Any:
        """The same; None: `build` returned none."""
        return self._live.present.scheduler

    @property
    def mesh(self) -> DeviceMesh:
        """Of the present group."""
        return self._live.present.mesh

    @property
    def status(self) -> StateStatus:
        """COMPLETE where this rank has parts of a state that may be gone on from."""
        has_parts = self._live.version is not None or bool(self._copies.held)
        return StateStatus.COMPLETE if has_parts and self._lost_step < 0 else StateStatus.INITIAL

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around all backward passes of a step but the last: gradients add up here, whole, and are not reduced yet."""
        model = self.model
        if not isinstance(model, FSDPModule):
            raise ValueError("no_sync is for a model on which fully_shard was called: call it on the whole model too")
        model.set_requires_gradient_sync(False)
        self._gradients.is_accumulating = True
        try:
            yield
        finally:
            self._gradients.is_accumulating = False
            model.set_requires_gradient_sync(True)

    # --- a step ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """What `apply` needs; its cost does not depend on the size of the model."""
        self._live.begin_step()
        self._gradients.begin_step()
        self.step_course.begin(self.step)
        return self._live.snapshot()

    def commit(self) -> None:
        """Called by the train loop when the step has succeeded."""
        self._live.commit()
        self.step_course.committed()
        self._copy_if_due()

    def skip(self, snapshot: Snapshot) -> int:
        """See `State`: called on all ranks, where no optimizer has begun."""
        self.step_course.committed()
        return self._live.skip(snapshot)

    def _is_untouched(self) -> bool:
        return self._live.phase is Phase.UNTOUCHED

    def _rank(self) -> int:
        return self._live.rank

    def _forward_begins(self, _model: torch.nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled():
            self.step_course.pass_(FORWARD)

    def _backward_begins(self) -> None:
        self.step_course.pass_(COUNTED if self._own.counts.is_running else BACKWARD)

    def apply(self, snapshot: Snapshot) -> None:
        """Undo the step that began with this snapshot, as far as this rank can alone; `sync` does the rest."""
        self._live.undo(snapshot)

    def hand_over(self, leaving: bool) -> None:
        """Where a rank leaves for good: have a copy of the state of now, so that its parts stay."""
        if self._control is None or not self._live.is_in_sync or dist.get_world_size() == 1:
            return
        try:
            somebody = torch.tensor([int(leaving)])
            dist.all_reduce(somebody, op=dist.ReduceOp.MAX, group=self._control)
            if int(somebody):
                self._copy_all()
        except (RuntimeError, CheckpointError) as error:  # a peer is lost, or there is no memory for copies
            log.warning("the newest state is not copied, and what each worker holds has to be enough: %s", error)

    def _copy_all(self) -> None:
        """Copies of the state of now that are whole on every rank."""
        if not self._copies.is_on:
            self._copies.enter_group(copy_partners(self._domains, 1), None)
        self._end_copy()
        if self._copies.newest != self._live.version:
            self._begin_copy()
            self._end_copy()

    def _end_copy(self) -> None:
        self._copies.wait_until_received()
        self._agree_on_copies()

    def _agree_on_copies(self) -> None:
        """Tell all ranks how far the copies are here; returns on none before every rank has called it."""
        assert self._control is not None
        finished = torch.tensor([self._copies.finished])
        dist.all_reduce(finished, op=dist.ReduceOp.MIN, group=self._control)
        self._copies.all_have_finished(int(finished))

    def _vote(self, is_first: bool) -> None:
        """Before the first optimizer of a step begins: see `commit_rule`. Says how far the copies are, too."""
        if not is_first:
            self._own.counts.optimizer_begins()
        if not is_first or self._live.phase is not Phase.UNTOUCHED:
            return  # the latter: this rank completes the step of a group that has ended
        self.step_course.pass_(REDUCTION)
        self._gradients.check()
        wait_for_collectives()  # what FSDP2 has reduced the gradients with
        self._copies.wait_until_copied()
        self._live.phase = Phase.READY
        if self._control is not None:
            if self._plain.begin_step():
                built = self._live.present
                self._plain.compare(built.layout(), built.tensors(), self._control)
            self._agree_on_copies()

    def _copy_if_due(self) -> None:
        version = self._live.version
        if version is not None and self._copies.is_due(version, self._every):
            self._begin_copy()

    def _begin_copy(self) -> None:
        began_s = time.perf_counter()
        version, built = self._live.version, self._live.present
        assert version is not None
        self._copies.begin(version, built.layout(), built.tensors(), self._live.companions(built))
        publish_metric("torchelastic", "sharded.copy.duration.ms", 1000 * (time.perf_counter() - began_s))

    # --- a new group ----------------------------------------------------------------------------------------------

    def sync(self, world_size: int | None = None, rank: int | None = None) -> None:
        """Build the model for this group, and fill it with the latest state of which every part is left.

        Until every rank has said that it has its parts, each keeps those that it had.

        Raises:
            NonRetryableException: no state is whole, and there was no checkpoint; or `build` makes no model that fits.
            RuntimeError: a peer was lost meanwhile.
        """
        self._copies.leave_group()
        self._live.is_in_sync = False
        self._control = control_group()
        world_size = world_size if world_size is not None else dist.get_world_size()
        rank = rank if rank is not None else dist.get_rank()
        forget_earlier_meshes()
        built = self._built(world_size)
        needed = built.layout(parameters_only=True)
        held = self._held(built)
        mine = offer_of(
            held,
            self._live.phase,
            needed,
            generation=self._live.generation,
            token=secrets.randbits(62),
            domain=self._host,
            lost=self._lost_step,
            step=self.step,
            rank=self._live.rank,
        )
        offers = all_gather(self._control, mine, Offer)
        check_same_models(offers)
        choice, whole_copies = choose(offers, needed), whole_in_copies(offers, needed)
        if isinstance(choice, NoWholeState):
            version, own = self._start_afresh(built, offers, choice), frozenset[str]()
        else:
            version = choice.version
            # what the ranks do not go on from is given up here, and not with the group: the new parts need its memory
            chosen = {number: held[number] for number in choice.holds[rank]}
            if not any(each.is_live for each in chosen.values()):
                self._live.release()
            self._copies.keep_only({version, whole_copies})
            held.clear()
            own = frozenset(self._take_over(built, chosen, offers, choice, rank))
            chosen.clear()  # else it would keep the memory of what is given up when all have their parts
        companions = self._live.companions(built, must_be=version.generation == STORED)
        self._unconfirmed = HeldState(version, built.layout(), built.tensors(), companions)
        self._agree(built)  # everybody has what it needs: what it had may go
        self._enter(built, version, offers, whole_copies)
        self._plain.enter_group(plain_names(built.layout()), own)
        self._world.changed(world_size, rank)
        if version.step:
            self._copy_if_due()

    def _agree(self, built: Built) -> None:
        """Returns on no rank before every rank has called it; and what one of them needs, all have then."""
        needs = torch.tensor([int(self._own.counts.are_used), least_local_batch(built.model)])
        dist.all_reduce(needs, op=dist.ReduceOp.MAX, group=self._control)
        are_counted, samples = needs.tolist()
        self._own.counts.are_used = bool(are_counted)
        if hasattr(self.sampler, "set_min_local_batch"):
            self.sampler.set_min_local_batch(samples)

    def _built(self, world_size: int) -> Built:
        return Built(
            self._build, self._mesh_rule(world_size), seed=self._seed, before_each=self._vote, own=self._own,
            as_built=self._as_built,
        )  # fmt: skip

    def _held(self, built: Built) -> list[HeldState]:
        """All that this rank has, wherever it is."""
        live = self._live.held()
        held = [] if live is None else [live]
        held += [
            HeldState(copy.version, copy.layout, copy.tensors, copy.companions, is_copy=True,
                 is_own=copy.owner is None, owner=copy.owner)
            for copy in self._copies.held
        ]  # fmt: skip
        if self._unconfirmed is not None:
            held.append(self._unconfirmed)
        if self._loaded is not None:
            held += held_of_checkpoint(*self._loaded, built)
        return held

    def _start_afresh(self, built: Built, offers: Sequence[Offer], nothing: NoWholeState) -> Version:
        """There is no state to go on from: the first values, or an error where there was one."""
        absent = sorted(name for name, regions in nothing.missing.items() if not regions)
        if absent:
            raise NonRetryableException(other_parameters(absent))
        lost_step = max(offer.lost for offer in offers)
        # nobody has any part: new ranks, or ranks whose optimizers were interrupted
        lost_step = max(lost_step, nothing.newest.step if nothing.newest else max(offer.step for offer in offers))
        if lost_step > 0:
            why = f"no surviving worker holds {describe_missing(nothing.missing) or 'any part of the model'}"
            if nothing.newest is not None and not nothing.missing:
                why = "no surviving worker can give what goes with its parts, and the log of each says why"
            if any(offer.lost >= 0 for offer in offers):
                raise NonRetryableException(
                    f"{why} (the run was at step {lost_step}), and there is no checkpoint to load: more workers were "
                    "lost at once than there were replicas, or failed inside optimizer.step(); give train() a "
                    "TieredCheckpointManager, or ShardedState more replicas"
                )
            self._lost_step = lost_step
            raise RetryableException(f"{why}: trying to load a checkpoint")
        with seeded(self._seed):
            initialize_model(built.blank, self._initialize)
        return Version(STORED, 0, 0)

    def _take_over(
        self, built: Built, held: Mapping[int, HeldState], offers: Sequence[Offer], choice: ChosenState, rank: int
    ) -> Collection[str]:
        """Returns the names of those of the optimizers' plain tensors that are each rank's own."""
        assert self._control is not None
        if rank in choice.completing:
            self._live.complete_step(choice.version)
        repeated = max(offer.live.version.step for offer in offers if offer.live) if any(o.live for o in offers) else 0
        if repeated > choice.version.step:
            log.warning(
                "step %d: shards were lost; rolled back to the replicas of step %d", repeated, choice.version.step
            )
        taken = take_over(built, held, offers, choice, group=self._control, device=message_device())
        if rank in choice.completing:
            self._live.completed(taken.companions)
        # who has trained goes back to the checkpoint, and has nothing of later steps in `extra`
        is_stored = choice.version.generation == STORED and self._live.built is None
        companions = from_bytes(taken.companions)
        load_companions(self._own, companions, built, with_random=taken.with_random, is_stored=is_stored)
        with seeded(self._seed):
            complete_model(built.blank, self._initialize)
        if not taken.with_random and self._live.random_when_failed is not None:
            self._live.random_when_failed.put()
        if choice.version.generation == STORED:
            self._draw_as_saved(rank)
        publish_metric("torchelastic", "sharded.lost.steps", max(0, repeated - choice.version.step))
        publish_metric("torchelastic", "sharded.received.bytes", taken.received_bytes)
        return taken.own

    def _draw_as_saved(self, rank: int) -> None:
        """Each rank has read the random numbers of some that have saved."""
        assert self._control is not None
        mine = [] if self._loaded is None else rows_in(self._loaded[1])
        rows = dict(row for of_rank in all_gather(self._control, mine, list[tuple[int, bytes]]) for row in of_rank)
        if rows and rows.keys() == set(range(len(rows))):
            saved = [torch.frombuffer(bytearray(rows[number]), dtype=torch.uint8) for number in range(len(rows))]
            put_rows_of_generators(torch.stack(saved), rank)

    def _enter(self, built: Built, version: Version, offers: Sequence[Offer], whole_copies: Version | None) -> None:
        """This rank has its parts, and so has every other."""
        generation = max(offer.generation for offer in offers) + 1
        self._live.enter_group(built, version, generation, offers[0].token, dist.get_rank(self._control))
        self._unconfirmed = self._loaded = None
        self._lost_step = -1
        self._domains = domains = [offer.domain for offer in offers]
        if not self._has_looked_at_memory:
            self._has_looked_at_memory = True
            say_if_memory_is_short(built.expected_bytes(), self._replicas, domains.count(self._host))
        self._copies.enter_group(copy_partners(domains, self._replicas), whole_copies)
        place = data_place(built.mesh, self._data_dims)
        if hasattr(self.sampler, "set_world"):
            self.sampler.set_world(place.rank, place.size)
        self._gradients.enter_group(built.model, place.size, self._control)
        if has_single_samples(self.sampler):
            require_several_values(built.model)
        # before the one with which FSDP gathers parameters
        built.model.register_forward_pre_hook(self._forward_begins, prepend=True)
        self._own.extras.measure()

    # --- saving ---------------------------------------------------------------------------------------------------

    def checkpoint_tree(self) -> dict[str, Any]:
        """The same form as that of `ModelState`, with DTensors; nothing is copied."""
        return checkpoint_tree(self._own, self._live.present, self._plain.equal, dist.get_rank())

    loads_parts = True

    def load_checkpoint_parts(self, tree: Any, parts: Sequence[StoredParts], step: int) -> None:
        """Take what was read, of this state or of a `ModelState`; the next sync gives each rank its parts."""
        self._loaded = (tree, parts, step)

    def replicated(self, names: Sequence[str]) -> Collection[str]:
        """Those of the optimizers' plain tensors that were compared; the sharded ones are parts already."""
        named = names_of_saved((name for name in names if name.startswith("optimizer/")), self._live.present)
        return {stored for stored, name in named.items() if name is None or name in self._plain.equal}

    def of_each_rank(self, names: Sequence[str]) -> Collection[str]:
        """The random numbers."""
        return {name for name in names if name.startswith(OF_EACH_RANK)}

    def save(self, stream: BinaryIO) -> None:  # noqa: ARG002 - part of the contract
        """Raises NonRetryableException: no single rank has the whole state."""
        raise NonRetryableException(NOT_ALONE)

    def load(self, stream: BinaryIO) -> None:  # noqa: ARG002 - part of the contract
        """As `save`."""
        raise NonRetryableException(NOT_ALONE)
