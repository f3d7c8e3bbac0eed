"""The layout of the second save equals that of a first one, whatever has changed in between."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchelastic.checkpoint.format.header import lay_out
from torchelastic.checkpoint.format.layout import RecurringLayout
from torchelastic.checkpoint.format.tree import flatten, unflatten

Tree = dict[str, Any]


def state() -> Tree:
    shared = torch.arange(6.0).view(2, 3)
    model: Any = OrderedDict(weight=shared, tied=shared, bias=torch.ones(3, dtype=torch.bfloat16))
    model._metadata = OrderedDict({"": {"version": 1}})
    return {
        "model": model,
        "args": argparse.Namespace(lr=0.1),
        "optimizer": {"state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2, 3)}}, "lr": 0.1},
        "progress": [1, (2.5, "epoch", None), [True, torch.float32]],
        "complex": torch.ones(2, dtype=torch.complex64),
    }


def assert_like_the_first_time(layout: RecurringLayout, tree: Tree) -> None:
    flat = flatten(tree)
    expected = lay_out(flat, {"iteration": 3})
    header, sources = layout.lay_out(tree, {"iteration": 3})
    assert (header.structure, header.entries, dict(header.meta)) == (
        expected.structure,
        expected.entries,
        {"iteration": 3},
    )
    assert len(sources) == len(flat.tensors)
    for source, named in zip(sources, flat.tensors, strict=True):
        assert source.dtype == named.tensor.dtype
        assert source.shape == named.tensor.shape
        assert torch.equal(source, named.tensor)


def set_at(*path: Any) -> Callable[[Tree], None]:
    *way, last, value = path

    def change(tree: Tree) -> None:
        node: Any = tree
        for key in way:
            node = node[key]
        node[last] = value

    return change


def insert_first(tree: Tree) -> None:
    items = list(tree.items())
    tree.clear()
    tree.update([("new", 1), *items])


def swap_order(tree: Tree) -> None:
    tree["model"].move_to_end("weight")


def move_data(tree: Tree) -> None:
    tree["model"]["bias"].data = torch.full((3,), 7.0, dtype=torch.bfloat16)


def reshape_data(tree: Tree) -> None:
    tree["optimizer"]["state"][0]["exp_avg"].data = torch.zeros(3, 2)


def transpose_in_place(tree: Tree) -> None:
    tree["optimizer"]["state"][0]["exp_avg"].t_()


CHANGES: dict[str, Callable[[Tree], None]] = {
    "nothing": lambda tree: None,
    "values of a tensor": lambda tree: tree["model"]["bias"].add_(1),
    "a number": set_at("progress", 0, 2),
    "a number in a tuple": set_at("progress", 1, (3.5, "epoch", None)),
    "a number to one that is equal": set_at("progress", 0, 1.0),
    "a number to a flag that is equal": set_at("progress", 0, True),
    "a sign of zero": set_at("optimizer", "lr", -0.0),
    "to nan": set_at("optimizer", "lr", float("nan")),
    "a string": set_at("progress", 1, (2.5, "step", None)),
    "a number that JSON cannot hold": set_at("progress", 0, 2**70),
    "half a character": set_at("progress", 1, (2.5, "\udcff", None)),
    "a dtype": set_at("progress", 2, 1, torch.bfloat16),
    "another tensor": set_at("model", "bias", torch.zeros(3, dtype=torch.bfloat16)),
    "another shape": set_at("model", "bias", torch.zeros(4, dtype=torch.bfloat16)),
    "another dtype": set_at("model", "bias", torch.zeros(3)),
    "untied": set_at("model", "tied", torch.zeros(2, 3)),
    "tied": lambda tree: tree["optimizer"]["state"][0].update(exp_avg=tree["model"]["weight"]),
    "a new key": set_at("optimizer", "state", 1, {"step": torch.tensor(2.0)}),
    "a new key in front": insert_first,
    "another order": swap_order,
    "a longer list": lambda tree: tree["progress"].append(4),
    "a tensor becomes a number": set_at("model", "bias", 1),
    "a number becomes a tensor": set_at("optimizer", "lr", torch.tensor(0.5)),
    "a dict becomes a list": set_at("optimizer", "state", [torch.zeros(1)]),
    "a parameter's data": move_data,
    "a parameter's data of another shape": reshape_data,
    "strides": transpose_in_place,
    "conjugated": lambda tree: tree.update(complex=tree["complex"].conj()),
    "something unknown to it": set_at("new", {1, 2}),
    "a version of a module": lambda tree: setattr(tree["model"], "_metadata", {"": {"version": 3}}),
    "no version any more": lambda tree: delattr(tree["model"], "_metadata"),
    "a tensor becomes a parameter": lambda tree: tree["model"].update(bias=torch.nn.Parameter(tree["model"]["bias"])),
    "a tensor becomes a frozen parameter": lambda tree: tree["model"].update(
        bias=torch.nn.Parameter(tree["model"]["bias"], requires_grad=False)
    ),
    "gradients": lambda tree: tree["complex"].requires_grad_(),
    "bytes": set_at("progress", 0, b"seven"),
    "long bytes": set_at("progress", 0, b"seven" * 5000),
    "infinity": set_at("optimizer", "lr", float("inf")),
    "a list becomes a tuple": lambda tree: tree.update(progress=tuple(tree["progress"])),
    "one tensor less": lambda tree: tree["model"].pop("bias"),
    "sparse": set_at("model", "bias", torch.eye(3).to_sparse()),
    "an object": set_at("args", argparse.Namespace(lr=0.2)),
    "an empty tensor": set_at("model", "bias", torch.zeros(0)),
    "a view of another": lambda tree: tree["model"].update(tied=tree["model"]["weight"][:1]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_changes_is_seen(name: str) -> None:
    tree, layout = state(), RecurringLayout()
    assert_like_the_first_time(layout, tree)
    assert_like_the_first_time(layout, tree)
    CHANGES[name](tree)
    assert_like_the_first_time(layout, tree)
    assert_like_the_first_time(layout, tree)


def test_new_views_of_the_same_tensors_are_the_same_tensors() -> None:
    tree, layout = state(), RecurringLayout()
    first, _ = layout.lay_out(tree, {})
    tree["model"] = OrderedDict((name, tensor.detach()) for name, tensor in tree["model"].items())
    second, sources = layout.lay_out(tree, {})
    assert second.entries is first.entries
    loaded = unflatten(second.structure, dict(zip([e.name for e in second.entries], sources, strict=True)))
    assert loaded["model"]["tied"] is loaded["model"]["weight"]


def test_a_tensor_whose_memory_was_freed_since_is_refused() -> None:
    tree, layout = state(), RecurringLayout()
    layout.lay_out(tree, {})
    tree["optimizer"]["state"][0]["exp_avg"].untyped_storage().resize_(0)  # as FSDP does
    with pytest.raises(TypeError, match="its memory was freed"):
        layout.lay_out(tree, {})
