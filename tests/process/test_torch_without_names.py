"""With a torch that lacks a private name which this package can do without, its feature alone is lost."""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from torchelastic.checkpoint.command.command_error import CheckpointCommandError
from torchelastic.checkpoint.command.foreign import dcp
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.format.copying import copy_all
from torchelastic.checkpoint.format.tree import flatten, unflatten
from torchelastic.data import ElasticBatchSampler, ElasticLoader
from torchelastic.model.wrapping import unwrap, wrap
from torchelastic.torch_internals import canary, checkpoints, data_workers, gradients, process_groups, sharding, tensors
from torchelastic.torch_internals.c10d_types import GradBucket, HashStore

WITHOUT_SPEC = ("device_mesh", "placements", "shape", "stride")


@pytest.fixture(autouse=True)
def nothing_said_yet() -> Iterator[None]:
    for known in (canary.say_missing, canary.has_argument, data_workers._are_known):
        known.cache_clear()
    yield
    for known in (canary.say_missing, canary.has_argument, data_workers._are_known):
        known.cache_clear()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def without(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    owner, _, name = path.rpartition(".")
    monkeypatch.delattr(canary._value_of(owner), name)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == canary.__name__]


# --- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("mesh")
def test_groups_with_gpu_tensors_are_refused_where_their_backend_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    group = cast("dist.ProcessGroup", dist.group.WORLD)
    assert process_groups.backend_of(group, "cpu") is not None
    assert process_groups.backend_of(group, "xpu") is None
    without(monkeypatch, "torch.distributed.ProcessGroup._get_backend")
    with pytest.raises(RuntimeError, match=r'does not say .* for cuda: use CoordinatorP2P\(c10d_backend="gloo"\)'):
        process_groups.backend_of(group, "cuda")


# --- gradients --------------------------------------------------------------------------------------------------------


def reduced(_state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("name", ["_push_all_rebuilt_params", "_remove_autograd_hooks"])
def test_a_model_trains_where_buckets_cannot_be_fixed_or_hooks_taken_off(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without(monkeypatch, f"torch.distributed.Reducer.{name}")
    for _ in range(2):  # groups
        model = torch.nn.Linear(3, 2)
        wrapped = wrap(model, reduced)
        wrapped(torch.ones(1, 3)).sum().backward()
        unwrap(wrapped)
        assert model.bias.grad is not None
        assert torch.equal(model.bias.grad, torch.ones(2))
    assert len(told(caplog)) == 1
    assert name in told(caplog)[0]


@pytest.mark.usefixtures("mesh")
def test_a_model_is_wrapped_where_ddp_has_no_init_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.6: DDP's own collectives there hold the interpreter, which a group of ours needs."""
    usual = torch.nn.parallel.DistributedDataParallel.__init__
    waits: list[str] = []
    given: list[Any] = []

    def of_2_6(
        self: Any, module: Any, device_ids: Any = None, process_group: Any = None, find_unused_parameters: bool = False
    ) -> None:
        given.append(process_group)
        usual(self, module, device_ids=device_ids, process_group=process_group)

    for name in ("_verify_param_shape_across_processes", "_sync_module_states"):
        monkeypatch.setattr(f"torch.nn.parallel.distributed.{name}", lambda *_a, _name=name, **_k: waits.append(_name))
    monkeypatch.setattr("torch.nn.parallel.DistributedDataParallel.__init__", of_2_6)
    monkeypatch.setattr(gradients, "_HAS_INIT_SYNC", False)
    assert wrap(torch.nn.Linear(3, 2), reduced)(torch.ones(1, 3)).shape == (1, 2)
    assert waits == []
    assert [type(each) for each in given] == [torch.distributed.ProcessGroup]


def test_a_grad_scaler_that_keeps_its_notes_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    scaler: Any = SimpleNamespace()
    gradients.forget_unfinished_step(scaler)
    assert gradients.device_of_scaler(scaler) == "cuda"
    assert "cannot be repeated" in told(caplog)[0]


# --- data -------------------------------------------------------------------------------------------------------------


def test_a_loader_with_worker_processes_runs_where_torch_does_not_tell_of_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(data_workers, "is_there", lambda name: name.attribute != "_set_worker_pids")
    dataset = torch.utils.data.TensorDataset(torch.arange(8))
    sampler = ElasticBatchSampler(dataset, global_batch_size=4, epochs=1)
    loader = ElasticLoader(dataset, sampler, num_workers=1)
    seen = []
    for [batch] in loader:
        seen += batch.tolist()
    assert sorted(seen) == list(range(8))
    assert len(told(caplog)) == 1


# --- tensors ----------------------------------------------------------------------------------------------------------


def test_tensors_are_copied_one_by_one_where_torch_cannot_do_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "torch._foreach_copy_")
    places = [torch.zeros(2), torch.zeros(3)]
    copy_all(places, [torch.ones(2), torch.full((3,), 2.0)])
    assert [place.tolist() for place in places] == [[1.0, 1.0], [2.0, 2.0, 2.0]]


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_quantized_tensor_that_torch_cannot_make_is_refused_and_not_called_damaged(
    by_channel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.ones(2, 2)
    tensor = (
        torch.quantize_per_channel(values, torch.tensor([0.1, 0.2]), torch.tensor([0, 0]), 0, torch.qint8)
        if by_channel
        else torch.quantize_per_tensor(values, 0.1, 0, torch.qint8)
    )
    flat = flatten({"weight": tensor})
    parts = {part.name: part.tensor for part in flat.tensors}
    without(monkeypatch, f"torch._make_per_{'channel' if by_channel else 'tensor'}_quantized_tensor")
    with pytest.raises(CheckpointError, match=r"makes no quantized tensors: use an older one") as raised:
        unflatten(flat.structure, parts)
    assert type(raised.value) is CheckpointError


def test_a_sparse_tensor_is_saved_coalesced_where_its_parts_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0]), (3,), check_invariants=True)
    assert not tensors.sparse_parts(twice)[2]
    monkeypatch.setattr(tensors, "found", lambda _path: None)
    indices, values, coalesced = tensors.sparse_parts(twice)
    assert (indices.tolist(), values.tolist(), coalesced) == ([[1]], [5.0], True)


