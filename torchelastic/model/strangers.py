"""What a train step trains, and the state was not given: optimizers, schedulers, parameters of the model made later.

Nobody undoes, sends or saves those: a worker that joins has them as its script has built them, and goes on with other
weights than an undisturbed run would have; nothing else shows that.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchelastic.errors import UnfitError
from torchelastic.inventory.held import held_by
from torchelastic.inventory.inner_optimizers import with_inner
from torchelastic.inventory.module_structure import ModuleStructure
from torchelastic.text import shortlist

log = logging.getLogger(__name__)

#: How deep a scheduler may lie in what the state was given (in a chain of schedulers, in a wrapper of the user's own).
_DEPTH = 5
_MADE_BEFORE = (
    "Make parameters before ModelState is made, and until they are trained leave them out of the forward pass, with "
    "ModelState(.., find_unused_parameters=True); for masks call torch.nn.utils.prune.identity(module, name) there"
)
#: What is this process's own.
_OF_PROCESS = ("_first", "_again", "_judged", "_schedulers", "_in_group", "_form")
_NOT_KEPT = "what it keeps is neither undone with a failed step, nor sent to a worker that joins, nor saved"


class Strangers:
    """Watches the train steps of one state; on the training thread.

    Args:
        model: the user's module.
        structure: of it; copied before each step begins.
        optimizers: that the state was given.
        schedulers: the same.
        others: what else it was given, by name, that may be, or hold, schedulers.
        is_averaged_by_ddp: whether gradients are those of the parameters that were there when the group was formed.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        structure: ModuleStructure,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any],
        others: Callable[[], Mapping[str, Any]],
        *,
        is_averaged_by_ddp: bool,
    ) -> None:
        self._model, self._structure = model, structure
        self._optimizers, self._kept, self._others = optimizers, schedulers, others
        self._is_averaged_by_ddp = is_averaged_by_ddp
        self._names: Collection[str] = ()
        self._walks, self._step = 0, -1
        self._forget()
        _say_if_strange(optimizers, model)

    def _forget(self) -> None:
        """Nothing was seen yet."""
        self._first: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._again: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._judged: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._schedulers: list[tuple[weakref.ref[LRScheduler], int]] | None = None
        self._in_group: dict[int, torch.Tensor] = {}
        self._form: tuple[int, ...] = ()
        _present.watch()

    def begin_step(self, step: int, *, is_first: bool) -> None:
        """A step begins.

        Args:
            step: committed steps.
            is_first: none was committed in this group.
        """
        self._step = step
        _present.strangers = weakref.ref(self)
        if is_first:
            self._in_group = {id(one): one for one in (*self._structure.parameters(), *self._trained())}
            self._form = self._form_now()
        if self._structure.walks != self._walks:
            self._walks = self._structure.walks
            self._look_for_names()
        if self._schedulers is None:
            self._look_for_schedulers()

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer steps, of any kind. One that is there for one train step only keeps nothing for the next."""
        if any(optimizer is one for one in self._optimizers):
            return
        if optimizer in self._judged or any(optimizer is one for one in with_inner(self._optimizers)):
            return
        if self._first.setdefault(optimizer, self._step) < self._step:
            self._again.add(optimizer)

    def check_end(self) -> None:
        """Asked at the end of each train step.

        Raises:
            UnfitError: an optimizer of the model that the state was not given has stepped for several steps, or a
                scheduler of one of its optimizers has; or gradients of new parameters are averaged by nobody.
        """
        form = self._form_now()
        if form != self._form:  # else each step would cost by the number of parameters
            self._form = form
            if any(id(parameter) not in self._in_group for parameter in self._trained()):
                self._judge_new()
        if len(self._again):
            for optimizer in tuple(self._again):
                self._judge(optimizer)
                self._judged.add(optimizer)
            self._again.clear()
        for found, epoch in self._schedulers or ():
            scheduler = found()
            if scheduler is not None and scheduler.last_epoch != epoch:
                raise UnfitError(_of_scheduler(scheduler))

    def _judge(self, optimizer: torch.optim.Optimizer) -> None:
        own = set(map(id, self._model.parameters()))
        held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        kind, known = type(optimizer).__name__, with_inner(self._optimizers)
        if own.issuperset(held):
            if optimizer.state and not any(optimizer.state is one.state for one in known):
                raise UnfitError(
                    f"the train step steps an optimizer, of the type {kind}, that ModelState was not given: "
                    f"{_NOT_KEPT}. Give ModelState all optimizers, as a list or a dict (docs/state.md); an optimizer "
                    "that wraps another one in place of that"
                )
        else:
            log.warning(
                "the train step steps an optimizer, of the type %s, that ModelState was not given, of parameters that "
                "are not the model's: they are not averaged over the workers, and %s. Make them parameters of the "
                "model, and give ModelState all optimizers, as a list or a dict (docs/state.md)", kind, _NOT_KEPT,
            )  # fmt: skip

    def _trained(self) -> Iterator[torch.Tensor]:
        return (each for one in self._optimizers for group in one.param_groups for each in group["params"])

    def _form_now(self) -> tuple[int, ...]:
        """Changes where parameters may be others than before."""
        lengths = (len(group["params"]) for one in self._optimizers for group in one.param_groups)
        return (self._structure.walks, *lengths)

    def _judge_new(self) -> None:
        new = {id(one): one for one in self._trained() if id(one) not in self._in_group}
        names = [name for name, one in self._model.named_parameters() if id(one) in new and one.requires_grad]
        is_alone = not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1
        if names and self._is_averaged_by_ddp and not is_alone:
            raise UnfitError(
                f"the optimizer trains {shortlist(names)}, which the model did not have when this group was formed, so "
                f"that nobody averages their gradients over the workers. {_MADE_BEFORE}"
            )
        self._in_group |= new

    def _look_for_names(self) -> None:
        """Of parameters; those that were there before the first step are as the script has built them."""
        names = [name for name, _ in self._model.named_parameters()]
        made = [name for name in names if name not in self._names] if self._names else []
        self._names = {*self._names, *names}
        if made:
            log.warning(
                "step %d has made, or renamed, the parameters %s: a worker that joins, and a run that resumes, build a "
                "model without them, and end with an error. %s", self._step, shortlist(made), _MADE_BEFORE,
            )  # fmt: skip

    def _look_for_schedulers(self) -> None:
        """What there is before the first step; some tens of milliseconds."""
        known: list[LRScheduler] = []
        for one in (*self._kept, *self._others().values()):
            found = held_by(one, (LRScheduler,), depth=_DEPTH, closed=(torch.nn.Module, torch.optim.Optimizer))
            known += found
            if not found and any(one is scheduler for scheduler in self._kept):
                self._schedulers = []  # of a kind of the user's own: what it steps is not known
                return
        strange = self._unknown(known)
        if strange:
            strange.clear()
            gc.collect()  # one that nobody holds any more may have waited for this
            strange = self._unknown(known)
        self._schedulers = [(weakref.ref(one), one.last_epoch) for one in strange]
        for one in strange:
            log.warning("%s", _of_scheduler(one))

    def _unknown(self, known: Sequence[LRScheduler]) -> list[LRScheduler]:
        """Schedulers of the optimizers of this state that are not among these, nor in others that are not."""
        return [
            one
            for one in gc.get_objects()
            if issubclass(type(one), LRScheduler)  # an object may say of itself that it is of any class
            and not any(one is other for other in known)
            and any(getattr(one, "optimizer", None) is optimizer for optimizer in self._optimizers)
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _OF_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()


def _of_scheduler(scheduler: LRScheduler) -> str:
    return (
        f"there is a {type(scheduler).__name__} of the optimizer that ModelState was not given: {_NOT_KEPT}, and a "
        "train step may not step it. Give it with the others: ModelState(.., scheduler=scheduler)"
    )


def _say_if_strange(optimizers: Sequence[torch.optim.Optimizer], model: torch.nn.Module) -> None:
    """Warn of parameters that are not the model's: nobody averages them, sends them to a newcomer or saves them."""
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        held = [parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]]
        strange = [parameter for parameter in held if id(parameter) not in own]
        if strange:
            log.warning(
                "%d of the %d parameters of the %s are not the model's: they are not averaged over the workers, nor "
                "sent to new ones, nor saved; make it of the parameters of the model that ModelState is given",
                len(strange), len(held), type(optimizer).__name__,
            )  # fmt: skip


class _Present:
    """The state of this process whose train step is under way, or was last: torch has hooks for all optimizers."""

    def __init__(self) -> None:
        self.strangers: Callable[[], Strangers | None] = lambda: None
        self._is_watching = False

    def watch(self) -> None:
        """Have it told of each step of each optimizer from now on."""
        if not self._is_watching:
            self._is_watching = True
            register_optimizer_step_pre_hook(self._steps)

    def _steps(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        strangers = self.strangers()
        if strangers is not None:
            strangers.stepped(optimizer)


_present = _Present()
