"""Meta builds, ties and buffers of sharded models: nothing is left that was never set, in any way into a group."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.older_torch import needs_fsdp2_on_cpus
from torchelastic import ModelState, ShardedState
from torchelastic.checkpoint import DiskTier, TieredCheckpointManager
from torchelastic.errors import NonRetryableException
from torchelastic.group.peers import Alone
from torchelastic.sharded.blank import is_marked, mark

pytestmark = [needs_fsdp2_on_cpus, pytest.mark.filterwarnings("ignore:.*Full backward hook.*")]

WIDTH = 6

#: What form 2 of a checkpoint has that form 1 had not.
NEW = ("form", "parameters", "groups", "inner", "values", "attributes", "own")


@pytest.fixture(autouse=True)
def world_of_one() -> Iterator[None]:
    """In which freed memory is not zero by luck, where the C library can do that."""
    poison = getattr(ctypes.CDLL(None), "mallopt", None)
    if poison is not None:
        poison(-6, 165)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    if poison is not None:
        poison(-6, 0)


class Table(nn.Module):
    """Has a table that is in no state dict, as rotary embeddings have."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(float(WIDTH)), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.table


class ResetTable(Table):
    """Can make it again."""

    def reset_parameters(self) -> None:
        self.table = torch.arange(float(WIDTH), device=self.table.device)


class TableTwice(ResetTable):
    """Keeps the table that it began with."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.table

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.first


class TableOnCpu(nn.Module):
    """Its constructor says where the table is."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(float(WIDTH), device="cpu"), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.table


class Scaled(nn.Linear):
    """Has more than the class whose `reset_parameters` it inherits."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))


class Drawn(nn.Module):
    """Has random features that are not trained, and a `reset_parameters` that resets a layer too."""

    features: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("features", torch.zeros(WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.layer.reset_parameters()
        self.features.normal_()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layer(inputs) * self.features
        return hidden


class Tied(nn.Module):
    """One weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(9, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, 9, bias=False)
        self.last.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.last(self.norm(self.first(inputs.long().abs() % 9).sum(1)))
        return hidden


def between(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, 1))


def build(make: Callable[[], nn.Module]) -> Callable[[DeviceMesh], tuple[Any, ...]]:
    def made(mesh: DeviceMesh) -> tuple[Any, ...]:
        with torch.device("meta"):
            model = make()
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    return made


