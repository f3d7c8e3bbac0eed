"""The optimizers of one train step: how far each of them had come when the step failed, and what undoes that.

A step in which one optimizer steps once needs no copy: before it nothing has changed, after it the step is complete.
Where several steps belong to one train step (a discriminator's, then a generator's), a failure between them would leave
the state half-way on every worker at once. So what all but the last of them change is copied just before, into memory
that is kept from step to step. An optimizer that is given a closure computes gradients, for which peers are needed, in
the middle of its step: it is copied always. So is one that has once stepped more often than before (epochs over the
same samples that end early, as in PPO): which of its steps is the last cannot be known.
"""

from __future__ import annotations

import enum
import functools
import logging
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from torchelastic.errors import UnfitStateError
from torchelastic.inventory.attributes import Restore, attributes_of
from torchelastic.inventory.inner_optimizers import inner_states, put_inner_states, shared_groups, with_inner
from torchelastic.inventory.optimizer_values import (
    OWN_FORM,
    Named,
    group_faults,
    members_of,
    named_state,
    numbered_state,
    optimizer_faults,
    put_groups,
    put_types_back,
    state_from_stored,
    state_of,
    stored_names,
    without_members,
)
from torchelastic.inventory.weights import KeptWeights, WeightCopier
from torchelastic.model.digest import sample_digest
from torchelastic.model.left_gradients import LeftGradients
from torchelastic.model.one_or_many import OneOrMany
from torchelastic.model.step_counts import StepCounts, expected_steps
from torchelastic.torch_internals.tensors import version_of

log = logging.getLogger(__name__)

#: For each optimizer, for each of its parameter groups: the hyperparameters, without the parameters.
Settings = tuple[tuple[dict[str, Any], ...], ...]
#: Of `Optimizer.step`, itself first, as torch gives them to a hook.
Arguments = tuple[Any, ...]


class OptimizerProgress(enum.Enum):
    """How far the optimizers of a train step have come."""

    UNTOUCHED = "no optimizer has begun"
    UNDOABLE = "some have begun, and a copy of what they have changed is there"
    COMPLETE = "all that step in a train step have stepped"
    TORN = "weights are half-way, or changed by something else, and no copy is there"


