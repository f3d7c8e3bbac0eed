"""The check with logical shards: one shard of a step is computed by two workers, and by a third one if they differ."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.errors import UnfitError
from torchelastic.inventory.generators import generators, put_rows_of_generators, row_of_generators
from torchelastic.inventory.module_structure import ModuleStructure
from torchelastic.inventory.module_values import attributes_of, put_attributes
from torchelastic.inventory.names import named_parameters
from torchelastic.model.compute_check.choice import CheckPlace, Task, choose, third
from torchelastic.model.compute_check.consequences import WORDS, CheckRecord
from torchelastic.model.compute_check.members import CheckMembers, gathered, gathered_texts
from torchelastic.model.compute_check.outputs import OutputTrace, first_difference
from torchelastic.model.compute_check.trail import MOST, Trail, were_given_others
from torchelastic.model.compute_check.verdict import NOT_COMPARABLE, CheckOutcome, judge_replicas, judge_shard
from torchelastic.model.digest import as_word, digest, leaves_of
from torchelastic.model.transfer import check_sendable, synchronize

#: Forward and backward pass of one shard (its number, its samples, its part of the batch); gives a digest of what comes
#: out. A generator, since the user's loop does the work.
Compute = Callable[[int, int, Any], Generator[Any, None, int]]


class ShardCheck:
    """The check of one step, on every rank of the group, on the training thread.

    Args:
        record: of the run.
        members: of the group.
        module: the plain module.
        step: committed steps.
        number: of the check.
        device: where messages must lie.

    Attributes:
        trail: of the computation that is under way; None: none is that is compared.
    """

    def __init__(
        self,
        record: CheckRecord,
        members: CheckMembers,
        module: torch.nn.Module,
        step: int,
        number: int,
        device: torch.device,
    ) -> None:
        self._record, self._members, self._module = record, members, module
        self._step, self._number, self._device = step, number, device
        self._task: Task | None = None
        self._third: int | None = None
        self._part: Any = None
        self._size = 0
        self._random = torch.empty(0)  # as it was before the owner computed the shard
        self._attributes: dict[str, Any] = {}  # and those of its modules: counters of calls, say
        self._own = [0] * (1 + MOST)
        self.trail: Trail | None = None

    def begin(self, units: Sequence[tuple[int, int]], parts: Sequence[Any], shards: int) -> None:
        """Choose who computes what.

        Args:
            units: number and samples of each shard that is this rank's.
            parts: of the batch, for each of them.
            shards: of a global batch.

        Raises:
            RuntimeError: a peer is lost.
            Exception: what `CheckRecord.conclude` raises, of weights that have parted.
        """
        has = [0] * shards
        for shard, _ in units:
            has[shard] = 1
        weights = as_word(digest(list(leaves_of(named_parameters(self._module)))))
        words = [*self._record.words, int(_can_be_sent(parts)), weights, *has]
        rows = gathered(words, self._members, self._device)
        self._record.take([row[:WORDS] for row in rows])
        if self._record.is_off or not all(row[WORDS] for row in rows):
            return
        verdict = judge_replicas([row[WORDS + 1] for row in rows])
        if verdict.outcome is not CheckOutcome.AGREED:
            self._record.conclude(verdict, self._step, self._members, "weights")
        places = [
            CheckPlace(kind, host, tuple(shard for shard, is_there in enumerate(row[WORDS + 2 :]) if is_there))
            for kind, host, row in zip(self._members.kinds, self._members.hosts, rows, strict=True)
        ]
        self._task = choose(places, self._number)
        if self._task is None:
            return
        self._third = third(places, self._task)
        if self._members.rank == self._task.owner:
            number = [shard for shard, _ in units].index(self._task.shard)
            self._part, self._size = copy.deepcopy(parts[number]), units[number][1]  # the step may change it in place

    def begins(self, shard: int) -> None:
        """A shard of this rank is computed now."""
        if self._task is not None and (shard, self._members.rank) == self._task[:2]:
            self._random, self._attributes, self.trail = row_of_generators(), attributes_of(self._module), Trail()

    def computed(self, shard: int, digest: Callable[[], int]) -> None:
        """It was; the digest is of what came out, and asked for if it is wanted."""
        if self.trail is not None and self._task is not None and shard == self._task.shard:
            self._own = [digest(), *self.trail.words()]
            self.trail = None

    def compare(self, compute: Compute) -> Generator[Any, None, None]:
        """Have the shard computed again where it has to be, and compare; raises what `CheckRecord.conclude` raises."""
        task, rank = self._task, self._members.rank
        if task is None:
            return
        if task.witness != task.owner:
            self._send(task.witness)
        if rank == task.witness != task.owner:
            self._own = yield from self._computed(task, compute)
        rows = gathered(self._own, self._members, self._device)
        first, trails = {each: rows[each][0] for each in task[1:]}, [rows[each][1:] for each in task[1:]]
        again, where = first, ""
        if len(first) == 1 or (len(set(first.values())) > 1 and not were_given_others(trails)):
            again, where, more = yield from self._again(task, compute, is_traced=len(first) > 1)
            trails += more
        verdict = judge_shard(first, again, has_agreed=self._record.has_agreed)
        if verdict.outcome is not CheckOutcome.AGREED and were_given_others(trails):
            verdict = NOT_COMPARABLE
        what = f"the gradients of shard {task.shard}"
        self._record.conclude(verdict, self._step, self._members, what, where=where, parties=task[1:])

    def _again(
        self, task: Task, compute: Compute, *, is_traced: bool
    ) -> Generator[Any, None, tuple[dict[int, int], str, list[list[int]]]]:
        """All computations anew, with a third one where there is another rank for it; and where they part first.

        `is_traced`: with hooks on the modules, to find that place.
        """
        rank, trace = self._members.rank, OutputTrace(self._module)
        parties = list(dict.fromkeys(task[1:]))
        if is_traced and self._third is not None:
            self._send(self._third)
            parties.append(self._third)
        own = [0] * (1 + MOST)
        if rank in parties:
            with trace.recording() if is_traced else nullcontext():
                own = yield from self._computed(task, compute)
            trace.note_gradients()
        rows = gathered([*own, *(trace.digests() if is_traced else ())], self._members, self._device)
        place = first_difference({each: rows[each][1 + MOST :] for each in parties})
        names = ["" if place is None or rank not in parties else trace.name_of(place)]
        if place is not None:
            names = gathered_texts(names[0], self._members.world_size, self._device)
        trails = [rows[each][1 : 1 + MOST] for each in parties]
        return {each: rows[each][0] for each in parties}, max(names), trails

    def _computed(self, task: Task, compute: Compute) -> Generator[Any, None, list[int]]:
        """Compute the shard, with the random numbers and attributes that its owner had; then its digest and its trail.

        What that changes in the modules is undone: the step goes on as if it had not been.
        """
        before, structure, self.trail = generators(), ModuleStructure(self._module).copy(), Trail()
        put_rows_of_generators(self._random.cpu().unsqueeze(0), 0)
        put_attributes(self._module, self._attributes)
        try:
            own = yield from compute(task.shard, self._size, copy.deepcopy(self._part))
            return [own, *self.trail.words()]
        finally:
            self.trail = None
            structure.put()
            before.put()

    def _send(self, receiver: int) -> None:
        assert self._task is not None
        rank = self._members.rank
        tree = None
        if rank == self._task.owner:
            tree = {"batch": self._part, "samples": self._size}
            tree |= {"random": self._random, "attributes": self._attributes}
        received = synchronize(
            tree, source=self._task.owner, stale=[receiver], rank=rank, world_size=self._members.world_size,
            device=self._device,
        )  # fmt: skip
        if received is not None:
            self._part, self._size = received["batch"], received["samples"]
            self._random, self._attributes = received["random"], received["attributes"]


def _can_be_sent(parts: Sequence[Any]) -> bool:
    try:
        check_sendable({"batch": list(parts[:1])})
    except (UnfitError, CheckpointError):
        return False
    return True
