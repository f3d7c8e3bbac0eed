"""Trees: what goes in comes out, under the same types; what cannot is refused by name."""

from __future__ import annotations

import argparse
import datetime
import decimal
import enum
import json
import math
import random
import types
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from pathlib import Path, PureWindowsPath
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.format.header import (
    decode_header,
    decode_preamble,
    encode_header,
    encode_preamble,
    lay_out,
)
from torchelastic.checkpoint.format.tree import MAX_DEPTH, MAX_INLINE_BYTES, path_of, tensor_names, unflatten_beside
from torchelastic.checkpoint.shards import ShardOf, flatten, unflatten

pytestmark = pytest.mark.filterwarnings("ignore:.*(beta state|deprecated|prototype stage)")  # of torch's own kinds

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e5m2]
SURROGATES = st.text(st.characters(), max_size=6)  # also halves of characters, alone and in pairs
TENSORS = st.builds(
    lambda data, dtype: torch.tensor(list(data), dtype=torch.uint8).repeat(dtype.itemsize).view(dtype),
    st.binary(max_size=5).map(lambda data: bytes(byte & 1 for byte in data)),
    st.sampled_from(DTYPES),
)
ARRAYS = st.builds(
    lambda values, dtype: np.array(values).astype(dtype),
    st.one_of(st.integers(0, 1), st.lists(st.integers(0, 1), max_size=3)),
    st.sampled_from(["?", "i1", "u2", "<i4", ">i4", "u8", "f2", ">f4", "f8", "c8", ">c16"]),
)
KEYS = st.one_of(
    st.integers(-2, 2), st.sampled_from(["1", "-1", "a/b", "a~b", "~1", "", "None"]), SURROGATES, st.none()
)
HASHABLE = st.one_of(st.none(), st.booleans(), st.integers(), SURROGATES, st.binary(max_size=9), st.floats())
PLAIN = st.one_of(
    HASHABLE,
    st.integers(-(10**5000), 10**5000),
    st.complex_numbers(),
    st.just(math.nan),
    st.binary(max_size=3).map(bytearray),
    st.integers(1, 9).map(lambda number: bytes(range(256)) * 16 + bytes(number)),
    st.lists(st.integers(0, 9), max_size=3).map(torch.Size),
    st.sampled_from([torch.float32, torch.qint8, torch.device("cpu"), torch.device("cuda", 3)]),
    st.sampled_from([np.float32(0.1), np.float64("nan"), np.int8(-3), np.bool_(True), np.complex64(1j)]),
)
ZONES = st.sampled_from(
    [datetime.UTC, *(datetime.timezone(datetime.timedelta(hours=1), name) for name in ("CET", "x"))]
)
VALUES = st.one_of(
    st.dates(),
    st.datetimes(timezones=st.none() | ZONES, allow_imaginary=True),
    st.times(timezones=st.none() | ZONES),
    st.builds(lambda day: day.replace(fold=1), st.datetimes()),
    st.timedeltas(),
    ZONES,
    st.uuids(),
    st.decimals(),
    st.fractions(),
    st.builds(range, st.integers(), st.integers(), st.integers(1, 9)),
    st.builds(slice, st.none() | st.integers(), st.none() | SURROGATES),
    st.sampled_from(
        [np.datetime64("2026-01-02"), np.timedelta64("NaT"), np.str_("a"), np.bytes_(b"a"), np.dtype(">M8[D]")]
    ),
    st.sampled_from(["<U3", "S3", "M8[ns]", ">m8[D]"]).map(lambda name: np.array([[1, 20]]).astype(name)),
    st.sampled_from([torch.strided, torch.sparse_csr, torch.channels_last]),
    st.lists(st.dates(), max_size=2).map(lambda days: deque(days, maxlen=2)),
    st.dictionaries(st.dates(), st.integers(), max_size=2).map(Counter),
)
TREES = st.recursive(
    st.one_of(PLAIN, VALUES, TENSORS, ARRAYS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.sets(HASHABLE, max_size=3),
        st.frozensets(HASHABLE, max_size=3),
    ),
    max_leaves=8,
)