def test_storages_are_known_by_their_addresses_where_torch_does_not_name_them() -> None:
    def storage(address: int, size: int = 4) -> Any:
        return SimpleNamespace(data_ptr=lambda: address, nbytes=lambda: size)

    identity = tensors.identity_of_storage
    assert identity(storage(8)) == identity(storage(8))
    assert identity(storage(8)) != identity(storage(16))
    empty = storage(0), storage(0)
    assert identity(empty[0]) != identity(empty[1])


def test_typed_storages_without_their_inner_names_are_made_and_taken_apart_without_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    untyped = torch.ones(2).untyped_storage()
    monkeypatch.setattr(tensors, "has_argument", lambda _path: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        typed = tensors.storage_around(untyped, torch.float32)
        bare: Any = SimpleNamespace(untyped=lambda: warnings.warn("typed", stacklevel=1) or untyped)
        assert tensors.storage_within(bare) is untyped
    assert tensors.storage_within(typed).data_ptr() == untyped.data_ptr()


def test_small_values_are_encoded_where_torch_has_one_format_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(value: Any, file: Any) -> None:
        usual(value, file)

    usual = torch.save
    monkeypatch.setattr(torch, "save", save)
    with (tmp_path / "value").open("wb") as file:
        tensors.save_small(3, file, in_an_archive=False)
    assert torch.load(tmp_path / "value") == 3


def test_a_module_that_keeps_its_parameters_elsewhere_is_refused() -> None:
    with pytest.raises(TypeError, match=r"cannot be initialized with torch .*: build it on the CPU"):
        tensors.own_tensors(cast("torch.nn.Module", SimpleNamespace()))


# --- sharded models ---------------------------------------------------------------------------------------------------


def public_side_of(tensor: DTensor) -> Any:
    """What a DTensor has by public names."""
    public: dict[str, Any] = {name: getattr(tensor, name) for name in WITHOUT_SPEC}
    return SimpleNamespace(**public, to_local=tensor.to_local, _local=None)


def test_a_dtensor_is_described_by_its_mesh_where_torch_has_no_description(mesh: DeviceMesh) -> None:
    tensor = distribute_tensor(torch.arange(6.0).reshape(2, 3), mesh, [Shard(0)])
    assert sharding.local_part(public_side_of(tensor)) is sharding.local_part(tensor)
    copy = sharding.described_by(sharding.description_of(public_side_of(tensor)), torch.zeros(2, 3))
    assert (copy.placements, copy.shape, copy.stride()) == (tensor.placements, tensor.shape, tensor.stride())
    assert torch.equal(sharding.local_part(copy), torch.zeros(2, 3))


def test_the_place_of_a_part_is_asked_of_the_dtensor_where_torch_does_not_compute_it(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)])
    expected = sharding.place_of_part(tensor)
    without(monkeypatch, "torch.distributed.tensor._utils.compute_local_shape_and_global_offset")
    assert sharding.place_of_part(tensor) == expected == ((4, 3), (0, 0))


