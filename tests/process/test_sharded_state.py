"""What a ShardedState refuses, and what it does on one worker: in a world of one, real FSDP2 on gloo."""

from __future__ import annotations

import datetime
import importlib.util
import inspect
import io
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Shard

import torchelastic
from tests.older_torch import needs_fsdp2_on_cpus
from torchelastic import CoordinatorP2P, ElasticBatchSampler, ModelState, ShardedState
from torchelastic.checkpoint import DiskTier, FileSystemCheckpointManager, TieredCheckpointManager
from torchelastic.errors import NonRetryableException, RetryableException, UnfitError
from torchelastic.group.peers import Alone
from torchelastic.rendezvous.records import StateStatus
from torchelastic.sharded import HybridShard
from torchelastic.sharded.built import check_device
from torchelastic.sharded.weighting import GradientWeights

pytestmark = pytest.mark.filterwarnings("ignore:.*Full backward hook.*")


@pytest.fixture(autouse=True)
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Scaled(torch.nn.Module):
    """Has a parameter and a buffer of its own, and no reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(5))
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.scale


def model_of(*layers: torch.nn.Module) -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(3, 5), *layers, torch.nn.Linear(5, 2))


def build(
    *layers: Callable[[], torch.nn.Module], on_meta: bool = True, shard: bool = True
) -> Callable[[DeviceMesh], tuple[Any, ...]]:
    def made(mesh: DeviceMesh) -> tuple[Any, ...]:
        with torch.device("meta" if on_meta else "cpu"):
            model = model_of(*(layer() for layer in layers))
        if shard:
            fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    return made


def build_replicated(mesh: DeviceMesh) -> tuple[Any, ...]:
    """By `replicate`, where this torch has it on the machinery of FSDP2, on any mesh."""
    with torch.device("meta"):
        model = model_of()
    found = importlib.util.find_spec("torch.distributed._composable.replicate_with_fsdp")
    replicate: Any = None if found is None else importlib.import_module(found.name).replicate
    takes_mesh = replicate is not None and "mesh" in inspect.signature(replicate).parameters
    for module in (*model, model):
        (replicate if takes_mesh else fully_shard)(module, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def build_on_two_meshes(mesh: DeviceMesh) -> tuple[Any, ...]:
    """The last layer on a mesh of its own, as experts are, where this torch can do that: a module of two groups."""
    with torch.device("meta"):
        model = model_of()
    experts = set(model[1].parameters())
    if hasattr(_fsdp_common, "ShardPlacementResult"):
        own = DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("experts",))
        of_all, of_experts = (_fsdp_common.FSDPMeshInfo(each, shard_mesh_dim=0) for each in (mesh, own))

        def placed(parameter: torch.nn.Parameter) -> Any:
            return _fsdp_common.ShardPlacementResult(Shard(0), of_experts if parameter in experts else of_all)

        fully_shard(model, mesh=mesh, shard_placement_fn=placed)
    else:
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)  # of tensors on two meshes


def train(state: ShardedState, steps: int = 1) -> None:
    for _ in range(steps):
        snapshot = state.snapshot()
        assert snapshot.step == state.step
        state.model(torch.ones(4, 3)).sum().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.commit()


def whole(state: ShardedState) -> dict[str, torch.Tensor]:
    return {
        name: value.full_tensor().detach().clone() if isinstance(value, DTensor) else value.detach().clone()
        for name, value in state.model.state_dict().items()
    }


@pytest.mark.parametrize("made", [build(on_meta=True), build(on_meta=False), build_replicated])
@needs_fsdp2_on_cpus
def test_first_values_are_those_of_one_process_with_this_seed(made: Callable[[DeviceMesh], tuple[Any, ...]]) -> None:
    state = ShardedState(made, seed=7)
    before = torch.get_rng_state()
    state.sync()
    assert torch.equal(torch.get_rng_state(), before), "the user's random numbers were drawn from"
    torch.manual_seed(7)
    plain = model_of()
    for name, value in plain.state_dict().items():
        assert torch.equal(whole(state)[name], value), name


@needs_fsdp2_on_cpus
def test_a_module_that_cannot_initialize_itself_is_named() -> None:
    with pytest.raises(NonRetryableException, match=r"the module '1' is a Scaled, was built on the meta device"):
        ShardedState(build(Scaled)).sync()


@needs_fsdp2_on_cpus
def test_initialize_is_called_with_whole_modules_of_the_users_classes() -> None:
    seen = []

    def initialize(module: torch.nn.Module) -> None:
        seen.append((type(module), {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False)}))
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            torch.nn.init.constant_(tensor, 3.0)

    state = ShardedState(build(Scaled), initialize=initialize)
    state.sync()
    linear = {"weight": (5, 3), "bias": (5,)}
    assert seen[0] == (torch.nn.Linear, linear)
    assert seen[1] == (Scaled, {"scale": (5,)})
    assert len(seen) == 3
    assert all(bool((value == 3.0).all()) for value in whole(state).values())


@pytest.mark.parametrize("made", [build(), build_on_two_meshes])
@needs_fsdp2_on_cpus
def test_the_next_group_takes_all_over_bit_for_bit(made: Callable[[DeviceMesh], tuple[Any, ...]]) -> None:
    state = ShardedState(made, extra={"note": "kept"})
    state.sync()
    train(state, 3)
    weights, moments = whole(state), state.optimizer.state_dict()["state"][0]["exp_avg"].full_tensor().clone()
    model, step = state.model, state.optimizer.state_dict()["state"][0]["step"].clone()
    state.sync()
    assert state.model is not model
    assert (state.step, state.extra) == (3, {"note": "kept"})
    assert all(torch.equal(value, weights[name]) for name, value in whole(state).items())
    assert torch.equal(state.optimizer.state_dict()["state"][0]["exp_avg"].full_tensor(), moments)
    assert torch.equal(state.optimizer.state_dict()["state"][0]["step"], step)
    held = [parameter._local_tensor for parameter in model.parameters() if isinstance(parameter, DTensor)]
    assert [tensor.numel() for tensor in held] == [0] * 4, "the old memory is still held"


@pytest.mark.parametrize("has_stepped", [False, True])
@needs_fsdp2_on_cpus
def test_a_step_that_failed_is_undone_or_stands(has_stepped: bool) -> None:
    """After its optimizer has stepped on all that are left, it stands, as the commit rule says."""
    state = ShardedState(build(), sampler=ElasticBatchSampler(40, 4))
    state.sync()
    train(state, 2)
    weights = whole(state)
    snapshot = state.snapshot()
    state.sampler.consume()
    state.model(torch.ones(4, 3)).sum().backward()
    if has_stepped:
        state.optimizer.step()
    state.apply(snapshot)
    state.sync()
    assert state.step == (3 if has_stepped else 2)
    assert state.sampler.cursor == 4 * (1 if has_stepped else 0)  # `train` above draws no batch
    assert all(torch.equal(value, weights[name]) != has_stepped for name, value in whole(state).items())


def interrupt_the_optimizer(state: ShardedState) -> None:
    """A step whose optimizer fails half-way, undone as far as that goes."""
    snapshot = state.snapshot()
    state.model(torch.ones(4, 3)).sum().backward()

    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = state.optimizer.register_step_pre_hook(fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        state.optimizer.step()
    handle.remove()
    state.apply(snapshot)


@needs_fsdp2_on_cpus
def test_an_optimizer_that_was_interrupted_leaves_nothing_to_go_on_from() -> None:
    state = ShardedState(build())
    state.sync()
    train(state, 2)
    interrupt_the_optimizer(state)
    assert state.status is StateStatus.INITIAL
    with pytest.raises(RetryableException, match="any part of the model: trying to load a checkpoint"):
        state.sync()  # the first values are not those of step 2
    with pytest.raises(NonRetryableException, match=r"the run was at step 2.*optimizer\.step"):
        state.sync()


@pytest.mark.parametrize("has_stepped", [False, True])
@needs_fsdp2_on_cpus
def test_a_failed_step_that_has_changed_weights_itself_leaves_nothing_to_go_on_from(has_stepped: bool) -> None:
    """The others' copies of the state before the step do."""
    state = ShardedState(build())
    state.sync()
    train(state, 2)
    snapshot = state.snapshot()
    state.model(torch.ones(4, 3)).sum().backward()
    if has_stepped:
        state.optimizer.step()
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.mul_(0.5)
    state.apply(snapshot)
    assert state.status is StateStatus.INITIAL
    with pytest.raises(RetryableException, match="any part of the model: trying to load a checkpoint"):
        state.sync()