def stored(tree: Any, **options: Any) -> Any:
    """What comes back, by way of the header's bytes."""
    flat = flatten(tree, **options)
    header = lay_out(flat, {})
    body = encode_header(header)
    header = decode_header(body, decode_preamble(encode_preamble(body, 4096 + len(body), header.data_bytes)))
    return unflatten(header.structure, {named.name: named.tensor.clone() for named in flat.tensors}, **options)


def same(one: Any, other: Any) -> bool:
    """Equal in type, order and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        is_alike = one.dtype == other.dtype and one.shape == other.shape
        return bool(is_alike) and torch.equal(
            one.contiguous().view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)
        )
    if isinstance(one, (np.ndarray, np.generic)):
        native: Any = one.astype(one.dtype.newbyteorder("="))
        return bool(native.dtype == other.dtype and native.shape == other.shape and native.tobytes() == other.tobytes())
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return len(one) == len(other) and all(same(a, c) and same(b, d) for (a, b), (c, d) in pairs)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (set, frozenset)):
        return sorted(map(repr, one)) == sorted(map(repr, other))
    has_text = isinstance(one, (float, complex, decimal.Decimal, datetime.time, datetime.datetime))
    return repr(one) == repr(other) if has_text else bool(one == other)


@given(TREES)
def test_a_tree_comes_back(tree: Any) -> None:
    assert same(tree, stored(tree))


@given(TREES)
def test_flatten_is_determined_by_the_tree_and_changes_nothing_in_it(tree: Any) -> None:
    first, second = flatten(tree), flatten(tree)
    assert json.dumps(first.structure) == json.dumps(second.structure)
    assert same(tree, unflatten(first.structure, {named.name: named.tensor for named in first.tensors}))
    assert tensor_names(first.structure) == {named.name for named in first.tensors}
    assert len({named.name for named in first.tensors}) == len(first.tensors)


@pytest.mark.parametrize("text", ["\ud800", "\ud83d\ude00", "a/\udc00~", "é", "\U0001f600", "\\ud800"])
def test_halves_of_characters_stay_halves(text: str) -> None:
    tree = {text: text, "t": {text: torch.ones(1)}}
    assert same(tree, stored(tree))


def test_names_are_json_pointers() -> None:
    tree = {"model": {"a/b": [torch.zeros(1), torch.ones(1)]}, "state": {0: {"x~y": torch.ones(2)}}}
    assert [named.name for named in flatten(tree).tensors] == ["model/a~1b/0", "model/a~1b/1", "state/0/x~0y"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(2, 2),
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8),
        lambda: torch.empty(0, 2),
        lambda: torch.nn.Parameter(torch.randn(2)),
    ],
    ids=["plain", "channels_last", "coo", "csr", "quantised", "empty", "parameter"],
)
def test_a_tensor_in_two_places_is_one_tensor_again(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    flat = flatten({"a": tensor, "b": [tensor]})
    assert len(flat.tensors) == len(flatten({"a": tensor}).tensors)
    loaded = stored({"a": tensor, "b": [tensor]})
    assert loaded["a"] is loaded["b"][0]


def test_views_of_one_memory_are_different_tensors() -> None:
    base = torch.arange(6.0)
    tree = {"all": base, "half": base[:3], "shaped": base.view(2, 3), "bits": base.view(torch.int32)}
    assert same(tree, stored(tree))
    assert len(flatten(tree).tensors) == 4


def test_a_part_and_the_tensor_itself_are_different_tensors() -> None:
    half = torch.arange(4.0)
    flat = flatten({"part": ShardOf(half, (8,), (4,)), "whole": half, "other": ShardOf(half, (8,), (0,))})
    assert [(named.shape, named.region.offsets, named.is_shard) for named in flat.tensors] == [
        ((8,), (4,), True),
        ((4,), (0,), False),
        ((8,), (0,), True),
    ]


@pytest.mark.parametrize("kind", [bytes, bytearray])
@pytest.mark.parametrize("size", [0, MAX_INLINE_BYTES, MAX_INLINE_BYTES + 1])
def test_long_bytes_are_a_tensor(kind: type, size: int) -> None:
    data = kind(b"\xff" * size)
    assert same(data, stored(data))
    assert bool(flatten(data).tensors) == (size > MAX_INLINE_BYTES)


Pair = namedtuple("Pair", "a b")


class Colour(enum.IntEnum):
    RED = 1


class Flags(enum.Flag):
    A = 1
    B = 2


class Limits(NamedTuple):
    low: float
    at: Any


def inner_class() -> Any:
    return namedtuple("inner", "a b")


class Text(str):
    pass


class Day(datetime.date):
    pass


class Wrapper(torch.Tensor):
    """A tensor made of another, as those of quantisation libraries."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, about: Any = None) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape)

    def __init__(self, inner: torch.Tensor, about: Any = None) -> None:
        self.held, self.about = inner, about

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["held"], self.about

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], about: Any, size: Any, stride: Any) -> Wrapper:
        if inner["held"].shape != size:
            raise ValueError("another shape")
        return Wrapper(inner["held"], about)

    @classmethod
    def __torch_dispatch__(cls, *arguments: Any, **options: Any) -> Any:
        raise AssertionError("nobody asked for an operation")