@pytest.mark.parametrize("is_old", [False, True])
def test_all_that_torch_remembers_of_meshes_is_forgotten(
    is_old: bool, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tensor = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    tensor.redistribute(mesh, [Replicate()])
    remembered: Any = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    planned: Any = importlib.import_module("torch.distributed.tensor._redistribute")._gen_transform_infos
    assert planned.cache_info().currsize > 0
    if is_old:  # as torch before 2.13 has it
        monkeypatch.setattr(canary, "installed_version", lambda: "2.9.1")
        monkeypatch.delattr("torch.distributed.tensor.debug._clear_sharding_prop_cache", raising=False)
    remembered(tensor_schema(tensor))
    assert remembered.cache_info().currsize > 0
    sharding.forget_meshes()
    assert (remembered.cache_info().currsize, planned.cache_info().currsize) == (0, 0)
    assert not told(caplog)


def tensor_schema(tensor: DTensor) -> Any:
    schema = importlib.import_module("torch.distributed.tensor._op_schema").OpSchema
    return schema(torch.ops.aten.neg.default, (tensor._spec,), {})


def test_an_fsdp_module_gives_its_memory_back_also_where_it_has_several_parameter_groups(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = torch.nn.Linear(3, 2)
    fully_shard(model, mesh=mesh)
    assert len(list(sharding.flat_memory(model))) == 2
    parameters = list(sharding.flat_memory(model))
    several = [SimpleNamespace(fsdp_params=[each]) for each in parameters]
    monkeypatch.setattr(model, "_get_fsdp_state", lambda: SimpleNamespace(_fsdp_param_groups=several))
    sharding.release_flat_memory(model)
    assert [each._sharded_param_data.numel() for each in parameters] == [0, 0]
    monkeypatch.setattr(model, "_get_fsdp_state", lambda: SimpleNamespace(_fsdp_param_group=several[0]))
    assert len(list(sharding.flat_memory(model))) == 1


def test_the_memory_of_an_fsdp_module_is_left_where_torch_does_not_tell_of_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(canary, "installed_version", lambda: "99.0.0")
    sharding.release_flat_memory(cast("torch.nn.Module", SimpleNamespace()))
    sharding.release_flat_memory(cast("torch.nn.Module", SimpleNamespace(_get_fsdp_state=SimpleNamespace)))
    held = SimpleNamespace(fsdp_params=[SimpleNamespace()])
    module: Any = SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(_fsdp_param_groups=[held]))
    sharding.release_flat_memory(module)
    assert [text.split(". ")[0].rpartition(".")[2] for text in told(caplog)] == [
        "_get_fsdp_state", "_fsdp_param_groups", "_sharded_param_data",
    ]  # fmt: skip


def test_sharded_tensors_are_dtensors_where_torch_has_none_of_fsdp1(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "torch.distributed._shard.sharded_tensor.api.ShardedTensor")
    assert sharding.is_sharded(distribute_tensor(torch.ones(2), mesh, [Shard(0)]))
    assert not sharding.is_sharded(torch.ones(2))


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_folder_of_dcp_is_refused_where_torch_cannot_read_it_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"weight": torch.ones(2)}
    dcp.write(tmp_path, dict(state), flatten(state).structure)
    assert torch.equal(dcp.read(tmp_path, allow_pickles=True)["weight"], torch.ones(2))
    without(monkeypatch, "torch.distributed.checkpoint.state_dict_loader._load_state_dict")
    with pytest.raises(CheckpointCommandError, match=r"does not read such a folder in one process; use an older torch"):
        dcp.read(tmp_path, allow_pickles=True)


def test_a_folder_of_dcp_is_written_where_save_has_no_no_dist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = importlib.import_module("torch.distributed.checkpoint.state_dict_saver").save

    def of_2_6(state: Any, *, storage_writer: Any) -> Any:
        return usual(state, storage_writer=storage_writer)

    monkeypatch.setattr(dcp, "save", of_2_6)
    dcp.write(tmp_path, {"weight": torch.ones(2)}, flatten({"weight": torch.ones(2)}).structure)
    assert torch.equal(dcp.read(tmp_path, allow_pickles=True)["weight"], torch.ones(2))


def test_a_value_is_left_to_the_planner_where_torch_does_not_put_it_into_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state: dict[str, Any] = {"a": {"b": 1}}
    assert checkpoints.set_in_state(state, ("a", "b"), 2)
    assert state == {"a": {"b": 2}}
    without(monkeypatch, "torch.distributed.checkpoint._traverse.set_element")
    assert not checkpoints.set_in_state(state, ("a", "b"), 3)


def test_a_helper_process_that_torch_keeps_elsewhere_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = "torch.distributed.checkpoint._async_process_executor"
    monkeypatch.setattr(canary, "installed_version", lambda: "99.0.0")
    monkeypatch.delitem(sys.modules, path, raising=False)
    assert checkpoints.helper_process() is None
    assert not told(caplog)
    executor: Any = ModuleType(path)
    monkeypatch.setitem(sys.modules, path, executor)
    with caplog.at_level(logging.WARNING):
        assert checkpoints.helper_process() is None
        executor._CHECKPOINT_PROCESS = SimpleNamespace()
        assert checkpoints.helper_process() is None
    assert [text.split(". ")[0].rpartition(".")[2] for text in told(caplog)] == ["_CHECKPOINT_PROCESS", "_save_process"]
