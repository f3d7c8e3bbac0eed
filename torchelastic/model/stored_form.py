"""What a checkpoint of a `ModelState` holds, and how it is read: by form 2, or by form 1, which had less.

Form 2 has, besides what form 1 had:

    {"form": 2,
     "parameters": [NAME, ..]            the name of each number in "optimizer"; of several optimizers as that has them
     "groups": [[NAME, ..], ..]          of each optimizer, as the script had built them
     "hyperparameters": [[{..}, ..], ..] of each optimizer and group, as the script had built them: differences are told
     "inner": [..]                       of optimizers that others keep, see `inventory.inner_optimizers`
     "values": {"": .., NAME: ..}        of the model, and of each module in `extra`: see `inventory.stored_values`
     "attributes": {NAME: ..}            plain ones that the run has changed: they are told, and not set
     "own": {"random": .., "order": {0: ..}}}
                                         a row for each rank that has saved: see `inventory.generators`; and of each
                                         optimizer the places of "parameters" among the sorted names of the model's
                                         parameters, so that whoever reads one shard alone knows them, too
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchelastic.errors import UnfitStateError
from torchelastic.inventory import module_state
from torchelastic.inventory.generators import put_rows_of_generators, row_of_generators
from torchelastic.inventory.module_values import attributes_of, changed_attributes, differing_attributes
from torchelastic.inventory.names import NamedParts, named_parameters, named_parts, plain_name
from torchelastic.inventory.stored_values import (
    Built,
    as_built,
    put_stored_buffers,
    put_stored_flags,
    stored_values,
)
from torchelastic.model.companions import Companions, Trained
from torchelastic.model.optimizers import Optimizers
from torchelastic.text import shortlist
from torchelastic.torch_internals.tensors import tree_flatten

log = logging.getLogger(__name__)

FORM = 2
#: Of a `ShardedState` alone: the optimizers' plain tensors that are each rank's own, or of which nobody knows.
OF_RANKS = "optimizer_of_ranks"
#: All that a tree of form 2 may hold.
PARTS = frozenset(
    {
        "form", "module", "values", "attributes", "optimizer", "optimizer_steps", "parameters", "groups", "inner",
        "hyperparameters", OF_RANKS, "scheduler", "sampler", "extra", "step", "epoch", "random", "own",
    }
)  # fmt: skip
#: Where each rank's own is.
OF_EACH_RANK = "own/"
#: The model, among the modules of "values"; others are called as in `extra`.
MODEL = ""


class StoredForm:
    """How one state is saved and loaded; of what a script has built it keeps how that was.

    Args:
        module: the plain model.
        optimizers: its optimizers.
        own: what belongs to the state besides.
        built: how modules were built, by `StoredForm.built` of another one for such a module; None: it is looked for.

    Attributes:
        built: of each module, the model by the name "", others as in `extra`.
        groups: the names of the parameters in each group of each optimizer, as the script has built them.
        hyperparameters: the plain settings of each group of each optimizer, likewise.
    """

    def __init__(
        self, module: torch.nn.Module, optimizers: Optimizers, own: Companions, built: dict[str, Built] | None = None
    ) -> None:
        self._module, self._optimizers, self._own = module, optimizers, own
        self.built: dict[str, Built] = {} if built is None else built
        self._attributes: dict[str, Any] | None = None
        self._has_said_gradients = False
        self.groups: list[list[list[str]]] = []
        self.hyperparameters: list[list[dict[str, Any]]] = []

    def look(self) -> None:
        """Take the modules that were not there before as they were built. Before anything is trained."""
        if self._attributes is None:
            self._attributes = attributes_of(self._module)
            self.groups = self._optimizers.group_names(named_parameters(self._module))
            self.hyperparameters = [[_plain(group) for group in one] for one in self._optimizers.settings()]
        for name, one in self._modules().items():
            if name not in self.built:
                self.built[name] = as_built(one, _persistent(one))

    def changed_attributes(self, parts: NamedParts | None = None) -> dict[str, Any]:
        """Plain attributes of the model, whose parts may be known, that are others now than a script has built."""
        return changed_attributes(self._module, self._attributes or {}, parts)

    def plain_tree(self, trained: Trained) -> dict[str, Any]:
        """All that form 1 has; the tensors are not copied."""
        weights = {"module": module_state.state_of(self._module), "optimizer": self._optimizers.state_dict()}
        return {**weights, **self._own.state_dict(trained)}

    def beside(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """What form 2 has in addition to a plain tree, which a subclass of the user's may have added to."""
        self.look()
        self._say_if_accumulating(tree)
        modules = self._modules()
        parts = {name: named_parts(one) for name, one in modules.items()}
        names = self._optimizers.stored_names(tree["optimizer"], parts[MODEL].parameters)
        return {
            "form": FORM,
            "parameters": names,
            "groups": self.groups,
            "hyperparameters": self.hyperparameters,
            "inner": self._optimizers.inner_states(parts[MODEL].parameters),
            "values": {
                name: stored_values(one, parts[name], set(map(plain_name, _state_in(tree, name))), self.built[name])
                for name, one in modules.items()
            },
            "attributes": self.changed_attributes(parts[MODEL]),
            "own": {"random": row_of_generators(), "order": self._order(names, sorted(parts[MODEL].parameters))},
        }

    def _say_if_accumulating(self, tree: Mapping[str, Any]) -> None:
        """Steps have left gradients that no optimizer has used, and `extra` has no such."""
        if self._has_said_gradients or not self._optimizers.left.are_left:
            return
        gradients = [parameter.grad for parameter in self._module.parameters() if parameter.grad is not None]
        kept = set(map(id, tree_flatten(tree.get("extra"))[0])) if gradients else set()
        if any(id(gradient) not in kept for gradient in gradients):
            self._has_said_gradients = True
            log.warning(
                "step %d has left its gradients for the next one, and they are in no checkpoint: a run that resumes "
                "from here begins without them. Accumulate within a step (docs/state.md), or save where none are kept",
                self._own.step,
            )

    def _order(self, names: Any, among: Sequence[str]) -> dict[int, torch.Tensor]:
        places = {name: place for place, name in enumerate(among)}
        by_optimizer = enumerate(self._optimizers.states_in(names))
        return {
            number: torch.tensor([places.get(name, -1) for name in of_one], dtype=torch.int32)
            for number, of_one in by_optimizer
            if of_one
        }

    def load(
        self, tree: Mapping[str, Any], trained: Trained, *, with_random: bool, was_trained: bool, is_all_known: bool
    ) -> torch.Tensor | None:
        """Have all of a tree, of any form.

        Args:
            tree: what `plain_tree` gave, with what `beside` gave or without it.
            trained: what else is trained here.
            with_random: whether this process draws what the first rank drew that has saved.
            was_trained: whether the state was in a group before, and its optimizers may have been changed in the run.
            is_all_known: whether no subclass of the user's may have parts of its own in the tree.

        Returns:
            The rows of the random numbers of all ranks that have saved; None: it has none.

        Raises:
            UnfitStateError: it is of another model, of other optimizers, or of a newer release.
        """
        form = form_of(tree)
        unknown = sorted(tree.keys() - PARTS) if form == FORM and is_all_known else []
        if unknown:
            log.warning("the state that is loaded has parts that nobody here knows, and they are skipped: %s", unknown)
        if form > 1:
            self._put_buffers(tree)
        self._load_weights(tree, was_trained=was_trained)
        schedules = _schedules(trained)
        self._own.load_state_dict(dict(tree), trained, with_random=with_random)
        if not was_trained:
            self._say_other_schedules(schedules, _schedules(trained))
        if OF_RANKS in tree:
            log.warning(
                "the optimizer in this checkpoint of a ShardedState has plain tensors that may differ from rank to "
                "rank: those of the first rank are taken: %s",
                shortlist(sorted({name for of_rank in tree[OF_RANKS].values() for name in of_rank})),
            )
        if form == 1:
            return None
        self._say_other_hyperparameters(tree.get("hyperparameters", []))
        self._put_flags(tree)
        differing = differing_attributes(self._module, tree.get("attributes", {}))
        if differing:
            log.warning(
                "step %d: attributes of the model had changed in the run when this was saved, and are not set: %s "
                "(there: in the checkpoint). Make what the training depends on a buffer, or return it from "
                "get_extra_state", self._own.step, shortlist(differing),
            )  # fmt: skip
        rows: torch.Tensor = tree["own"]["random"]
        rows = rows if rows.dim() == 2 else rows[None]  # a file has that of one rank
        if with_random:
            put_rows_of_generators(rows, 0)
        return rows

    def _load_weights(self, tree: Mapping[str, Any], *, was_trained: bool) -> None:
        keeps_types = module_state.has_types_of(self._module, tree["module"])
        module_state.load_into(self._module, tree["module"])
        if "parameters" not in tree:
            self._optimizers.load_state_dict(tree["optimizer"], keeps_types=keeps_types)
            return
        optimizer = self._optimizers.named_from_stored(tree["optimizer"], tree["parameters"])
        # what the run has changed in groups that are built as they were then comes from the checkpoint
        may_lose = was_trained or tree["groups"] == self.groups
        self._optimizers.load_named_state(
            optimizer,
            named_parameters(self._module),
            inner=tree["inner"],
            keeps_types=keeps_types,
            may_lose=may_lose,
            is_stored=True,
        )

    def _say_other_hyperparameters(self, before: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Those that the script builds otherwise than it did when this was saved: the run's own go on."""
        now = self.hyperparameters
        if [len(one) for one in now] != [len(one) for one in before]:
            return  # groups were added, or it does not say
        differing = [
            f"{name} of group {number}{f' of optimizer {which}' if len(now) > 1 else ''} ({group[name]} there, {value} "
            "in the script)"
            for which, (groups, groups_now) in enumerate(zip(before, now, strict=True))
            for number, (group, group_now) in enumerate(zip(groups, groups_now, strict=True))
            for name, value in group_now.items()
            if name in group and group[name] != value
        ]
        if differing:
            log.warning(
                "step %d: the script builds its optimizer with other values than when this was saved, and the run goes "
                "on with its own, and with its schedule: %s. To have the script's, set them in param_groups in the "
                "first step that is to have them (docs/state.md)", self._own.step, shortlist(differing),
            )  # fmt: skip

    def _say_other_schedules(self, built: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
        """Those that the script builds otherwise than when this was saved: the run's own go on."""
        differing = [f"{name} ({stored[name]} there, {value} in the script)" for name, value in built.items()
                     if name in stored and stored[name] != value]  # fmt: skip
        if differing:
            log.warning(
                "step %d: the script builds its schedule otherwise than when this was saved, and the run goes on with "
                "its own: %s. To have the script's, set these attributes of the scheduler in the first step that is to "
                "have them (docs/state.md)", self._own.step, shortlist(differing),
            )  # fmt: skip

    def _put_buffers(self, tree: Mapping[str, Any]) -> None:
        """Before all else, so that what is loaded fits."""
        self.look()
        kept = []
        for name, one in self._stored(tree).items():
            plain = {plain_name(key): value for key, value in _state_in(tree, name).items()}
            of_one = put_stored_buffers(one, tree["values"][name], plain, _persistent(one), self.built[name])
            kept += [_shown(name, each) for each in of_one]
        report_buffers(kept)

    def _put_flags(self, tree: Mapping[str, Any]) -> None:
        kept = []
        for name, one in self._stored(tree).items():
            kept += [_shown(name, each) for each in put_stored_flags(one, tree["values"][name], self.built[name])]
        report_flags(kept)

    def _stored(self, tree: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
        """Those modules that the tree has, too."""
        return {
            name: one for name, one in self._modules().items()
            if name in tree["values"] and (name == MODEL or name in tree["extra"])
        }  # fmt: skip

    def _modules(self) -> dict[str, torch.nn.Module]:
        values = self._own.extras.values.items()
        return {MODEL: self._module, **{name: one for name, one in values if isinstance(one, torch.nn.Module)}}


def report_buffers(kept: Sequence[str]) -> None:
    """Say which buffers of a checkpoint were not taken, if there are any."""
    if kept:
        log.warning(
            "buffers that are not persistent are built otherwise now than when this checkpoint was saved, and stay as "
            "they are built: %s", shortlist(kept),
        )  # fmt: skip


def report_flags(kept: Sequence[str]) -> None:
    """The same of flags."""
    if kept:
        log.warning(
            "which parameters require a gradient, or which modules are in training mode, is built otherwise now than "
            "when this checkpoint was saved, and stays as it is built: %s", shortlist(kept),
        )  # fmt: skip


def form_of(tree: Mapping[str, Any]) -> int:
    """The form of a tree that is to be loaded.

    Raises:
        UnfitStateError: a newer release has saved it.
    """
    form = tree.get("form", 1)
    if form not in (1, FORM):
        raise UnfitStateError(
            f"this checkpoint has form {form}, and this release of torchelastic reads forms 1 and {FORM}: a newer one "
            "has saved it; install that"
        )
    return int(form)


def _state_in(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    state: Mapping[str, Any] = tree["module"] if name == MODEL else tree["extra"][name]
    return state


def names_in_order(order: torch.Tensor, among: Sequence[str]) -> list[str]:
    """The names of the numbers in an optimizer's state, given a row of its "order"; "" is none of the model's.

    Args:
        order: of the checkpoint.
        among: the sorted names of the parameters here.

    Raises:
        UnfitStateError: the checkpoint is of a model with other parameters.
    """
    places = order.tolist()
    if max(places, default=-1) >= len(among):
        raise UnfitStateError(
            "the optimizer's state in the checkpoint is of a model with more parameters than this one has: build the "
            "model as it was when it was saved, or save to another folder"
        )
    return [among[place] if place >= 0 else "" for place in places]


def _schedules(trained: Trained) -> dict[str, Any]:
    """What the schedulers were built with, by name, as far as they keep it: `total_iters`, say."""
    found: dict[str, Any] = {}
    for number, one in enumerate(trained.schedulers.objects):
        asked = set(inspect.signature(type(one).__init__).parameters) - {"self", "last_epoch"}
        kept = {name: value for name, value in vars(one).items() if name in asked} if hasattr(one, "__dict__") else {}
        prefix = f"{number}." if len(trained.schedulers.objects) > 1 else ""
        found |= {f"{type(one).__name__}.{prefix}{name}": value for name, value in _plain(kept).items()}
    return found


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers and texts, and pairs of them; a learning rate that is a tensor changes in place."""
    plain = (bool, int, float, str, type(None))
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    return {
        name: value
        for name, value in values.items()
        if all(isinstance(one, plain) for one in (value if isinstance(value, list) else [value]))
    }


def _persistent(module: torch.nn.Module) -> set[str]:
    return set(module_state.state_of(module))


def _shown(module: str, name: str) -> str:
    return name if module == MODEL else f"extra[{module!r}].{name}"
