"""ShardedState: a State for a model of which every worker holds a part (FSDP2, HSDP), for groups that change.

What becomes of a step in which a worker is lost is decided in `commit_rule`, who moves which part to whom in `regions`.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchelastic.coordinator import NonRetryableException, RetryableException
from torchelastic.metrics import publish_metric
from torchelastic.model import random_state
from torchelastic.model.optimizers import Progress
from torchelastic.model.several import refuse_stateless
from torchelastic.model.snapshot import Snapshot
from torchelastic.model.transfer import message_device
from torchelastic.model.world_change import WorldChange, WorldWatch
from torchelastic.rendezvous.records import Standing
from torchelastic.sharded.built import Build, Built
from torchelastic.sharded.commit_rule import Choice, Nothing, choose, next_version, whole_in_copies
from torchelastic.sharded.companions import Companions, from_bytes
from torchelastic.sharded.copies import Copies, copy_partners
from torchelastic.sharded.handover import Held, check_same_models, control_group, held_of_tree, offer_of, take_over
from torchelastic.sharded.initial import Initialize, initialize_model
from torchelastic.sharded.mesh import FullShard, MeshRule, data_place, forget_earlier_meshes
from torchelastic.sharded.regions import (
    Layout,
    Offer,
    Phase,
    Version,
    describe_missing,
    offer_from_plain,
    offer_to_plain,
)
from torchelastic.sharded.transfers import all_gather_plain
from torchelastic.sharded.weighting import Weighting
from torchelastic.state import State

log = logging.getLogger(__name__)

NOT_ALONE = (
    "no worker has the whole of a ShardedState, so one alone can neither save nor load it: give train() a "
    "TieredCheckpointManager, to which every worker writes its parts"
)


class ShardedState(State):
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
        ValueError: a number that makes no sense, or a sampler that cannot be kept.
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
        refuse_stateless("sampler", sampler)
        self._build, self._mesh_rule, self._initialize, self._seed = build, mesh, initialize, seed
        self._replicas, self._every, self._data_dims = replicas, every, data_dims
        self._host = host or socket.gethostname()
        self._own = Companions(sampler, {} if extra is None else extra)
        self._built: Built | None = None
        self._copies = Copies()
        self._world = WorldWatch()
        self._weighting = Weighting(sampler)
        self._control: dist.ProcessGroup | None = None
        # of which state of the run the live parts are, how far the step under way has come, and the last group's marks
        self._version: Version | None = None
        self._phase = Phase.NONE
        self._generation = self._token = 0
        self._is_in_sync = False
        # of attempts that have failed
        self._live_companions: bytes | None = None
        self._random_when_failed: random_state.RandomState | None = None
        self._settings_when_ready: tuple[tuple[dict[str, Any], ...], ...] = ()
        self._unconfirmed: Held | None = None
        self._lost_step = -1
        # from a checkpoint
        self._loaded_tree: dict[str, Any] | None = None

    # --- what the step uses ---------------------------------------------------------------------------------------

    @property
    def model(self) -> torch.nn.Module:
        """What `build` has made for the present group."""
        return self._present.model

    @property
    def optimizer(self) -> Any:
        """The same, as `build` returned it."""
        return self._present.optimizer

    @property
    def scheduler(self) -> Any:
        """The same; None: `build` returned none."""
        return self._present.scheduler

    @property
    def mesh(self) -> DeviceMesh:
        """Of the present group."""
        return self._present.mesh

    @property
    def _present(self) -> Built:
        if self._built is None:
            raise RuntimeError("there is no group yet: model, optimizer and mesh exist from the first step on")
        return self._built

    @property
    def step(self) -> int:
        """Committed steps."""
        return self._own.step

    @property
    def sampler(self) -> Any:
        """As given."""
        return self._own.sampler

    @property
    def extra(self) -> dict[str, Any]:
        """Your own values."""
        return self._own.registered.values

    @property
    def epoch(self) -> int:
        """The sampler's epoch where it has one, else what was set."""
        return int(getattr(self.sampler, "epoch", self._own.own_epoch))

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._own.own_epoch = value

    @property
    def end_step(self) -> int | None:
        """`step` at the end of the run, as far as the sampler knows; None: it does not. Any time."""
        left = getattr(self.sampler, "batches_left", None)
        return None if left is None else self.step + int(left)

    @property
    def standing(self) -> Standing:
        """WHOLE where this rank has parts of a state that may be gone on from."""
        has_parts = self._version is not None or bool(self._copies.held)
        return Standing.WHOLE if has_parts and self._lost_step < 0 else Standing.FRESH

    def on_world_change(self, callback: Callable[[WorldChange], Any]) -> Callable[[WorldChange], Any]:
        """As `ModelState.on_world_change`."""
        self._world.add(callback)
        return callback

    # --- a step ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """What `apply` needs; its cost does not depend on the size of the model."""
        if self._is_in_sync and self._built is not None:
            self._built.optimizers.begin()
            self._weighting.begin_step()
            self._phase = Phase.UNTOUCHED
        return self._own.snapshot(self._built)

    def commit(self) -> None:
        """Called by the train loop when the step has succeeded."""
        built = self._present
        built.optimizers.commit()
        self._steps_count()
        self._phase = Phase.UNTOUCHED
        self._copy_if_due(built)

    def apply(self, snapshot: Snapshot) -> None:
        """Undo the step that began with this snapshot, as far as this rank can alone; `sync` does the rest."""
        built = self._built
        if built is None or not self._is_in_sync:
            self._own.restore(snapshot, built)  # no step has begun since the last one was undone
            return
        self._is_in_sync = False
        self._random_when_failed = random_state.capture()
        progress = built.optimizers.progress
        if progress is Progress.UNDOABLE:
            built.optimizers.undo()
        elif progress is Progress.TORN:
            self._phase, self._version = Phase.NONE, None
        elif progress is Progress.COMPLETE and self.step == snapshot.step:
            self._steps_count()
            self._phase = Phase.DONE
            self._live_companions = self._own.to_bytes(built)
        can_complete = self._phase is Phase.READY and built.optimizers.steps_once
        if can_complete:
            self._settings_when_ready = built.optimizers.hyperparameters()  # of this step, such as its learning rate
        else:
            built.optimizers.zero_grad()
            self._phase = Phase.UNTOUCHED if self._phase is Phase.READY else self._phase
        if self._phase is not Phase.DONE:
            self._own.restore(snapshot, built)

    def _steps_count(self) -> None:
        """The live parts are those of one more step."""
        assert self._version is not None
        self._version = next_version(self._version, self._generation, self._token)
        self._own.step += 1
        if hasattr(self.sampler, "commit"):
            self.sampler.commit()

    def _vote(self) -> None:
        """Before the first optimizer of a step begins: see `commit_rule`. Says how far the copies are, too."""
        if self._phase is not Phase.UNTOUCHED:
            return  # this rank completes the step of a group that has ended
        self._weighting.check()
        self._copies.wait_until_copied()
        self._phase = Phase.READY
        if self._control is not None:
            finished = torch.tensor([self._copies.finished])
            dist.all_reduce(finished, op=dist.ReduceOp.MIN, group=self._control)
            self._copies.all_have_finished(int(finished))

    def _copy_if_due(self, built: Built) -> None:
        if self._version is not None and self._copies.is_due(self._version, self._every):
            began_s = time.perf_counter()
            tensors = built.tensors()
            self._copies.begin(self._version, built.layout(), tensors, self._own.to_bytes(built))
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
        self._is_in_sync = False
        distributed = dist.is_available() and dist.is_initialized()
        world_size = world_size if world_size is not None else (dist.get_world_size() if distributed else 1)
        rank = rank if rank is not None else (dist.get_rank() if distributed else 0)
        self._control = control_group()
        forget_earlier_meshes()
        built = Built(self._build, self._mesh_rule(world_size), seed=self._seed, before_first=self._vote)
        needed = built.layout(parameters_only=True)
        held = self._held(built)
        mine = offer_of(
            held, self._phase, needed, generation=self._generation, token=secrets.randbits(62), domain=self._host,
            lost=self._lost_step,
        )  # fmt: skip
        offers = [offer_from_plain(each) for each in all_gather_plain(self._control, offer_to_plain(mine))]
        check_same_models(offers)
        choice = choose(offers, needed)
        if isinstance(choice, Nothing):
            version = self._start_afresh(built, offers, choice)
        else:
            version = choice.version
            self._take_over(built, held, offers, choice, rank)
        self._unconfirmed = Held(version, built.layout(), built.tensors(), self._own.to_bytes(built))
        dist.all_reduce(torch.zeros(1), group=self._control)  # everybody has what it needs: what it had may go
        self._enter(built, version, offers, needed)
        self._world.tell(world_size, rank)
        self._copy_if_due(built)

    def _held(self, built: Built) -> list[Held]:
        """All that this rank has, wherever it is."""
        held = []
        if self._version is not None and self._built is not None and self._phase is not Phase.NONE:
            companions = self._live_companions or self._own.to_bytes(self._built)
            held.append(Held(self._version, self._built.layout(), self._built.tensors(), companions, is_live=True))
        held += [
            Held(copy.version, copy.slot.layout, copy.slot.tensors, copy.companions, is_copy=True,
                 is_own=copy.owner is None)
            for copy in self._copies.held
        ]  # fmt: skip
        if self._unconfirmed is not None:
            held.append(self._unconfirmed)
        if self._loaded_tree is not None:
            held.append(held_of_tree(self._loaded_tree, built))
        return held

    def _start_afresh(self, built: Built, offers: Sequence[Offer], nothing: Nothing) -> Version:
        """There is no state to go on from: the first values, or an error where there was one."""
        lost_step = max([offer.lost for offer in offers] + [nothing.newest.step if nothing.newest else 0])
        if lost_step > 0:
            why = f"no worker that is left has {describe_missing(nothing.missing)} of any state of the run"
            if any(offer.lost >= 0 for offer in offers):
                raise NonRetryableException(
                    f"{why}, the last of which was that after step {lost_step}, and there is no checkpoint to load: "
                    "more workers were lost at once than there were copies; give train() a TieredCheckpointManager, or "
                    "ShardedState more replicas"
                )
            self._lost_step = lost_step
            raise RetryableException(f"{why}: a checkpoint is loaded, if there is one")
        if built.was_on_meta:
            with random_state.seeded(self._seed):
                initialize_model(built.model, self._initialize)
        return Version(0, 0, 0)

    def _take_over(
        self, built: Built, held: Sequence[Held], offers: Sequence[Offer], choice: Choice, rank: int
    ) -> None:
        assert self._control is not None
        if rank in choice.completing:
            self._complete_step(choice.version)
        repeated = max(offer.live.version.step for offer in offers if offer.live) if any(o.live for o in offers) else 0
        if repeated > choice.version.step:
            log.warning("parts were lost: back to the copies of step %d, from %d", choice.version.step, repeated)
        taken = take_over(built, held, offers, choice, group=self._control, device=message_device())
        self._own.load(from_bytes(taken.companions), built, with_random=taken.with_random)
        if rank in choice.completing and self._random_when_failed is not None:
            random_state.restore(self._random_when_failed)
        publish_metric("torchelastic", "sharded.lost.steps", max(0, repeated - choice.version.step))
        publish_metric("torchelastic", "sharded.received.bytes", taken.received_bytes)

    def _complete_step(self, version: Version) -> None:
        """Others have computed this step: so does this rank, which has all gradients of it."""
        assert self._built is not None
        self._built.optimizers.restore_hyperparameters(self._settings_when_ready)
        for optimizer in self._built.optimizers.objects:
            optimizer.step()
        self._phase, self._version = Phase.DONE, version

    def _enter(self, built: Built, version: Version, offers: Sequence[Offer], needed: Layout) -> None:
        """This rank has its parts, and so has every other."""
        if self._built is not None:
            self._built.release()
        self._built, self._version, self._phase = built, version, Phase.UNTOUCHED
        self._generation, self._token = max(offer.generation for offer in offers) + 1, offers[0].token
        self._live_companions = self._random_when_failed = self._unconfirmed = self._loaded_tree = None
        self._lost_step = -1
        domains = [offer.domain for offer in offers]
        self._copies.enter_group(copy_partners(domains, self._replicas), whole_in_copies(offers, needed))
        place = data_place(built.mesh, self._data_dims)
        if hasattr(self.sampler, "set_world"):
            self.sampler.set_world(place.rank, place.size)
        self._weighting.enter_group(built.model, place.size)
        self._own.registered.measure()
        self._is_in_sync = True

    # --- saving ---------------------------------------------------------------------------------------------------

    def checkpoint_tree(self) -> dict[str, Any]:
        """The same form as that of `ModelState`, with DTensors; nothing is copied."""
        built = self._present
        return {
            "module": built.model.state_dict(),
            "optimizer": built.optimizers.state_dict(),
            "optimizer_steps": built.optimizers.usual,
            "scheduler": built.schedulers.state_dict(),
            "sampler": None if self.sampler is None else self.sampler.state_dict(),
            "extra": self._own.registered.state_dict(),
            "step": self.step,
            "epoch": self._own.own_epoch,
            "random": torch.get_rng_state(),
        }

    def load_checkpoint_tree(self, tree: dict[str, Any]) -> None:
        """Take what was saved, of this state or of a `ModelState`; the next sync gives each rank its parts of it."""
        self._loaded_tree = tree

    def replicated(self, names: Sequence[str]) -> Collection[str]:
        """The optimizers' plain tensors are equal on all ranks; the sharded ones are parts already."""
        return {name for name in names if name.startswith("optimizer/")}

    def save(self, stream: BinaryIO) -> None:  # noqa: ARG002 - part of the contract
        """Raises NonRetryableException: no single rank has the whole state."""
        raise NonRetryableException(NOT_ALONE)

    def load(self, stream: BinaryIO) -> None:  # noqa: ARG002 - part of the contract
        """As `save`."""
        raise NonRetryableException(NOT_ALONE)
