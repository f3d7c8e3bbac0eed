from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch

from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.checkpoint.local import BasicTensorAwareStateDict, TensorAwareStateDict, TensorPlaceholder
from torchelastic.checkpoint.local.state_dict import decode, encode
from torchelastic.checkpoint.shards import ShardOf
from torchelastic.checkpoint.shards.layout import RecurringLayout

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


def test_a_placeholder_makes_a_tensor_like_the_one_it_stands_for() -> None:
    made = TensorPlaceholder.of(torch.ones(3, 1, dtype=torch.int16)).init_tensor()
    assert (made.shape, made.dtype, made.device.type) == ((3, 1), torch.int16, "cpu")


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