class Optimizers:
    """One optimizer, or many, as `ModelState` needs them.

    Args:
        given: one `torch.optim.Optimizer`, or a list, a tuple or a dict of them.
        copy_others: called before the first step that is copied; copies what else the user's code may change between
            two optimizers.
        before_step: called before each step, or when its closure has computed gradients, with whether it is the train
            step's first: what it raises fails that.

    Attributes:
        left: gradients of the steps before.

    Raises:
        ValueError: something else was given.
    """

    def __init__(
        self, given: Any, copy_others: Callable[[], None], before_step: Callable[[bool], None] | None = None
    ) -> None:
        self._all = OneOrMany("optimizer", given)
        self.objects: Sequence[torch.optim.Optimizer] = self._all.objects
        self.names: Sequence[str] = self._all.names
        self._copy_others, self._before_step = copy_others, before_step
        self._begun, self._done, self._usual = ([0] * len(self.objects) for _ in range(3))
        self._copiers = [WeightCopier() for _ in self.objects]
        self._kept: dict[int, KeptWeights] = {}
        self._is_copied_whole = self._is_uncovered = self._has_more = self._has_strayed = False
        self.left = LeftGradients(self.objects)
        self.watch(())
        self._watch()

    def watch(
        self, weights: Iterable[torch.Tensor], followers: Iterable[torch.Tensor] = (), *, by_bytes: bool = False
    ) -> None:
        """See from now on whether something else changes these.

        Args:
            weights: none: nothing is watched.
            followers: what may change behind the first optimizer of a step only (an average of the weights).
            by_bytes: look at a sample of their bytes, too, which shows changes through `.data`; takes milliseconds.
        """
        self._looks_at_bytes = by_bytes
        self._watched = [weight for weight in weights if not (is_lazy(weight) or weight.is_inference())]
        # a DTensor's is another one from the first forward pass of FSDP2 on
        self._in_own_memory = [weight for weight in self._watched if not hasattr(weight, "device_mesh")]
        self._followers = [one for one in followers if not one.is_inference()]
        self._marks, self._marks_of_followers = self._marked(), self._marked_followers()

    # --- a train step -----------------------------------------------------------------------------

    def begin(self, *, is_copied_whole: bool = False) -> None:
        """A train step begins.

        Args:
            is_copied_whole: whoever calls this copies all that the step can change, so nothing needs to be copied here.
        """
        size = len(self.objects)
        self._begun, self._done = [0] * size, [0] * size
        self._kept = {}
        self._is_copied_whole = is_copied_whole
        self._is_uncovered = self._has_more = self._has_strayed = False
        self._marks, self._marks_of_followers = self._marked(), self._marked_followers()
        self.left.begin()

    def goes_on(self) -> None:
        """The train step has not ended with the optimizers: what it has done since is to be undone with them."""
        self._has_more = True

    def commit(self) -> None:
        """The train step has succeeded: what it did is what one can be expected to do."""
        self._usual = [expected_steps(*pair) for pair in zip(self._usual, self._done, strict=True)]
        self.left.commit(has_stepped=any(self._done))

    def begun(self) -> tuple[int, ...]:
        """How often each optimizer has begun in this train step."""
        return tuple(self._begun)

    @property
    def counts(self) -> StepCounts:
        """The counts of this train step."""
        return StepCounts(tuple(self._begun), tuple(self._done), tuple(max(1, count) for count in self._usual))

    @property
    def has_strayed(self) -> bool:
        """Whether this train step has changed weights itself, before its first optimizer step or after its last one."""
        is_before = not any(self._begun) and self._marks_of_followers != self._marked_followers()
        return self._has_strayed or is_before or self._marks != self._marked()

    @property
    def progress(self) -> OptimizerProgress:
        """How far this train step has come."""
        is_midway = any(self._begun) and not self.counts.are_complete  # what has changed since is in the copies
        if self._has_strayed if is_midway else self.has_strayed:
            return OptimizerProgress.TORN
        if not any(self._begun):
            return OptimizerProgress.UNTOUCHED
        if self.counts.are_complete and not self._has_more:
            return OptimizerProgress.COMPLETE
        return OptimizerProgress.TORN if self._is_uncovered else OptimizerProgress.UNDOABLE

    @property
    def steps_once(self) -> bool:
        """Whether all optimizers together step once in a train step, as far as is known."""
        return sum(self.counts.usual) == 1

    def undo(self) -> None:
        """Put back what was copied; only in the state UNDOABLE."""
        assert self.progress is OptimizerProgress.UNDOABLE
        for kept in self._kept.values():
            kept.put()
        self.begin()

    def zero_grad(self) -> None:
        """Drop all gradients of this train step."""
        for optimizer in self.objects:
            optimizer.zero_grad(set_to_none=True)
        self.left.put_back()

    # --- state ------------------------------------------------------------------------------------

    @property
    def usual(self) -> list[int]:
        """Steps of each in a train step, 0 before the first; sent to newcomers, who have seen none."""
        return list(self._usual)

    @usual.setter
    def usual(self, value: Sequence[int]) -> None:
        if len(value) == len(self.objects):
            self._usual = [int(count) for count in value]

    def settings(self) -> Settings:
        """The hyperparameters of each parameter group of each optimizer: to be restored, or sent."""
        return tuple(tuple(_settings(group) for group in optimizer.param_groups) for optimizer in self.objects)

    def load_settings(self, settings: Sequence[Sequence[dict[str, Any]]], *, undoes: bool = False) -> None:
        """Go to what `settings` returned here or on another rank.

        Args:
            settings: of as many parameter groups as there are.
            undoes: a step has failed here, which may have added groups: they go too, unless they were trained already.

        Raises:
            UnfitStateError: they are of other optimizers; nothing has changed.
        """
        if not undoes:
            self._require_fitting(settings)
        for optimizer, groups in zip(self.objects, settings, strict=True):
            if undoes and self.progress is OptimizerProgress.UNTOUCHED:
                del optimizer.param_groups[len(groups) :]
            for group, values in zip(optimizer.param_groups, groups, strict=not undoes):
                group.update(_settings(values))

    def parameters(self) -> list[torch.Tensor]:
        """The parameters of all groups of all optimizers."""
        return [parameter for one in self.objects for parameter in _parameters(one)]

    def members(self) -> tuple[tuple[list[Any], ...], ...]:
        """The parameters of each group of each optimizer."""
        return tuple(tuple(list(group["params"]) for group in one.param_groups) for one in self.objects)

    def attributes(self) -> list[Restore]:
        """What puts back the attributes of the optimizers: what those of a user's own count there."""
        return [
            restore
            for one in with_inner(self.objects)
            for restore in attributes_of(one, type(one).__name__, kept_otherwise=_of_each_optimizer())
        ]

    def put_members(self, members: Sequence[Sequence[list[Any]]]) -> None:
        """Groups have the parameters that `members` returned; others, which were added since, keep theirs."""
        for optimizer, groups in zip(self.objects, members, strict=True):
            for group, parameters in zip(optimizer.param_groups, groups, strict=False):
                if list(map(id, group["params"])) != list(map(id, parameters)):
                    group["params"][:] = parameters

    def forget_added(self, settings: Settings) -> None:
        """Drop the parameter groups that were added since `settings` returned these: their step is undone."""
        for optimizer, groups in zip(self.objects, settings, strict=True):
            del optimizer.param_groups[len(groups) :]

    def digest_of_form(self) -> int:
        """A number that is equal where these keep something of the same kind for the same parameters; 32 bits."""
        form = [
            [[sorted(map(str, one.state.get(parameter, ()))) for parameter in group["params"]]
            for group in one.param_groups] for one in with_inner(self.objects)
        ]  # fmt: skip
        return zlib.crc32(repr(form).encode())

    def state_dict(self) -> Any:
        """That of the single optimizer, or a dict by name; the tensors are not copied."""
        return self._all.as_given([state_of(optimizer) for optimizer in self.objects])

    def load_state_dict(self, state: Any, *, keeps_types: bool = False) -> None:
        """The inverse.

        Args:
            state: as `state_dict` gave it.
            keeps_types: the parameters are of the types that they had there, so all else is to be, too.

        Raises:
            UnfitStateError: the state is of other optimizers; nothing has changed.
        """
        states = list(zip(self.states_in(state), self.objects, strict=True))
        # one of a user's own may save in another form, which it knows itself
        self._require_fitting([one.get("param_groups", optimizer.param_groups) for one, optimizer in states])
        with shared_groups(self.objects):
            self._all.load_state_dict(state)
        for one, optimizer in states if keeps_types else ():
            put_types_back(optimizer, one)

    def named_state(self, parameters: Named) -> Any:
        """As `state_dict`, with the names of the model's parameters where that has numbers."""
        return self._all.as_given([named_state(optimizer, parameters) for optimizer in self.objects])

    def group_names(self, parameters: Named) -> list[list[list[str]]]:
        """The names of the parameters in each group of each optimizer."""
        return [members_of(optimizer, parameters) for optimizer in self.objects]

    def stored_names(self, state: Any, parameters: Named) -> Any:
        """The names of the numbers in what `state_dict` gave; see `optimizer_values.stored_names`."""
        pairs = zip(self.states_in(state), self.objects, strict=True)
        return self._all.as_given([stored_names(one, optimizer, parameters) for one, optimizer in pairs])

    def named_from_stored(self, state: Any, names: Any) -> Any:
        """What `named_state` gave, of what `state_dict` and `stored_names` gave.

        Raises:
            UnfitStateError: they are of other optimizers.
        """
        pairs = zip(self.states_in(state), self.states_in(names), strict=True)
        return self._all.as_given([state_from_stored(*pair) for pair in pairs])

    def inner_states(self, parameters: Named) -> list[Any]:
        """Of optimizers that these step, what is not in the `state_dict` of these; see `inventory.inner_optimizers`."""
        return inner_states(self.objects, parameters)

    def load_named_state(
        self,
        state: Any,
        parameters: Named,
        *,
        inner: Sequence[Any],
        keeps_types: bool,
        may_lose: bool,
        is_stored: bool = False,
    ) -> None:
        """The inverse; groups are made like those of the state.

        Args:
            state: as `named_state` gave it.
            parameters: of the model that is here.
            inner: as `inner_states` gave it.
            keeps_types: see `load_state_dict`.
            may_lose: see `group_faults`.
            is_stored: whether it is a checkpoint's, and not of a rank of this group.

        Raises:
            UnfitStateError: the state is of other optimizers; nothing has changed.
        """
        states = list(zip(self.names, self.objects, self.states_in(state), strict=True))
        for name, optimizer, one in states:
            for fault in _named_faults(one, optimizer, parameters, may_lose=may_lose):
                comes, remedy = _RECEIVED if not is_stored else _LOADED
                of = f" {name}" if name else ""
                raise UnfitStateError(f"the state that {comes} does not fit the optimizer{of}: {fault}. {remedy}")
        with shared_groups(self.objects):
            for _, optimizer, one in states:
                if OWN_FORM not in one:
                    put_groups(one, optimizer, parameters)
                saved = one[OWN_FORM] if OWN_FORM in one else numbered_state(one)
                optimizer.load_state_dict(saved)
                if keeps_types:
                    put_types_back(optimizer, saved)
            put_inner_states(self.objects, inner)

    def states_in(self, state: Any) -> list[Any]:
        """What a state as `state_dict` gives it has for each optimizer. Raises UnfitStateError if it is of others."""
        return self._all.states_in(state)

    # --- inside -----------------------------------------------------------------------------------

    def _require_fitting(self, saved: Sequence[Sequence[dict[str, Any]]]) -> None:
        for name, optimizer, groups in zip(self.names, self.objects, saved, strict=True):
            for fault in optimizer_faults(groups, optimizer):
                raise UnfitStateError(
                    f"the state that is loaded does not fit the optimizer{f' {name}' if name else ''}: {fault}. Build "
                    "the optimizer as it was when this state was saved or sent (in a worker that joins a run, with the "
                    "groups that add_param_group has added there), or save to another folder"
                )

    def _watch(self) -> None:
        for number, optimizer in enumerate(self.objects):
            optimizer.register_step_pre_hook(_Call(self._begins, number))
            optimizer.register_step_post_hook(_Call(self._ends, number))

    def _begins(self, number: int, args: Arguments, kwargs: dict[str, Any]) -> tuple[Arguments, dict[str, Any]] | None:
        check = partial(self._before_step or _nothing, not any(self._begun))
        if not any(self._begun):
            self._has_strayed = self.has_strayed
        optimizer, *given = args
        closure: Any
        closure, *rest = given or (kwargs.get("closure"),)
        has_closure = callable(closure)
        if not has_closure:
            check()
        self._copy(number, anyway=has_closure)
        self._begun[number] += 1
        if not has_closure:
            return None

        def evaluated() -> Any:
            loss = closure()
            check()
            return loss

        return (optimizer, evaluated, *rest), {name: value for name, value in kwargs.items() if name != "closure"}

    def _copy(self, number: int, *, anyway: bool) -> None:
        if number not in self._kept and not self._is_copied_whole:
            if anyway or self.counts.more_to_come(number):
                if not self._kept:
                    self._copy_others()
                one = self.objects[number]
                self._kept[number] = self._copiers[number].copy(_parameters(one), [one], leaves_gradients=True)
            else:
                self._is_uncovered = True

    def _ends(self, number: int, *_: Any) -> None:
        self._done[number] += 1
        self._marks = self._marked()

    def _marked(self) -> list[int]:
        """What is another where a weight was changed in place, except through its `.data`, or has other memory."""
        marks = [version_of(weight) for weight in self._watched] + [weight.data_ptr() for weight in self._in_own_memory]
        if self._looks_at_bytes:
            marks.append(sample_digest(self._in_own_memory))
        return marks

    def _marked_followers(self) -> list[int]:
        return [version_of(one) for one in self._followers]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._watch()  # a pickled optimizer has lost its hooks