def first_layer_only(mesh: DeviceMesh) -> tuple[Any, ...]:
    model = model_of()
    fully_shard(model[0], mesh=mesh)
    return model, torch.optim.SGD(model.parameters())


def optimizer_before_sharding(mesh: DeviceMesh) -> tuple[Any, ...]:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters())
    fully_shard(model, mesh=mesh)
    return model, optimizer


@pytest.mark.parametrize(("made", "told"), [
    (build(shard=False), "has sharded none of the model's parameters"),
    (lambda mesh: torch.nn.Linear(1, 1), "it must return \\(model, optimizer\\)"),
    (lambda mesh: (build()(mesh)[0],), "it must return \\(model, optimizer\\)"),
    (first_layer_only, r"has left the parameter '1\.\w+' unsharded"),
    (optimizer_before_sharding, "make the optimizer after fully_shard"),
])  # fmt: skip
@needs_fsdp2_on_cpus
def test_what_build_must_not_return(made: Callable[[DeviceMesh], Any], told: str) -> None:
    with pytest.raises((ValueError, TypeError, NonRetryableException), match=told):
        ShardedState(made).sync()


@needs_fsdp2_on_cpus
def test_another_model_in_the_next_group_is_named() -> None:
    layers: list[Callable[[], torch.nn.Module]] = []
    state = ShardedState(lambda mesh: build(*layers)(mesh))
    state.sync()
    train(state)
    layers.append(lambda: torch.nn.Linear(5, 5))
    with pytest.raises(NonRetryableException, match="a model with other parameters than before"):
        state.sync()