def nested_tensor() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


def freed_tensor() -> torch.Tensor:
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    return tensor


UNSUPPORTED = {
    "an object": object(),
    "a function": len,
    "a lambda": lambda: 0,
    "a class": int,
    "a module": torch.nn.Linear(1, 1),
    "a str of another class": Text("x"),
    "a named tuple of a class inside a function": inner_class()(1, 2),
    "several flags at once": Flags.A | Flags.B,
    "a defaultdict of a function": defaultdict(lambda: 0),
    "a date of another class": Day(2020, 1, 1),
    "a generator": iter(()),
    "a memoryview": memoryview(b"x"),
    "objects of numpy": np.array([None]),
    "records of numpy": np.zeros(2, dtype=[("x", "i4")]),
    "long floats of numpy": np.longdouble(1),
    "a masked array": np.ma.masked_array([1, 2], mask=[True, False]),
    "a meta tensor": torch.empty(2, device="meta"),
    "a part on meta": ShardOf(torch.empty(2, device="meta"), (4,), (0,)),
    "a sparse part": ShardOf(torch.eye(2).to_sparse(), (4, 2), (0, 0)),
    "a nested tensor": nested_tensor(),
    "a freed tensor": freed_tensor(),
    "a tensor of bits": torch.zeros(2, dtype=torch.uint8).view(torch.bits8),
    "one made of a tensor without data": Wrapper(torch.zeros(2, device="meta")),
    "a storage": torch.zeros(1).untyped_storage(),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_cannot_be_saved_is_refused_by_its_path(name: str) -> None:
    place = r"('model/x~1y/1['/]|model\['x/y'\]\[1\])"  # of a tensor, by its name; of any other value
    with pytest.raises(TypeError, match=place):
        flatten({"model": {"x/y": [0, UNSUPPORTED[name]]}})


def test_an_argument_is_named_where_there_is_one() -> None:
    for allowed, is_named in ((False, True), (None, False)):
        with pytest.raises(TypeError) as refused:
            flatten([object()], allow_pickles=allowed)
        assert ("allow_pickles" in str(refused.value)) is is_named
        with pytest.raises(CheckpointError, match="pickled objects") as unread:
            unflatten(flatten(Day(2020, 1, 2), allow_pickles=True).structure, {}, allow_pickles=allowed)
        assert ("allow_pickles" in str(unread.value)) is is_named


# --- small objects ----------------------------------------------------------------------------------------------------


OBJECTS = {
    "a named tuple": Pair(1, (2, None)),
    "one with tensors": Limits(0.5, [torch.ones(2)]),
    "an enum": Colour.RED,
    "a flag": Flags.B,
    "a defaultdict": defaultdict(list, {"a": [1]}),
    "one without a factory": defaultdict(None, {1: 2}),
    "a counter": Counter("ab"),
    "a window": deque([1, 2, [3]], maxlen=3),
    "a deque without an end": deque("ab"),
    "arguments": argparse.Namespace(lr=0.1, stages=[Colour.RED]),
    "a simple namespace": types.SimpleNamespace(a=torch.zeros(1)),
    "a path": Path("/x/y"),
    "a path of another system": PureWindowsPath("c:/x"),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_small_objects_come_back_as_what_they_were(name: str) -> None:
    value: Any = OBJECTS[name]
    (found,) = stored([value])
    assert type(found) is type(value)
    assert repr(found) == repr(value)
    assert getattr(found, "default_factory", None) is getattr(value, "default_factory", None)


def test_a_tensor_that_is_made_of_others_comes_back_as_one_of_its_class() -> None:
    scale = torch.tensor([2.0])
    tree = {"m": Wrapper(torch.arange(3), (True, {"scale": 3, "of": torch.float16})), "nested": Wrapper(Wrapper(scale))}
    found = stored(tree)
    assert type(found["m"]) is type(found["nested"]) is type(found["nested"].held) is Wrapper
    assert (found["m"].held.tolist(), found["m"].about) == ([0, 1, 2], (True, {"scale": 3, "of": torch.float16}))
    assert found["nested"].held.held.tolist() == [2.0]
    assert [named.name for named in flatten(tree).tensors] == ["m/held", "nested/held/held"]


def test_what_only_the_program_knows_of_a_tensor_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"what __tensor_flatten__ gives of m is an object"):
        flatten({"m": Wrapper(torch.arange(3), object())})


def test_what_only_the_program_knows_of_a_tensor_is_taken_from_its_own_one_in_the_same_place() -> None:
    mine, theirs = Text("mine"), Text("theirs")
    flat = flatten({"m": {"a/b": Wrapper(torch.arange(3), theirs)}}, allow_pickles=True)
    tensors = {named.name: named.tensor for named in flat.tensors}
    found = unflatten_beside(flat.structure, tensors, {path_of("m", "a/b"): Wrapper(torch.zeros(3), mine)})
    assert found["m"]["a/b"].about is mine
    assert found["m"]["a/b"].held.tolist() == [0, 1, 2]
    for own in ({}, {path_of("m", "b"): Wrapper(torch.zeros(3), mine)}):
        with pytest.raises(CheckpointError, match="pickled"):
            unflatten_beside(flat.structure, tensors, own)


def test_no_other_class_can_be_named_than_those_of_tensors_that_are_there() -> None:
    flat = flatten({"m": Wrapper(torch.arange(3))})
    tensors = {named.name: named.tensor for named in flat.tensors}
    ((_, node),) = flat.structure["dict"]
    for name in ("builtins:dict", "torch:Tensor", "torch.nn.modules.linear:Linear", "os:system", "gone:Wrapper"):
        with pytest.raises(CheckpointError, match="not defined in this process"):
            unflatten({**node, "class": name}, tensors)
    with pytest.raises(CheckpointError, match=r"Wrapper cannot be put together .*another shape"):
        unflatten({**node, "form": [[4], [1]]}, tensors)


def test_a_generator_of_random_numbers_comes_back_where_it_was() -> None:
    generator = torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    (found,) = stored([generator])
    assert torch.equal(torch.rand(4, generator=found), torch.rand(4, generator=generator))


@pytest.mark.parametrize("bits", [np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64])
def test_generators_of_numpy_and_python_go_on_where_they_were(bits: Any) -> None:
    by_numpy, by_python = np.random.Generator(bits(3)), random.Random(3)
    by_numpy.standard_normal(5)
    by_python.gauss()  # draws one ahead
    numpy_again, python_again = stored((by_numpy, by_python))
    assert numpy_again.random(9).tolist() == by_numpy.random(9).tolist()
    assert [python_again.gauss() for _ in range(3)] == [by_python.gauss() for _ in range(3)]


def test_small_objects_may_be_keys() -> None:
    tree = {Colour.RED: 1, Path("/x"): torch.ones(2), Pair(1, 2): 3}
    assert list(stored(tree)) == list(tree)


class Guarded(namedtuple("Guarded", "a")):
    calls: ClassVar[list[str]] = []

    def __new__(cls, a: int) -> Any:
        cls.calls.append("new")
        return super().__new__(cls, a)

    def __init__(self, a: int) -> None:
        self.calls.append("init")


def test_no_code_of_a_class_runs_when_its_object_is_read() -> None:
    flat = flatten({"x": Guarded(1)})
    assert Guarded.calls == ["new", "init"]
    assert type(unflatten(flat.structure, {})["x"]) is Guarded
    assert Guarded.calls == ["new", "init"]


@pytest.mark.parametrize(
    ("about", "complaint"),
    [
        ({"as": "enum", "class": "nowhere:Colour"}, "nowhere.Colour, which is not defined in this process: import it"),
        ({"as": "enum", "class": "os:system"}, "os.system, which is not defined"),
        ({"as": "named tuple", "class": f"{__name__}:Colour"}, "which is not defined in this process"),
        ({"as": "named tuple", "class": f"{__name__}:Pair"}, "has other fields than when the state was saved"),
    ],
    ids=["a module that is not imported", "a function", "another kind of class", "a class with other fields"],
)
def test_a_class_that_is_not_there_is_named_and_never_imported(about: dict[str, str], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        unflatten({"object": {"tuple": [1, 2, 3]}, "about": about}, {})


def test_what_a_module_attaches_to_its_state_dict_comes_back() -> None:
    state: Any = torch.nn.BatchNorm1d(2).state_dict()
    back = stored({"model": state})["model"]
    assert type(back) is OrderedDict
    assert getattr(back, "_metadata") == state._metadata == OrderedDict({"": {"version": 2}})  # noqa: B009 - no type has it


def test_parameters_and_gradients_stay_what_they_are() -> None:
    tree = {
        "trained": torch.nn.Parameter(torch.ones(2)),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "leaf": torch.zeros(2, 3).t().detach().requires_grad_(),
        "plain": torch.zeros(2),
    }
    back = stored(tree)
    for name, value in tree.items():
        assert type(back[name]) is type(value)
        assert (back[name].requires_grad, back[name].is_leaf) == (value.requires_grad, True)
        assert back[name].stride() == value.stride()


def test_a_pickle_comes_back() -> None:
    assert stored({"d": Day(2020, 1, 2)}, allow_pickles=True) == {"d": Day(2020, 1, 2)}


def test_what_cannot_be_pickled_is_refused_by_its_path() -> None:
    with pytest.raises(TypeError, match=r"a\['b'\] cannot be pickled"):
        flatten({"a": {"b": lambda: 0}}, allow_pickles=True)
    local = enum.Enum("local", ["ONE"])  # no module has it
    with pytest.raises(TypeError, match="a cannot be pickled"):
        flatten({"a": local.ONE}, allow_pickles=True)


def test_a_tree_that_contains_itself_is_refused() -> None:
    loop: dict[str, Any] = {"x": [1]}
    loop["x"].append((loop,))
    with pytest.raises(ValueError, match=r"x\[1\]\[0\]\['x'\] contains itself"):
        flatten({**loop})
    assert flatten({"twice": [loop["x"][:1]] * 2})  # the same list twice is no loop


def deep(levels: int, kind: type) -> Any:
    tree: Any = 1
    for _ in range(levels):
        tree = {"k": tree} if kind is dict else kind([tree])
    return tree


@pytest.mark.parametrize("kind", [list, tuple, dict, frozenset])
def test_deep_trees_come_back_and_deeper_ones_are_refused(kind: type) -> None:
    assert stored(deep(MAX_DEPTH, kind)) == deep(MAX_DEPTH, kind)
    for levels in (MAX_DEPTH + 2, 100_000 if kind is list else 200):
        with pytest.raises(ValueError, match="nested"):
            flatten(deep(levels, kind))


def test_a_nearly_full_stack_is_a_plain_error() -> None:
    def dive(levels: int) -> None:
        if levels:
            dive(levels - 1)
        else:
            flatten(deep(MAX_DEPTH, dict))

    errors = set()
    for levels in range(0, 1000, 10):
        try:
            dive(levels)
        except (ValueError, RecursionError) as error:
            errors.add(type(error))
    assert ValueError in errors, "no depth at which flatten ran out of the stack"
