"""The check without logical shards: each rank computes a step twice, from one snapshot, up to the first optimizer.

The first attempt is a rehearsal: nothing is averaged, and it is undone. The second one is the step. Gradients are
compared before they are averaged. Where they differ anywhere, both come once more, and what modules give is compared
too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from enum import Enum
from typing import Any

import torch

from torchelastic.group.step_course import RehearsedError
from torchelastic.model.compute_check.outputs import OutputTrace, first_difference
from torchelastic.model.compute_check.trail import Trail, were_given_others
from torchelastic.model.digest import begun_digest


class CheckPhase(Enum):
    """Where a check is."""

    IDLE = "no check is under way"
    REHEARSAL = "the attempt that is undone"
    REPEAT = "the attempt that may count"


class RepeatCheck:
    """One per state, on the training thread.

    Args:
        module: the plain module.
        are_views: gradients lie in DDP's buckets, which the rehearsal overwrites.

    Attributes:
        phase: of the attempt that is under way.
        differed: of the first pair of attempts, by rank; empty: the pair under way is the first.
    """

    def __init__(self, module: torch.nn.Module, *, are_views: bool) -> None:
        self._module, self._are_views = module, are_views
        self.reset()

    def reset(self) -> None:
        """There is a new group: what was under way is void."""
        self.phase = CheckPhase.IDLE
        self.differed: tuple[bool, ...] = ()
        self._is_rehearsed = self._is_noted = False
        self._ends: list[list[Callable[[], int]]] = []
        self._trails: list[Trail] = []
        self._batches: list[Any] = []
        self._handed_out = 0
        self._traces: list[OutputTrace] = []
        self._recording = ExitStack()
        self._kept: list[tuple[torch.nn.Parameter, torch.Tensor | None, torch.Tensor | None]] = []

    def begin(self, *, is_due: bool) -> None:
        """An attempt at a step begins; `is_due`: this step is to be checked."""
        self._recording.close()
        if self.phase is CheckPhase.REHEARSAL and self._is_rehearsed:
            self.phase = CheckPhase.REPEAT
        elif is_due or self.differed:
            self.phase, self._ends, self._traces = CheckPhase.REHEARSAL, [], []
            self._trails, self._batches = [], []
        else:
            self.phase, self._batches = CheckPhase.IDLE, []
            return
        self._is_rehearsed = self._is_noted = False
        self._ends.append([])
        self._trails.append(Trail())
        self._handed_out = 0
        if self.phase is CheckPhase.REHEARSAL:
            self._keep_gradients()
        if self.differed:
            self._traces.append(OutputTrace(self._module))
            self._recording = ExitStack()
            self._recording.enter_context(self._traces[-1].recording())

    @property
    def trail(self) -> Trail | None:
        """Of the attempt that is under way; None: it is not compared."""
        return None if self.phase is CheckPhase.IDLE else self._trails[-1]

    def batch(self, batch: Any) -> Any:
        """What the step gets for a batch that was drawn: the repeat gets what the rehearsal got, however it was read.

        An augmentation draws other numbers when a batch is read once more.
        """
        number, self._handed_out = self._handed_out, self._handed_out + 1
        if self.phase is CheckPhase.REHEARSAL:
            self._batches.append(copy.deepcopy(batch))  # the step may change it in place
        elif self.phase is CheckPhase.REPEAT and number < len(self._batches):
            return self._batches[number]
        return batch

    def note(self, gradients: Sequence[torch.Tensor], is_last: bool) -> None:
        """Gradients of this rank, before they are averaged; `is_last`: of a reduction.

        What is added to averaged ones in another reduction of the same step is another thing in a rehearsal.
        """
        if self.phase is not CheckPhase.IDLE and not self._is_noted:
            self._ends[-1].append(begun_digest([("", one) for one in gradients]))
            self._is_noted = is_last

    def computed(self) -> None:
        """Before the first optimizer of the step, or at its end. Raises RehearsedError: it was the rehearsal."""
        if self.phase is CheckPhase.IDLE:
            return
        self._recording.close()
        if not self._ends[-1]:  # nothing is averaged
            self.note([one.grad for one in self._module.parameters() if one.grad is not None], is_last=True)
        for trace in self._traces[-1:]:
            trace.note_gradients()
        if self.phase is CheckPhase.REHEARSAL:
            self._is_rehearsed = True
            raise RehearsedError("the step is computed once more, to compare")

    def undone(self) -> None:
        """The rehearsal is undone: gradients of steps before it are as they were."""
        with torch.no_grad():
            for parameter, gradient, copy in self._kept:
                if gradient is not None and copy is not None:
                    gradient.copy_(copy)
                parameter.grad = gradient
        self._kept = []

    def own_differ(self) -> bool:
        """Whether this rank's two attempts have given different gradients."""
        first, second = ([end() for end in ends] for ends in self._ends)
        return first != second and not self.were_given_others()

    def were_given_others(self) -> bool:
        """Whether the model had other data, or other gradients from the loss, in this rank's two attempts."""
        return were_given_others([trail.words() for trail in self._trails])

    def where(self) -> str:
        """What differed first between the two attempts; empty: not known."""
        if len(self._traces) < 2:
            return ""
        place = first_difference({number: trace.digests() for number, trace in enumerate(self._traces)})
        return "" if place is None else self._traces[-1].name_of(place)

    def comes_again(self, differed: Sequence[bool]) -> RehearsedError:
        """The first pair differed on some ranks: both attempts come once more."""
        self.differed = tuple(differed)
        return RehearsedError("the step is computed twice more, to see who differs")

    def _keep_gradients(self) -> None:
        """What the rehearsal adds to, or DDP overwrites, is a copy."""
        for parameter in self._module.parameters():
            gradient = parameter.grad
            if gradient is not None:
                parameter.grad = gradient.detach().clone()
            copy = gradient.detach().clone() if gradient is not None and self._are_views else None
            self._kept.append((parameter, gradient, copy))

    def __getstate__(self) -> dict[str, Any]:
        # a check under way belongs to this process alone
        return {"_module": self._module, "_are_views": self._are_views}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_module"], are_views=state["_are_views"])  # type: ignore[misc]
