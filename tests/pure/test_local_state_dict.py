from __future__ import annotations

import re
from collections import OrderedDict, namedtuple
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from torchelastic.checkpoint.compat.nvrx.local.names import check_iteration, check_session_id, described
from torchelastic.checkpoint.compat.nvrx.local.state_dict import decode, encode, plain_basic
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.format.layout import RecurringLayout
from torchelastic.checkpoint.local import BasicTensorAwareStateDict, TensorAwareStateDict, TensorPlaceholder
from torchelastic.checkpoint.shards import ShardOf
from torchelastic.checkpoint.store.save_id import SaveId, ShardId

Pair = namedtuple("Pair", "left right")


def state() -> dict[str, Any]:
    shared = torch.arange(3)
    return {
        "a": torch.ones(2, 2, dtype=torch.float8_e5m2),
        "list": [1, {"b": shared}, (shared, "text", [torch.tensor(5)])],
        "pair": Pair(torch.zeros(1), 2),
        "ordered": OrderedDict(x=torch.eye(2)),
        "part": ShardOf(torch.ones(1, 2), (2, 2), (1, 0)),
        "empty": {},
    }


def containers(value: Any) -> list[int]:
    if isinstance(value, dict):
        return [id(value), *(number for item in value.values() for number in containers(item))]
    if isinstance(value, (list, tuple)):
        return [id(value), *(number for item in value for number in containers(item))]
    return []


def test_it_finds_tensors_of_any_dtype_in_any_container_and_shares_no_mutable_one() -> None:
    given = state()
    wrapped = BasicTensorAwareStateDict(given)
    tensors = list(wrapped.tensors)
    assert len(tensors) == 7
    assert tensors[0] is given["a"]
    mutable = {number for number in containers(given) if number not in {id(())}}
    assert not {id(wrapped.state_dict), id(wrapped.state_dict["list"]), id(wrapped.state_dict["empty"])} & mutable
    assert type(wrapped.state_dict["ordered"]) is OrderedDict
    assert type(wrapped.state_dict["pair"]) is Pair


def test_popping_and_inserting_leaves_the_callers_state_and_a_live_optimizer_alone() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    live = optimizer.state_dict()
    moments = live["state"][0]["exp_avg"]
    wrapped = BasicTensorAwareStateDict(live)
    popped = wrapped.pop_tensors()
    assert wrapped.is_hollow
    assert live["state"][0]["exp_avg"] is moments
    assert isinstance(wrapped.state_dict["state"][0]["exp_avg"], TensorPlaceholder)
    optimizer.step()
    wrapped.insert_tensors(popped)
    assert not wrapped.is_hollow
    assert wrapped.state_dict["state"][0]["exp_avg"] is moments


def test_hollow_and_full_are_kept_apart() -> None:
    wrapped = BasicTensorAwareStateDict(state())
    with pytest.raises(RuntimeError, match="pop_tensors"):
        wrapped.init_tensors()
    popped = wrapped.pop_tensors()
    for call in (wrapped.pop_tensors, wrapped.copy_tensors_to_cpu, wrapped.to_tree, wrapped.restore_tensor_device):
        with pytest.raises(RuntimeError, match="taken out"):
            call()
    with pytest.raises(ValueError, match="2 tensors for 7 places"):
        wrapped.insert_tensors(popped[:2])
    wrapped.init_tensors()
    assert [(t.shape, t.dtype) for t in wrapped.tensors] == [(t.shape, t.dtype) for t in popped]


def test_copies_are_copies_also_on_the_cpu_and_shared_tensors_stay_shared() -> None:
    given = state()
    wrapped = BasicTensorAwareStateDict(given)
    wrapped.copy_tensors_to_cpu()
    given["list"][1]["b"].fill_(9)
    copied = wrapped.state_dict["list"][1]["b"]
    assert copied.tolist() == [0, 1, 2]
    assert wrapped.state_dict["list"][2][0] is copied
    wrapped.restore_tensor_device()
    assert wrapped.state_dict["list"][2][0] is wrapped.state_dict["list"][1]["b"]
    assert set(wrapped.__dict__) >= {"state_dict"}
    assert wrapped.state_dict in list(wrapped.values())