def train(state: ShardedState, steps: int = 1) -> None:
    for _ in range(steps):
        state.snapshot()
        state.model(torch.arange(2.0 * WIDTH).reshape(2, WIDTH)).sum().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.commit()


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Everything, also what is in no state dict."""
    named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    found = {}
    for name, value in named.items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found[name.replace("_checkpoint_wrapped_module.", "")] = whole.detach().clone()
    return found


def assert_equal(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    found = values_of(model)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


#: Models that can be built on meta, with what can be known of them all: each way into a group is tried.
WHOLE: dict[str, Callable[[], nn.Module]] = {
    "a table that is made again": lambda: between(ResetTable()),
    "a table in an attribute, too": lambda: between(TableTwice()),
    "a table on the CPU": lambda: between(TableOnCpu()),
    "statistics below activation checkpointing": lambda: between(
        checkpoint_wrapper(nn.Sequential(nn.BatchNorm1d(WIDTH), ResetTable()))
    ),
    "a weight in two places": Tied,
}


@pytest.mark.parametrize("kind", WHOLE)
def test_first_values_are_those_of_one_process(kind: str) -> None:
    state = ShardedState(build(WHOLE[kind]), seed=5)
    state.sync()
    torch.manual_seed(5)
    assert_equal(state.model, values_of(WHOLE[kind]()))


@pytest.mark.parametrize("kind", [*WHOLE, "random features"])
def test_all_is_there_in_the_next_group_and_after_a_restart(kind: str, tmp_path: Path) -> None:
    make = {**WHOLE, "random features": lambda: between(Drawn())}[kind]
    state = ShardedState(build(make), seed=5)
    state.sync()
    train(state, 2)
    expected = values_of(state.model)
    state.sync()
    assert_equal(state.model, expected)
    for folder, lacks in (("now", ()), ("as older versions have saved", NEW)):
        manager = saved(state, tmp_path / folder, lacks)
        again = ShardedState(build(make), seed=5)
        assert manager.restore(again, Alone()) == 2
        again.sync()
        manager.close()
        assert_equal(again.model, expected)


def saved(state: Any, folder: Path, lacks: Collection[str] = ()) -> TieredCheckpointManager:
    manager = TieredCheckpointManager([DiskTier(folder)], run_id="run")
    tree = {key: value for key, value in state.checkpoint_tree().items() if key not in lacks}
    with mock.patch.object(state, "checkpoint_tree", return_value=tree):
        manager.save_step(state, state.step, Alone())
    assert manager.wait(30)
    assert not manager.failures
    return manager


def weights_only(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight)


@pytest.mark.parametrize(("layer", "initialize", "told"), [
    (Table, None, r"module '1' is a Table, .* holds nothing yet in table: it has no reset_parameters\(\)"),
    (Table, weights_only, r"nothing yet in table: initialize\(\) leaves them out, and it has no reset_parameters"),
    (Scaled, None, r"module '1' is a Scaled, .* nothing yet in scale: its reset_parameters\(\) leaves them out"),
    (Drawn, lambda module: module.apply(weights_only), r"has changed layer.weight of other modules"),
])  # fmt: skip
def test_what_nobody_sets_is_named_before_the_first_step(layer: Any, initialize: Any, told: str) -> None:
    state = ShardedState(build(lambda: between(layer())), initialize=initialize)
    with pytest.raises(NonRetryableException, match=told) as error:
        state.sync()
    if "other modules" not in told:
        assert "ShardedState(initialize=...)" in str(error.value)


def test_what_initialize_leaves_out_has_the_values_of_reset_parameters() -> None:
    state = ShardedState(build(lambda: between(nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH))), initialize=weights_only)
    state.sync()
    plain = values_of(between(nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)))
    found = values_of(state.model)
    assert all(torch.equal(found[name], plain[name]) for name in plain if name.startswith(("1.", "2.")))
    assert found["0.weight"].std() > 0.5
    assert found["0.bias"].abs().max() < 1


def test_a_buffer_that_two_modules_share_stays_one() -> None:
    def made() -> nn.Module:
        first, second = ResetTable(), ResetTable()
        second.table = first.table
        return between(first, second)

    state = ShardedState(build(made))
    state.sync()
    first, second = (state.model.get_buffer(f"{number}.table") for number in (1, 2))
    assert first is second
    assert torch.equal(first, torch.arange(float(WIDTH)))


def test_a_tie_is_kept_and_its_checkpoint_fits_a_model_state(tmp_path: Path) -> None:
    state = ShardedState(build(Tied))
    state.sync()
    train(state, 2)
    assert state.model.get_parameter("first.weight") is state.model.get_parameter("last.weight")
    manager = saved(state, tmp_path)
    plain = Tied()
    again = ModelState(plain, torch.optim.AdamW(plain.parameters(), lr=0.1))
    assert manager.restore(again, Alone()) == 2
    again.sync()
    manager.close()
    assert_equal(plain, values_of(state.model))


class Versioned(nn.Linear):
    """Doubles what older versions have saved."""

    _version = 2

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *others: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[prefix + "weight"] = state[prefix + "weight"] * 2
        super()._load_from_state_dict(state, prefix, metadata, *others)


def test_versions_of_modules_are_kept_and_others_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = ShardedState(build(lambda: between(checkpoint_wrapper(Versioned()))))
    state.sync()
    train(state)
    manager = saved(state, tmp_path)
    for layer in (Versioned(), checkpoint_wrapper(Versioned())):
        plain = between(layer)
        again = ModelState(plain, torch.optim.AdamW(plain.parameters(), lr=0.1))
        manager.restore(again, Alone())
        again.sync()
        assert_equal(plain, values_of(state.model))
    monkeypatch.setattr(Versioned, "_version", 3)
    newer = ShardedState(build(lambda: between(Versioned())))
    manager.restore(newer, Alone())
    with pytest.raises(NonRetryableException, match=r"module '1' was saved as version 2 .* and is version 3 here"):
        newer.sync()
    manager.close()


@pytest.mark.parametrize("dtype", [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.complex64, torch.int64,
    torch.int32, torch.int16, torch.uint8, torch.bool,
])  # fmt: skip
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (4, 4)])
def test_a_tensor_is_blank_until_something_is_written_into_it(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.empty(shape, dtype=dtype)
    mark(tensor)
    assert is_marked(tensor)
    for value in (0, 1):
        mark(tensor)
        assert is_marked(tensor)
        tensor.fill_(value)
        assert not is_marked(tensor)
    if tensor.numel() > 4:
        mark(tensor)
        tensor.view(-1)[-1] = 0
        assert not is_marked(tensor), "the last one alone"


def test_an_evaluation_that_was_cut_off_behind_the_optimizers_leaves_no_mode() -> None:
    state = ShardedState(build(lambda: between(nn.LayerNorm(WIDTH))))
    state.sync()
    train(state)
    snapshot = state.snapshot()
    state.model(torch.ones(2, WIDTH)).sum().backward()
    state.optimizer.step()
    state.model.eval()
    state.model.requires_grad_(False)
    state.apply(snapshot)
    state.sync()
    assert state.step == 2
    assert all(module.training for module in state.model.modules())
    assert all(parameter.requires_grad for parameter in state.model.parameters())


def test_what_a_sync_has_built_stands_though_it_fails_afterwards() -> None:
    state = ShardedState(build(lambda: between(nn.LayerNorm(WIDTH))))
    state.sync()
    train(state)
    snapshot = state.snapshot()
    gone = RuntimeError("what the user has registered fails")
    with mock.patch.object(state._world, "changed", side_effect=gone), pytest.raises(RuntimeError, match="registered"):
        state.sync()
    state.apply(snapshot)
    state.sync()
    train(state)
    assert state.step == 2
