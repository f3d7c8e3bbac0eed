"""The parts that a rank trains: of which state of the run they are, and how far the step under way has come."""

from __future__ import annotations

import logging
from typing import Any

from torchelastic.inventory.generators import Generators, generators
from torchelastic.model.companions import Companions, Snapshot
from torchelastic.model.optimizers import OptimizerProgress
from torchelastic.model.transfer import UnsendableError
from torchelastic.sharded.built import Built
from torchelastic.sharded.commit_rule import next_version
from torchelastic.sharded.companions import companions_tree, to_bytes
from torchelastic.sharded.handover import HeldState
from torchelastic.sharded.offers import Phase, Version

log = logging.getLogger(__name__)


class Live:
    """One per `ShardedState`; used on the training thread. See `commit_rule` for the phases.

    Args:
        own: what goes with the parts.

    Attributes:
        built: model and optimizers of the last group; None: there was none.
        version: of the state; None: there is no live state.
        phase: of the step under way.
        generation: of the last group that was in sync.
        token: the same.
        rank: the same; -1: there was none.
        is_in_sync: whether the group is still the one of the last sync, and no step of it has failed.
        random_when_failed: the random numbers after a step that failed, for who completes it.
    """

    def __init__(self, own: Companions) -> None:
        self._own = own
        self.built: Built | None = None
        self.version: Version | None = None
        self.phase = Phase.NONE
        self.generation = self.token = 0
        self.rank = -1
        self.is_in_sync = False
        self.random_when_failed: Generators | None = None
        self._replaced = 0  # times that what is trained here was replaced
        self._companions_when_done: bytes | None = None
        self._groups_when_ready: list[list[dict[str, Any]]] = []
        self._has_told = False

    @property
    def present(self) -> Built:
        """What was built. Raises RuntimeError: nothing yet."""
        if self.built is None:
            raise RuntimeError("there is no group yet: model, optimizer and mesh exist from the first step on")
        return self.built

    def companions(self, built: Built, *, must_be: bool = False) -> bytes:
        """What goes with the parts of what was built.

        Args:
            built: the parts.
            must_be: whether nothing is lost yet where it cannot be had; else it is empty then, and that is told once.

        Raises:
            UnsendableError: `must_be`, and there is something in it that no other worker can receive; names it.
        """
        try:
            return to_bytes(companions_tree(self._own, built))
        except UnsendableError as error:
            if must_be:
                raise
            if not self._has_told:
                self._has_told = True
                log.error(
                    "step %d: %s. The run goes on; when the group changes it goes back to the last step of which "
                    "another copy is whole, or to a checkpoint", self._own.step, error,
                )  # fmt: skip
            return b""

    def snapshot(self) -> Snapshot:
        """What undoes a step, but for the parts."""
        trained = None if self.built is None else self.built.trained
        return self._own.snapshot(trained, replaced=self._replaced)

    def restore(self, snapshot: Snapshot) -> None:
        """The inverse."""
        self._own.restore(snapshot, None if self.built is None else self.built.trained)

    def begin_step(self) -> None:
        """A step begins, if there is a group."""
        if self.is_in_sync and self.built is not None:
            self.built.optimizers.begin()
            self.phase = Phase.UNTOUCHED

    def commit(self) -> None:
        """The step has succeeded."""
        self.present.optimizers.commit()
        self.present.check_optimized()
        self._count_step()
        self.phase = Phase.UNTOUCHED

    def skip(self, snapshot: Snapshot) -> int:
        """Undo the step that began with this snapshot, in which no optimizer has begun, and count it, on all ranks.

        Returns:
            How many samples are left out; 0: not known.
        """
        self.present.optimizers.zero_grad()
        samples = self._own.skip(snapshot, self.present.trained)
        self._next_version()
        self.phase = Phase.UNTOUCHED
        return samples

    def votes(self) -> int:
        """Whether this rank has entered the vote of the step under way, as a number."""
        return int(self.phase in (Phase.READY, Phase.DONE))

    def optimizer_steps(self) -> tuple[int, ...]:
        """How often each optimizer has begun in it."""
        return () if self.built is None else self.built.optimizers.begun()

    def undo(self, snapshot: Snapshot) -> None:
        """The step that began with this snapshot has failed: undo it, as far as this rank can alone."""
        if snapshot.replaced != self._replaced:
            return  # another whole state has come since, by a sync that failed afterwards: there is no step to undo
        built = self.built
        if built is None or not self.is_in_sync:
            self.restore(snapshot)  # no step has begun since the last one was undone
            return
        self.is_in_sync = False
        self.random_when_failed = generators()
        progress = built.optimizers.progress
        if progress is OptimizerProgress.UNDOABLE:
            built.optimizers.undo()
        elif progress is OptimizerProgress.TORN:
            self.phase, self.version = Phase.NONE, None
        elif progress is OptimizerProgress.COMPLETE and self._own.step == snapshot.step:
            self._count_step()
            self.phase = Phase.DONE
            if snapshot.structure is not None:  # the evaluation behind the optimizers was cut off
                built.structure.copy().with_flags_of(snapshot.structure).put()
            self._companions_when_done = self.companions(built)
        can_complete = self.phase is Phase.READY and built.optimizers.steps_once
        if can_complete:
            self._groups_when_ready = built.groups()  # of this step, such as its learning rate
        else:
            built.optimizers.zero_grad()
            self.phase = Phase.UNTOUCHED if self.phase is Phase.READY else self.phase
        if self.phase is not Phase.DONE:
            self.restore(snapshot)

    def complete_step(self, version: Version) -> None:
        """Other ranks have computed this state: so does this one, which has all gradients of the step."""
        self.present.put_groups(self._groups_when_ready)
        self.present.optimizers.load_settings(self._groups_when_ready)
        for optimizer in self.present.optimizers.objects:
            optimizer.step()
        self.phase, self.version = Phase.DONE, version
        self._companions_when_done = b""  # those of before the step do not go with it

    def completed(self, companions: bytes) -> None:
        """What goes with the state that `complete_step` has made, from a rank that has it."""
        self._companions_when_done = companions

    def held(self) -> HeldState | None:
        """The live parts, for a new group; None: there are none."""
        if self.version is None or self.built is None or self.phase is Phase.NONE:
            return None
        self.built.check_parameters()
        when_done = self._companions_when_done
        companions = self.companions(self.built) if when_done is None else when_done
        is_own = self.phase is not Phase.DONE  # else the rest of the user's step may be missing
        tensors = self.built.tensors()
        return HeldState(self.version, self.built.layout(), tensors, companions, is_live=True, is_own=is_own)

    def release(self) -> None:
        """The ranks go on from another state: the memory of this one is needed for that."""
        self.phase, self.version = Phase.NONE, None
        if self.built is not None:
            self.built.release()

    def enter_group(self, built: Built, version: Version, generation: int, token: int, rank: int) -> None:
        """All ranks of a new group have their parts of this state; what was built before is given up."""
        if self.built is not None:
            self.built.release()
        self.built, self.version, self.phase = built, version, Phase.UNTOUCHED
        self._replaced += 1
        self.generation, self.token, self.rank = generation, token, rank
        self.random_when_failed = self._companions_when_done = None
        self.is_in_sync = True

    def _count_step(self) -> None:
        """The live parts are those of one more step."""
        self._next_version()
        self._own.count_step()

    def _next_version(self) -> None:
        assert self.version is not None
        self.version = next_version(self.version, self.generation, self.token)