def test_a_tensor_of_a_gpu_goes_back_to_this_processes_gpu_or_stays_where_there_is_none() -> None:
    wrapped = BasicTensorAwareStateDict({"w": torch.ones(1)})
    wrapped._devices = (torch.device("cuda:3"),)
    wrapped.restore_tensor_device()  # no GPU here: it stays, and nothing raises
    header, sources = encode(wrapped, RecurringLayout())
    tensors = {entry.name: tensor for entry, tensor in zip(header.entries, sources, strict=True)}
    header.meta["devices"][0][0] = "cuda:3"
    decoded = decode(header, tensors, allow_pickles=False)
    assert isinstance(decoded, BasicTensorAwareStateDict)
    assert decoded._devices == (torch.device("cuda"),)
    header.meta["devices"][:] = [["cuda:3", 1]]
    assert not wrapped.is_hollow


def test_attributes_that_are_none_are_damage() -> None:
    with pytest.raises(CorruptCheckpointError, match=r"TensorAwareStateDict is a list"):
        TensorAwareStateDict.from_tree([1], [])


def test_shards_name_a_class_of_ours_by_what_the_first_of_them_said() -> None:
    assert (
        BasicTensorAwareStateDict.class_name() == "torchelastic.checkpoint.local.state_dict:BasicTensorAwareStateDict"
    )
    assert TensorAwareStateDict.class_named(BasicTensorAwareStateDict.class_name()) is BasicTensorAwareStateDict
    assert Named.class_name() == f"{__name__}:Named"


class Named(TensorAwareStateDict):
    """A state with no more than NVRx asks for."""

    pattern: Any

    def __init__(self, tensor: torch.Tensor) -> None:
        self.content = tensor

    def pop_tensors(self) -> list[torch.Tensor]:
        return []

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.content]

    @property
    def is_hollow(self) -> bool:
        return False

    def insert_tensors(self, tensor_data: Any) -> None:
        pass

    def init_tensors(self) -> None:
        pass

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        pass

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        pass


class Slotted(Named):
    __slots__ = ("more",)


def test_a_class_of_your_own_is_stored_by_its_attributes_unless_some_would_be_lost() -> None:
    header, sources = encode(Named(torch.ones(2)), RecurringLayout())
    tensors = {entry.name: tensor for entry, tensor in zip(header.entries, sources, strict=True)}
    decoded = decode(header, tensors, allow_pickles=False)
    assert type(decoded) is Named
    assert decoded.content.tolist() == [1.0, 1.0]
    with pytest.raises(TypeError, match="Slotted has __slots__"):
        encode(Slotted(torch.ones(2)), RecurringLayout())


def test_an_attribute_that_is_not_plain_is_pickled_only_if_that_is_allowed() -> None:
    odd = Named(torch.ones(2))
    odd.pattern = re.compile("a+")
    with pytest.raises(TypeError, match="allow_pickles=True"):
        encode(odd, RecurringLayout())
    header, sources = encode(odd, RecurringLayout(allow_pickles=True))
    tensors = {entry.name: tensor for entry, tensor in zip(header.entries, sources, strict=True)}
    assert vars(decode(header, tensors, allow_pickles=True))["pattern"] == odd.pattern
    with pytest.raises(CheckpointError, match="allow_pickles=True"):
        decode(header, tensors, allow_pickles=False)