class Odd(torch.optim.SGD):
    """Keeps what is no tensor and no plain value."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["odd"] = object()
        return result


@needs_fsdp2_on_cpus
def test_an_optimizer_with_state_of_other_kinds_is_refused() -> None:
    def made(mesh: DeviceMesh) -> tuple[Any, ...]:
        model, _ = build()(mesh)
        return model, Odd(model.parameters(), lr=0.1)

    state = ShardedState(made)
    state.sync()
    train(state)
    with pytest.raises(NonRetryableException, match="the optimizer's state holds a object"):
        state.sync()


def test_numbers_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="every=0 at least 1"):
        ShardedState(build(), every=0)
    with pytest.raises(ValueError, match="replicas=-1 must be at least 0"):
        ShardedState(build(), replicas=-1)
    with pytest.raises(ValueError, match="sampler is a object"):
        ShardedState(build(), sampler=object())
    with pytest.raises(ValueError, match="shard=0"):
        HybridShard(0)


def test_one_rank_alone_neither_saves_nor_loads() -> None:
    state = ShardedState(build())
    for call in (state.save, state.load):
        with pytest.raises(NonRetryableException, match="give train\\(\\) a TieredCheckpointManager"):
            call(io.BytesIO())


def test_a_world_that_is_no_multiple_names_the_option() -> None:
    with pytest.raises(NonRetryableException, match="--multiple-of 2"):
        HybridShard(2)(1)


class Half:
    """A sampler by which this rank has a quarter of the samples, in a world of two."""

    weight = 0.25


def test_outputs_of_which_one_was_computed_from_another_are_scaled_once() -> None:
    class WithLoss(torch.nn.Linear):
        def forward(self, inputs: torch.Tensor) -> Any:
            hidden = super().forward(inputs)
            return {"loss": hidden.sum(), "hidden": hidden}

    model = WithLoss(2, 1)
    weighting = GradientWeights(Half())
    weighting.enter_group(model, 2)
    weighting.begin_step()
    model(torch.ones(1, 2))["loss"].backward()
    weighting.check()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[0.5, 0.5]]


def test_gradients_that_cannot_be_weighted_are_an_error() -> None:
    weighting = GradientWeights(Half())
    weighting.enter_group(torch.nn.Linear(2, 1), 2)
    weighting.begin_step()  # the step computes its loss of something else than the model's output
    with pytest.raises(NonRetryableException, match="could not be weighted"):
        weighting.check()


@needs_fsdp2_on_cpus
def test_its_checkpoint_has_the_form_of_a_model_states() -> None:
    sharded = ShardedState(build())
    sharded.sync()
    train(sharded, 2)
    model = model_of()
    plain = ModelState(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    ours, theirs = sharded.checkpoint_tree(), plain.checkpoint_tree()
    assert theirs.keys() == ours.keys(), "what form 2 has"
    assert ours["module"].keys() == theirs["module"].keys()
    assert ours["optimizer"]["param_groups"][0]["params"] == theirs["optimizer"]["param_groups"][0]["params"]


def test_a_manager_that_saves_what_one_rank_holds_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="of a ShardedState no rank has the whole: give a TieredCheckpointManager"):
        torchelastic.train(
            CoordinatorP2P(), lambda state: None, ShardedState(build()),
            checkpoint=FileSystemCheckpointManager(str(tmp_path)),
        )  # fmt: skip


def saved(state: Any, folder: Path) -> TieredCheckpointManager:
    manager = TieredCheckpointManager([DiskTier(folder)], run_id="run")
    manager.save_step(state, state.step, Alone())
    assert manager.wait(30)
    assert not manager.failures
    return manager


@needs_fsdp2_on_cpus
def test_plain_values_of_all_kinds_and_a_scheduler_with_a_counter_go_to_the_next_group(tmp_path: Path) -> None:
    def made(mesh: DeviceMesh) -> tuple[Any, ...]:
        model, optimizer = build()(mesh)
        return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 3], 0.5)

    values = {
        "day": datetime.date(2026, 1, 2),
        "last": deque([1.5], maxlen=2),
        "at": Path("/x"),
        "wave": np.complex64(1j),
    }
    state = ShardedState(made, extra={"own": values})
    state.sync()
    train(state)
    state.scheduler.step()
    manager = saved(state, tmp_path)
    state.sync()
    for one in (state, restored := ShardedState(made, extra={"own": None})):
        if one is restored:
            assert manager.restore(restored, Alone()) == 1
            restored.sync()
        assert repr(one.extra) == repr({"own": values})
        assert one.scheduler.milestones == {1: 2, 3: 1}
        assert one.optimizer.param_groups[0]["lr"] == 0.025
    manager.close()


@needs_fsdp2_on_cpus
def test_what_no_other_worker_could_receive_is_refused_at_the_start_and_ends_no_run_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UnfitError, match=r"extra\['what'\] is an object") as refused:
        ShardedState(build(), extra={"what": object()}).sync()
    assert "allow_pickles" not in str(refused.value)
    state = ShardedState(build(), extra={})
    state.sync()
    train(state)
    state.extra["what"] = object()
    train(state)
    manager = TieredCheckpointManager([DiskTier(tmp_path)], allow_pickles=True)
    for save in (manager.check_savable, lambda state: manager.save_step(state, 2, Alone())):
        with pytest.raises(TypeError, match=r"extra\['what'\] is an object") as unsaved:
            save(state)
        assert "allow_pickles" not in str(unsaved.value), "what was saved so could not be given to the ranks"
    manager.close()
    with pytest.raises(RetryableException, match="can give what goes with its parts"):
        state.sync()
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "step 2: " in told
    assert "extra['what'] is an object" in told


@needs_fsdp2_on_cpus
def test_a_run_that_began_unsharded_goes_on_sharded(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = model_of()
    plain = ModelState(model, torch.optim.AdamW(model.parameters(), lr=0.1), extra={"seen": 0})
    plain.sync()
    for _ in range(3):
        plain.snapshot()
        plain.model(torch.ones(4, 3)).sum().backward()
        plain.optimizer.step()
        plain.optimizer.zero_grad()
        plain.extra["seen"] += 4
        plain.commit()
    manager = saved(plain, tmp_path)
    state = ShardedState(build(), extra={"seen": 0})
    assert manager.restore(state, Alone()) == 3
    state.sync()
    assert (state.step, state.extra) == (3, {"seen": 12})
    for name, value in plain.module.state_dict().items():
        assert torch.equal(whole(state)[name], value), name
    theirs, ours = plain.optimizer.state_dict(), state.optimizer.state_dict()
    for place, kept in theirs["state"].items():
        assert torch.equal(ours["state"][place]["exp_avg_sq"].full_tensor(), kept["exp_avg_sq"])
        assert ours["state"][place]["step"] == kept["step"]
    manager.close()


@needs_fsdp2_on_cpus
def test_a_key_that_is_new_in_extra_stays_as_built_where_an_older_checkpoint_lacks_it(tmp_path: Path) -> None:
    older = ShardedState(build(), extra={"seen": 5})
    older.sync()
    train(older)
    manager = saved(older, tmp_path)
    state = ShardedState(build(), extra={"seen": 0, "best": 9.0})
    manager.restore(state, Alone())
    state.sync()
    assert state.extra == {"seen": 5, "best": 9.0}

    # who goes back to the checkpoint in mid-run has nothing of later steps
    state.extra["later"] = True
    interrupt_the_optimizer(state)
    manager.restore(state, Alone())
    state.sync()
    assert (state.step, state.extra["seen"], "later" in state.extra) == (1, 5, False)
    manager.close()


@needs_fsdp2_on_cpus
def test_a_sharded_run_goes_on_unsharded(tmp_path: Path) -> None:
    state = ShardedState(build(), extra={"seen": 5})
    state.sync()
    train(state, 2)
    manager = saved(state, tmp_path)
    model = model_of()
    plain = ModelState(model, torch.optim.AdamW(model.parameters(), lr=0.1), extra={"seen": 0})
    assert manager.restore(plain, Alone()) == 2
    plain.sync()
    assert (plain.step, plain.extra) == (2, {"seen": 5})
    assert all(torch.equal(value, whole(state)[name]) for name, value in plain.module.state_dict().items())
    manager.close()


@needs_fsdp2_on_cpus
def test_a_checkpoint_of_another_kind_of_optimizer_is_refused(tmp_path: Path) -> None:
    def build_otherwise(mesh: DeviceMesh) -> tuple[Any, ...]:
        model, _ = build()(mesh)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    state = ShardedState(build_otherwise)
    state.sync()
    train(state)
    manager = saved(state, tmp_path)
    other = ShardedState(build())
    manager.restore(other, Alone())
    with pytest.raises(ValueError, match="lack 'betas', 'eps', which this AdamW needs"):
        other.sync()
    manager.close()


@needs_fsdp2_on_cpus
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    state = ShardedState(build())
    state.sync()
    train(state)
    manager = saved(state, tmp_path)
    other = ShardedState(build(lambda: torch.nn.Linear(5, 5)))
    manager.restore(other, Alone())
    with pytest.raises(NonRetryableException, match="a model with other parameters than before"):
        other.sync()
    manager.close()


def test_a_torch_whose_fsdp2_does_not_run_on_cpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.6: its error would come from the first backward pass, at every attempt."""
    monkeypatch.setattr(torch.cpu, "Stream", object)
    with pytest.raises(UnfitError, match=r"FSDP2 of torch .* does not run on CPUs: install torch 2\.9 or later"):
        ShardedState(build()).sync()
    check_device("cuda")