def _named_faults(
    state: Mapping[str, Any], optimizer: torch.optim.Optimizer, parameters: Named, *, may_lose: bool
) -> list[str]:
    if OWN_FORM in state:
        return []
    own = len(optimizer.param_groups)
    settings = [without_members(group) for group in state["param_groups"][:own]]
    faults = group_faults(state, optimizer, parameters, may_lose=may_lose)
    return faults or (optimizer_faults(settings, optimizer) if len(settings) == own else [])


#: How a state comes, and what to do where it does not fit.
_RECEIVED = (
    "this worker receives",
    "Build model and optimizer as the other workers do; parameters that are trained from a later step on have to be "
    "the model's from the beginning",
)
_LOADED = (
    "is loaded",
    "Build the optimizer as the script built it that has saved this state, or save to another folder",
)


class _Call:
    """A hook that knows the number of its optimizer."""

    def __init__(self, function: Callable[..., Any], number: int) -> None:
        self._function, self._number = function, number

    def __call__(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> Any:  # noqa: ARG002 - torch passes it
        return self._function(self._number, *arguments)


@functools.cache
def _of_each_optimizer() -> frozenset[str]:
    """Attributes that torch gives to each; what is in them is undone by parts, or is code."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.0)))


def _nothing(_: bool) -> None: ...


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    values = without_members(group)
    if isinstance(values.get("lr"), torch.Tensor):
        values["lr"] = values["lr"].clone()  # the scheduler changes it in place
    return values


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