class CopiedAndRestored(Named):
    """What NVRx uses of a state of which it makes no replicas, and nothing else; its own unit tests have such a one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.contents = [tensor]

    @property
    def tensors(self) -> list[torch.Tensor]:
        raise NotImplementedError

    def is_hollow(self) -> bool:  # type: ignore[override]  # a method in the place of a property, as it is there
        raise NotImplementedError

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        self.devices = [tensor.device for tensor in self.contents]
        for place, tensor in enumerate(self.contents):
            self.contents[place] = tensor.to("cpu", non_blocking=non_blocking)

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        for place, (tensor, device) in enumerate(zip(self.contents, self.devices, strict=True)):
            self.contents[place] = tensor.to(device, non_blocking=non_blocking)


class Unasked(CopiedAndRestored):
    @property
    def is_hollow(self) -> bool:  # type: ignore[override]
        raise NotImplementedError


@pytest.mark.parametrize("kind", [CopiedAndRestored, Unasked])
def test_a_class_of_your_own_that_can_only_be_copied_and_restored_is_stored(kind: type[CopiedAndRestored]) -> None:
    state = kind(torch.ones(2))
    header, sources = encode(state, RecurringLayout())
    assert not hasattr(state, "devices")  # the state itself was left alone
    decoded = decode(header, {"contents/0": sources[0].clone()}, allow_pickles=False)
    decoded.restore_tensor_device()
    assert isinstance(decoded, kind)
    assert [tensor.tolist() for tensor in decoded.contents] == [[1.0, 1.0]]


def test_what_is_no_state_or_makes_none_is_refused() -> None:
    hollow = BasicTensorAwareStateDict(state())
    hollow.pop_tensors()
    with pytest.raises(RuntimeError, match="insert_tensors"):
        encode(hollow, RecurringLayout())
    with pytest.raises(TypeError, match="wrap a state dict in BasicTensorAwareStateDict"):
        encode({"w": torch.ones(1)}, RecurringLayout())  # type: ignore[arg-type]
    header, _ = encode(BasicTensorAwareStateDict({"step": 1}), RecurringLayout())
    nowhere = replace(header, meta={**header.meta, "devices": [["nowhere", 1]]})
    with pytest.raises(CorruptCheckpointError, match="devices of the saved state are damaged"):
        decode(nowhere, {}, allow_pickles=False)
    unknown = replace(header, meta={**header.meta, "state_class": "elsewhere:State"})
    with pytest.raises(CheckpointError, match="which is not defined in this process"):
        decode(unknown, {}, allow_pickles=False)


def test_a_state_of_several_gpus_goes_back_to_each() -> None:
    header, sources = encode(BasicTensorAwareStateDict({"v": torch.ones(1), "w": torch.ones(1)}), RecurringLayout())
    tensors = {entry.name: tensor for entry, tensor in zip(header.entries, sources, strict=True)}
    header.meta["devices"][:] = [["cuda:3", 1], ["cuda:4", 1]]
    decoded = decode(header, tensors, allow_pickles=False)
    assert isinstance(decoded, BasicTensorAwareStateDict)
    assert decoded._devices == (torch.device("cuda:3"), torch.device("cuda:4"))
    assert plain_basic(decoded) is decoded.state_dict
    assert plain_basic([1]) == [1]


def test_where_tensors_belong_is_remembered_from_the_first_time_that_they_leave() -> None:
    state = BasicTensorAwareStateDict.from_tree({"w": torch.nn.Parameter(torch.ones(2))}, [torch.device("meta")])
    state.insert_tensors(state.pop_tensors())
    state.restore_tensor_device()
    (moved,) = state.tensors
    assert (moved.device.type, type(moved), moved.requires_grad) == ("meta", torch.nn.Parameter, True)


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_session_is_a_folder_name() -> None:
    for session in ("", "job-17", "a.b_c:d@1", "job 7"):
        assert check_session_id(session) == session
    for session in ("..", ".hidden", "a/b", " a", "a ", "a\nb", "x" * 200):
        with pytest.raises(ValueError, match="session_id"):
            check_session_id(session)


def test_an_iteration_is_a_whole_number_from_0_on() -> None:
    assert check_iteration(0) == 0
    assert type(check_iteration(np.int64(3))) is int
    for wrong in (True, 1.0, "1", None):
        with pytest.raises(TypeError, match="whole number"):
            check_iteration(wrong)  # type: ignore[arg-type]
    for number in (-1, 10**12):
        with pytest.raises(ValueError, match="iteration is"):
            check_iteration(number)


def test_a_shard_has_a_name_for_people() -> None:
    shard = ShardId(SaveId(1, 1, 0, 20, "9f3a12cd"), 3, 4)
    assert described(shard) == "the shard of rank 3 of step-000000020.e1.r1.g0.9f3a12cd"
