"""Structures that nobody saved: reading them is one kind of error, and runs nothing."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.format.tree import flatten, tensor_names, unflatten

pytestmark = pytest.mark.filterwarnings("ignore:.*(beta state|deprecated)")  # of torch's own kinds

TENSORS = {
    "f": torch.ones(2, 3),
    "i": torch.zeros(2, dtype=torch.int64),
    "b": torch.zeros(3, dtype=torch.int8),
    "big": torch.full((2,), 9, dtype=torch.int64),
    "e": torch.empty(0),
    "d": torch.ones(3, dtype=torch.float64),
}


def leaf(kind: Any, names: Any, **recipe: Any) -> dict[str, Any]:
    return {"leaf": {"names": names, "kind": kind, "device": "cpu", **recipe}}


CSR = {"outer": "i", "inner": "i", "values": "f"}
NONSENSE: dict[str, Any] = {
    "an empty node": {},
    "an unknown kind": {"code": "import os"},
    "a class": {"builtins.eval": ["1"]},
    "a kind that is a number": {7: 1},
    "a leaf that is text": {"leaf": "f"},
    "a leaf without names": {"leaf": {"kind": "strided", "stride": None}},
    "a leaf without a kind": {"leaf": {"names": {"data": "f"}}},
    "names that are a list": leaf("strided", ["f"], stride=None),
    "a name that is a list": leaf("strided", {"data": ["f"]}, stride=None),
    "a role that is another": leaf("strided", {"other": "f"}, stride=None),
    "a kind that is a list": leaf(["strided"], {"data": "f"}),
    "a kind that is an attribute of torch": leaf("load", {"data": "f"}),
    "strides of another length": leaf("strided", {"data": "f"}, stride=[1]),
    "huge strides": leaf("strided", {"data": "f"}, stride=[2**40, 1]),
    "strides beyond any number": leaf("strided", {"data": "f"}, stride=[2**80, 1]),
    "overlapping strides": leaf("strided", {"data": "f"}, stride=[0, 0]),
    "negative strides": leaf("strided", {"data": "f"}, stride=[-3, -1]),
    "strides that are text": leaf("strided", {"data": "f"}, stride="ab"),
    "strides with a fraction": leaf("strided", {"data": "f"}, stride=[1.0, 2.0]),
    "strides of an empty tensor": leaf("strided", {"data": "e"}, stride=[2**61]),
    "quantised floats": leaf("per_tensor", {"data": "f"}, scale=1.0, zero_point=0),
    "no scale": leaf("per_tensor", {"data": "b"}, zero_point=0),
    "a scale that is text": leaf("per_tensor", {"data": "b"}, scale="1", zero_point=0),
    "a zero point beyond any number": leaf("per_tensor", {"data": "b"}, scale=1.0, zero_point=2**70),
    "a wrong axis": leaf("per_channel", {"data": "b", "scales": "d", "zero_points": "i"}, axis=5),
    "scales of another length": leaf("per_channel", {"data": "b", "scales": "f", "zero_points": "i"}, axis=0),
    "indices outside": leaf("sparse_coo", {"indices": "big", "values": "f"}, shape=[2, 3], coalesced=False),
    "indices of another length": leaf("sparse_coo", {"indices": "f", "values": "f"}, shape=[2, 3], coalesced=False),
    "a sparse shape that is none": leaf("sparse_coo", {"indices": "i", "values": "f"}, shape=None, coalesced=False),
    "a negative sparse shape": leaf("sparse_coo", {"indices": "i", "values": "f"}, shape=[-2, 3], coalesced=False),
    "rows that do not fit": leaf("sparse_csr", CSR, shape=[2, 3]),
    "a compressed shape beyond any number": leaf("sparse_bsc", CSR, shape=[2**70, 3]),
    "numpy of text": {"numpy": "abc", "scalar": False},
    "numpy of a sparse tensor": {
        "numpy": leaf("sparse_coo", {"indices": "i", "values": "e"}, shape=[3], coalesced=False),
        "scalar": False,
    },
    "numpy without its mark": {"numpy": leaf("strided", {"data": "f"}, stride=None)},
    "bytes of a number": {"long_bytes": 3, "type": "bytes"},
    "bytes without a type": {"long_bytes": leaf("strided", {"data": "f"}, stride=None)},
    "a float that is none": {"float": "one"},
    "a float that is a list": {"float": []},
    "an int that is none": {"int": "0xg"},
    "an int that is an int": {"int": 3},
    "a complex of one": {"complex": ["1"]},
    "a complex of words": {"complex": ["a", "b"]},
    "bytes that are no base64": {"bytes": "a"},
    "bytes that are not ascii": {"bytes": "é"},
    "bytes of a list": {"bytearray": [1]},
    "text that is no UTF-8": {"text": "/w=="},
    "a size of text": {"size": "abc"},
    "a size that is none": {"size": None},
    "a dtype that is none": {"dtype": "load"},
    "a dtype of a list": {"dtype": ["float32"]},
    "a device that is none": {"device": "nowhere:7"},
    "a device with a number below any": {"device": "cpu:-4"},
    "a dict of numbers": {"dict": [1, 2]},
    "a dict of triples": {"dict": [[1, 2, 3]]},
    "a dict that is a number": {"dict": 5},
    "a key that cannot be one": {"dict": [[[1], 2]]},
    "a set of lists": {"set": [[1]]},
    "a tuple that is none": {"tuple": None},
    "an object without a word about it": {"object": 1},
    "an object of no kind": {"object": 1, "about": {"as": "function"}},
    "an enum that is no text": {"object": [1], "about": {"as": "enum", "class": "signal:Signals"}},
    "a member that an enum has not": {"object": "NONE", "about": {"as": "enum", "class": "signal:Signals"}},
    "a class that is a number": {"object": "A", "about": {"as": "enum", "class": 3}},
    "a factory that is any function": {"object": {"dict": []}, "about": {"as": "defaultdict", "factory": "eval"}},
    "a counter of no counts": {"object": 3, "about": {"as": "counter"}},
    "a window that is no list": {"object": 3, "about": {"as": "deque", "longest": 2}},
    "a window of no size": {"object": [], "about": {"as": "deque", "longest": "a"}},
    "a generator of a number": {"object": 3, "about": {"as": "generator", "device": "cpu"}},
    "a generator of other bytes": {
        "object": leaf("strided", {"data": "b"}, stride=None),
        "about": {"as": "generator", "device": "cpu"},
    },
    "a generator of no device": {"object": 3, "about": {"as": "generator", "device": "nowhere"}},
    "a tensor made of a number": {"made_of": 3, "class": "a:B", "context": None, "form": [[1], [1]]},
    "a tensor made of tensors without a class": {"made_of": [], "context": None, "form": [[1], [1]]},
    "a tensor of a class that is a number": {"made_of": [], "class": 3, "context": None, "form": [[1], [1]]},
    "a tensor without a form": {"made_of": [], "class": "a:B", "context": None},
    "a namespace of a list": {"object": [1], "about": {"as": "namespace", "of": "types"}},
    "a namespace of another module": {"object": {"dict": []}, "about": {"as": "namespace", "of": "os"}},
    "a path that is a number": {"object": 3, "about": {"as": "path", "of": "path"}},
    "metadata that are none": {"ordered": [], "metadata": {"nothing": 1}},
    "a parameter of whole numbers": leaf("strided", {"data": "b"}, stride=None, parameter=True, requires_grad=True),
    "a parameter without a word on gradients": leaf("strided", {"data": "f"}, stride=None, parameter=True),
    "a pickle that is none": {"pickle": 3},
}


@pytest.mark.parametrize("name", NONSENSE)
@pytest.mark.parametrize("depth", [0, 1])
def test_a_structure_that_makes_no_sense_is_corrupt(name: str, depth: int) -> None:
    node = NONSENSE[name] if depth == 0 else [{"dict": [["key", {"tuple": [NONSENSE[name]]}]]}]
    expected = CheckpointError if name.startswith("a pickle") else CorruptCheckpointError
    with pytest.raises(expected):
        unflatten(node, TENSORS)


@pytest.mark.parametrize("name", [name for name in NONSENSE if "pickle" in name])
def test_a_pickle_that_is_none_is_corrupt_also_where_pickles_are_allowed(name: str) -> None:
    with pytest.raises(CorruptCheckpointError):
        unflatten(NONSENSE[name], TENSORS, allow_pickles=True)


@pytest.mark.parametrize("make", [lambda node: [node], lambda node: {"tuple": [node]}, lambda node: {"numpy": node}])
def test_a_bottomless_structure_is_corrupt(make: Any) -> None:
    node: Any = 1
    for _ in range(5000):
        node = make(node)
    with pytest.raises(CorruptCheckpointError):
        unflatten(node, {})
    with pytest.raises(CorruptCheckpointError):
        tensor_names(node)


def test_a_missing_tensor_is_named() -> None:
    with pytest.raises(CheckpointError, match="the tensor 'model/w' of the saved state is missing"):
        unflatten(flatten({"model": {"w": torch.zeros(1)}}).structure, {})


@pytest.mark.parametrize(
    "node", [{}, {"leaf": 3}, {"leaf": {}}, {"leaf": {"names": 1}}, {"leaf": {"names": {"a": []}}}, {"numpy": {}}]
)
def test_names_of_nonsense_are_corrupt(node: Any) -> None:
    with pytest.raises(CorruptCheckpointError):
        tensor_names([node])


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch's own kinds of tensors
    KINDS = {
        "csr": torch.eye(2).to_sparse_csr(),
        "q": torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8),
    }
EXAMPLE = {
    **KINDS,
    "w": torch.arange(6.0).view(2, 3),
    "cl": torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last),
    "coo": torch.eye(2).to_sparse(),
    "values": [1, 2.5, math.inf, 2**70, 1j, b"abc", (torch.float32, torch.Size([1])), {"s"}, "\ud800", None],
}
FLAT = flatten(EXAMPLE)
VALUES: list[Any] = [None, True, 0, -1, 2**70, 1.5, "", "f", "cpu", [], [1], [[1, 2]], {}, {"leaf": {}}, {"tuple": [1]}]


def places_in(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(node, (dict, list)):
        for key in node if isinstance(node, dict) else range(len(node)):
            yield from places_in(node[key], (*path, key))


@given(st.sampled_from(list(places_in(FLAT.structure))[1:]), st.sampled_from([*VALUES, "remove"]))
def test_any_change_gives_a_tree_or_one_kind_of_error(path: tuple[Any, ...], value: Any) -> None:
    structure = copy.deepcopy(FLAT.structure)
    node = structure
    for key in path[:-1]:
        node = node[key]
    if value == "remove":
        del node[path[-1]]
    else:
        node[path[-1]] = value
    tensors = {named.name: named.tensor for named in FLAT.tensors}
    try:
        assert unflatten(structure, tensors) is not ...
        tensor_names(structure)
    except CheckpointError:
        pass
