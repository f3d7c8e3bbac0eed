"""What the user's `build(mesh)` has made for one group: the model, its optimizers, and the parts that lie here."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torchelastic.checkpoint.format.header import Entry
from torchelastic.checkpoint.format.regions import Region
from torchelastic.checkpoint.format.tensor_parts import dtype_name, dtype_named, region_of
from torchelastic.errors import NonRetryableException, UnfitError
from torchelastic.inventory.generators import seeded
from torchelastic.inventory.module_parts import ModuleParts
from torchelastic.inventory.module_structure import ModuleStructure
from torchelastic.inventory.names import named_parameters
from torchelastic.inventory.optimizer_values import group_faults, put_groups
from torchelastic.inventory.stored_values import Built as AsBuilt
from torchelastic.model.companions import Companions, Trained
from torchelastic.model.one_or_many import OneOrMany
from torchelastic.model.optimizers import Optimizers
from torchelastic.model.stored_form import StoredForm
from torchelastic.sharded.blank import give_memory, memory_of
from torchelastic.sharded.offers import Layout
from torchelastic.sharded.plain_tensors import OPTIMIZER, PARAMETERS, split_name
from torchelastic.text import shortlist
from torchelastic.torch_internals.sharding import local_part, release_flat_memory
from torchelastic.torch_internals.tensors import tensors_within

#: (model, optimizer), or (model, optimizer, scheduler); several optimizers or schedulers as a list, a tuple or a dict.
Build = Callable[[DeviceMesh], tuple[Any, ...]]


class Built:
    """One model and its optimizers, on one mesh. Used on the training thread.

    Args:
        build: the user's.
        mesh: of the group.
        seed: of the random numbers while it runs: the same on all ranks.
        before_each: called before an optimizer steps, and whether it is the first of a train step.
        own: what belongs to the state besides.
        as_built: how the modules were built the first time; filled then.

    Attributes:
        mesh: as given.
        model: sharded; its memory is there.
        optimizer: as the user returned it.
        scheduler: as the user returned it; None: none.
        optimizers: all of them.
        schedulers: all of them.
        parameters: by name; tied ones once.
        blank: what was on the meta device, and holds nothing yet.
        rest: what the model has besides.
        form: of its checkpoints.
        names_as_built: of the parameters of each optimizer, as `build` has made it.

    Raises:
        ValueError, NonRetryableException: what was built cannot be kept; says why.
    """

    def __init__(
        self,
        build: Build,
        mesh: DeviceMesh,
        *,
        seed: int,
        before_each: Callable[[bool], None],
        own: Companions,
        as_built: dict[str, AsBuilt],
    ) -> None:
        check_device(mesh.device_type)
        self.mesh = mesh
        with seeded(seed):
            self.model, self.optimizer, self.scheduler = _taken_apart(build(mesh))
        # a name of DDP's or FSDP1's wrapper would not fit any other layout, and neither can be cut at will
        self.parameters = named_parameters(self.model)
        _check(self.parameters)
        self.blank = give_memory(self.model, torch.device(mesh.device_type))
        if self.blank:
            self.parameters = named_parameters(self.model)
        self.rest = ModuleParts(self.model, self.parameters)
        self.structure = ModuleStructure(self.model)
        self.optimizers = Optimizers(self.optimizer, lambda: None, before_each)
        self.optimizers.watch(self.parameters.values())
        self.schedulers = OneOrMany("scheduler", self.scheduler)
        self.form = StoredForm(self.model, self.optimizers, own, as_built)
        self.form.look()
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}
        self.names_as_built = [[name for name, _ in optimized] for optimized in self.optimized]
        self._sizes: list[int] = []
        self._beside: dict[str, ModuleParts] = {}
        self._parts: dict[str, Entry] = {}

    @property
    def trained(self) -> Trained:
        """What a step changes beside the parts."""
        return Trained((), self.optimizers, self.schedulers, self.structure)

    @property
    def optimized(self) -> list[list[tuple[str, torch.Tensor]]]:
        """The parameters of each optimizer with their names, in its order; a script may add groups in the run.

        Raises:
            NonRetryableException: one is not the model's.
        """
        return [
            [(self._name_of(parameter), parameter) for group in each.param_groups for parameter in group["params"]]
            for each in self.optimizers.objects
        ]

    def parts_of(self, extra: Mapping[str, Any]) -> dict[str, ModuleParts]:
        """What the modules among the user's own values have, by their names."""
        modules = {name: value for name, value in extra.items() if isinstance(value, torch.nn.Module)}
        self._beside = {
            name: self._beside[name]
            if name in self._beside and self._beside[name].module is module
            else ModuleParts(module, named_parameters(module))
            for name, module in modules.items()
        }
        return self._beside

    def _name_of(self, parameter: torch.Tensor) -> str:
        name = self._names.get(id(parameter))
        if name is None:
            raise NonRetryableException(
                f"an optimizer holds a tensor of shape {tuple(parameter.shape)} that is no parameter of the model that "
                "build(mesh) has made: make the optimizer after fully_shard, of model.parameters(); parameters that "
                "are trained from a later step on have to be the model's from the beginning"
            )
        return name

    def check_optimized(self) -> None:
        """Called when a step has succeeded, which may have added groups.

        Raises:
            NonRetryableException: an optimizer has a parameter that is not the model's.
        """
        sizes = [len(group["params"]) for each in self.optimizers.objects for group in each.param_groups]
        if sizes != self._sizes:
            self._sizes, _ = sizes, self.optimized

    def check_parameters(self) -> None:
        """Called when the group has ended.

        Raises:
            NonRetryableException: the model has other parameters than those that `build` has given it.
        """
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        now = named_parameters(self.model)
        other = sorted(name for name in self.parameters if now.get(name) is not self.parameters[name])
        if other or now.keys() != self.parameters.keys():
            raise NonRetryableException(
                f"the model has got other parameters in the run ({shortlist(other or sorted(now), 3)}): in another "
                "group they would be as build(mesh) makes them. Change them in place"
            )

    # --- what this rank holds -----------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, torch.Tensor]:
        """The parameters and the optimizers' tensors, by name; not copied."""
        found = {PARAMETERS + name: memory_of(parameter) for name, parameter in self.parameters.items()}
        for name, value in self._optimizer_values():
            if isinstance(value, torch.Tensor):
                found[name] = memory_of(value)
        return found

    def layout(self, *, parameters_only: bool = False) -> dict[str, Entry]:
        """Which parts these are, by name."""
        found: dict[str, torch.Tensor] = {PARAMETERS + name: each for name, each in self.parameters.items()}
        if not parameters_only:
            found |= {name: value for name, value in self._optimizer_values() if isinstance(value, torch.Tensor)}
        for name, tensor in found.items():
            part = self._parts.get(name)
            if part is None or part.shape != tensor.shape:
                _require_plain(name, tensor)
                form = dtype_name(tensor.dtype), tuple(tensor.shape), region_of(tensor)
                self._parts[name] = Entry.of(name, *form, is_shard=isinstance(tensor, DTensor))
        return {name: self._parts[name] for name in found}

    def expected_bytes(self) -> int:
        """How large this rank's parts are; while the optimizers have no state yet, as if each kept two values each."""
        parameters = sum(memory_of(parameter).nbytes for parameter in self.parameters.values())
        held = sum(tensor.nbytes for tensor in self.tensors().values())
        return held if held > parameters else 3 * parameters

    def plain_values(self) -> dict[str, Any]:
        """What the optimizers' states hold beside tensors, by name.

        Raises:
            NonRetryableException: something that is neither a tensor nor a plain value.
        """
        found = {}
        for name, value in self._optimizer_values():
            if isinstance(value, torch.Tensor):
                continue
            if value is not None and not isinstance(value, (bool, int, float, str)):
                raise NonRetryableException(
                    f"the optimizer's state holds a {type(value).__name__} ({name}): only tensors and plain values can "
                    "be moved from one group to the next"
                )
            found[name] = value
        return found

    def _optimizer_values(self) -> Iterator[tuple[str, Any]]:
        for number, (optimizer, optimized) in enumerate(zip(self.optimizers.objects, self.optimized, strict=True)):
            for name, parameter in optimized:
                for key, value in optimizer.state.get(parameter, {}).items():
                    yield f"{OPTIMIZER}{number}/{name}/{key}", value

    # --- groups, and what else optimizers have ------------------------------------------------------------------------

    def groups(self) -> list[list[dict[str, Any]]]:
        """The parameter groups of each optimizer: hyperparameters, and the names of the parameters as "params"."""
        return [
            [
                {**settings, "params": [self._name_of(parameter) for parameter in group["params"]]}
                for settings, group in zip(of_one, optimizer.param_groups, strict=True)
            ]
            for of_one, optimizer in zip(self.optimizers.settings(), self.optimizers.objects, strict=True)
        ]

    def put_groups(self, groups: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Have groups with the same parameters; groups that do not name them stay as they are.

        Args:
            groups: what `groups` gave, also of another rank.

        Raises:
            NonRetryableException: they are of another model or of other optimizers.
        """
        for optimizer, of_one in zip(self.optimizers.objects, groups, strict=True):
            if not all("params" in group for group in of_one):
                continue
            state = {"param_groups": of_one}
            for fault in group_faults(state, optimizer, self.parameters, may_lose=True):
                raise NonRetryableException(
                    f"{fault}: build(mesh) must make the same model and the same {type(optimizer).__name__} always"
                )
            put_groups(state, optimizer, self.parameters)

    def others(self) -> list[dict[Any, Any]]:
        """What each optimizer's state holds that is no parameter's."""
        return [
            {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
            for optimizer in self.optimizers.objects
        ]

    def put_others(self, others: Sequence[Mapping[Any, Any]]) -> None:
        """The inverse."""
        for optimizer, values in zip(self.optimizers.objects, others, strict=True):
            optimizer.state.update(values)

    def is_split(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of a saved state is sharded here: a parameter's, or one of the same shape."""
        if name.startswith(PARAMETERS):
            return isinstance(self.parameters[name.removeprefix(PARAMETERS)], DTensor)
        parameter = self.parameters[split_name(name)[1]]
        return isinstance(parameter, DTensor) and tuple(parameter.shape) == shape and bool(shape)

    # --- taking over a state ------------------------------------------------------------------------------------------

    def regions_for(self, layout: Layout) -> dict[str, Region]:
        """The region of each tensor of a state that this rank needs.

        Args:
            layout: of the state, as some rank has held it: its names and shapes count.

        Raises:
            NonRetryableException: the state is of another model or of other optimizers.
        """
        own = self.layout(parameters_only=True)
        strange = sorted({name for name in layout if name.startswith(PARAMETERS)} ^ own.keys())
        if strange:
            raise NonRetryableException(other_parameters(strange))
        regions = {}
        for name, part in layout.items():
            placed = own[name] if name in own else self._like_its_parameter(name, part, own)
            if (placed.shape, placed.dtype) != (part.shape, part.dtype):
                raise NonRetryableException(
                    f"{name} is a {placed.dtype} of shape {placed.shape} in the model that build(mesh) has made, and "
                    f"was a {part.dtype} of shape {part.shape} before: it must make the same model for any mesh"
                )
            regions[name] = placed.region
        return regions

    def _like_its_parameter(self, name: str, part: Entry, own: Layout) -> Entry:
        """Where a tensor of an optimizer's state lies in this group."""
        if not part.is_shard:
            return Entry.of(name, part.dtype, part.shape, Region.whole(part.shape), is_shard=False)
        parameter = own[PARAMETERS + split_name(name)[1]]
        if parameter.shape != part.shape:
            raise NonRetryableException(
                f"{name} has the shape {part.shape} and is sharded, and its parameter has the shape {parameter.shape}: "
                "an optimizer whose state is sharded in another way than its parameters cannot be moved to other groups"
            )
        return Entry.of(name, part.dtype, part.shape, parameter.region, is_shard=True)

    def make_optimizer_state(self, layout: Layout, plain_values: Mapping[str, Any]) -> None:
        """Give the optimizers a state of this form, whose tensors hold nothing yet."""
        for optimizer in self.optimizers.objects:
            optimizer.state.clear()
        for name, part in layout.items():
            if name.startswith(OPTIMIZER):
                number, parameter_name, key = split_name(name)
                parameter = self.parameters[parameter_name]
                optimizer = self.optimizers.objects[number]
                stays_on_cpu = _stays_on_cpu(optimizer, parameter, key)
                optimizer.state[parameter][key] = _made_like(parameter, part, stays_on_cpu)
        for name, value in plain_values.items():
            number, parameter_name, key = split_name(name)
            self.optimizers.objects[number].state[self.parameters[parameter_name]][key] = value

    def release(self) -> None:
        """Let go of the memory; the objects are of no use after that. What the user still holds of it stays valid.

        Model and hooks hold each other, so Python would keep all of it until it looks for such rings.
        """
        for optimizer in self.optimizers.objects:
            optimizer.state.clear()
        with torch.no_grad():
            for parameter in self.parameters.values():
                parameter.grad = None
                local = local_part(parameter) if isinstance(parameter, DTensor) else parameter
                local.set_()  # type: ignore[call-overload]  # without arguments: no memory
        for module in self.model.modules():
            _release_flat_memory(module)
        _release_freed_memory()


def _release_flat_memory(module: torch.nn.Module) -> None:
    """FSDP holds each parameter's memory a second time, flat; where another torch has it elsewhere, it goes later.

    A step that failed may have left the module with whole parameters, too.
    """
    if not isinstance(module, FSDPModule):
        return
    module.reshard()
    release_flat_memory(module)


def _release_freed_memory() -> None:
    """Have glibc give freed memory back to the system; other C libraries do so by themselves.

    Tensors of up to 32 MiB come from its heap, and before its version 2.38 an aligned block that was freed is too small
    for another one of the same size: a worker would grow by about half of its parts with each change of the group.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def other_parameters(names: Sequence[str]) -> str:
    """What is wrong with a model, given the parameters that it, or the one before, lacks."""
    told = shortlist([name.removeprefix(PARAMETERS) for name in names], 3)
    return f"build(mesh) has made a model with other parameters than before ({told}): it must make the same one always"


def _taken_apart(made: Any) -> tuple[torch.nn.Module, Any, Any]:
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], torch.nn.Module):
        raise TypeError(
            f"build(mesh) returned a {type(made).__name__}: it must return (model, optimizer), or (model, optimizer, "
            "scheduler)"
        )
    model, optimizer, *scheduler = made
    return model, optimizer, scheduler[0] if scheduler else None


def check_device(kind: str) -> None:
    """Raise UnfitError for a kind of device on which this torch does not run FSDP2: torch 2.6 lacks what it needs."""
    if kind == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        raise UnfitError(
            f"FSDP2 of torch {torch.__version__} does not run on CPUs: install torch 2.9 or later, or use GPUs"
        )


def _check(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    sharded = [name for name, parameter in parameters.items() if isinstance(parameter, DTensor)]
    if not sharded:
        raise ValueError(
            "build(mesh) has sharded none of the model's parameters: call torch.distributed.fsdp.fully_shard(model, "
            "mesh=mesh) in it, or use ModelState, which keeps a whole model on every worker"
        )
    for name, parameter in parameters.items():
        if not isinstance(parameter, DTensor) and parameter.requires_grad:
            raise ValueError(
                f"build(mesh) has left the parameter {name!r} unsharded: its gradients would not be reduced over the "
                "workers. Call fully_shard on the whole model too, last"
            )


def _require_plain(name: str, tensor: torch.Tensor) -> None:
    """Raise NonRetryableException for a tensor in an optimizer's state that is made of others, as 8-bit ones are."""
    local = memory_of(tensor)
    if name.startswith(OPTIMIZER) and tensors_within(local) is not None:
        raise NonRetryableException(
            f"the optimizer's state holds a {type(local).__name__} ({name.removeprefix(OPTIMIZER)}), a tensor that is "
            "made of others: only plain ones can be moved from one group to the next. Use an optimizer whose state is "
            "of plain tensors"
        )


def _stays_on_cpu(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, key: str) -> bool:
    """Torch's optimizers count steps on the CPU, unless the count is part of a kernel or a graph."""
    if key != "step":
        return False
    groups = optimizer.param_groups
    group = next((one for one in groups if any(parameter is each for each in one["params"])), groups[0])
    return not group.get("capturable") and not group.get("fused")


def _made_like(parameter: torch.nn.Parameter, part: Entry, stays_on_cpu: bool) -> torch.Tensor:
    dtype = dtype_named(part.dtype)
    if part.is_shard:
        assert isinstance(parameter, DTensor)
        local = torch.empty_like(parameter.to_local(), dtype=dtype, requires_grad=False)
        return DTensor.from_local(
            local, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
            stride=parameter.stride(),
        )  # fmt: skip
    device = torch.device("cpu") if stays_on_cpu else memory_of(parameter).device
    return torch.empty(part.shape, dtype=dtype, device=device)
