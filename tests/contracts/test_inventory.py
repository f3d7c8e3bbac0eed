"""What a training state consists of: whatever a failed step has changed is undone, proved by a census of everything."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import torchelastic
from tests.contracts.census import census_of, differences
from tests.contracts.training_states import CHANGES, Layer, Metric, world
from torchelastic.inventory.attributes import MOST_VALUES, SMALL_BYTES, attributes_of
from torchelastic.inventory.generators import generators
from torchelastic.inventory.module_structure import ModuleStructure
from torchelastic.rendezvous.records import StateStatus

MODES = ("commit", "full", "auto")
#: Not undone yet. Each of these fails when it is, so that it is taken from this list.
HOLES = {
    ("commit", "weights in place"): "weights are not copied in this mode: the rank asks a peer for them",
    ("commit", "weights through .data"): "the same",
    ("commit", "state of the optimizer"): "what the script itself writes there is not copied in this mode",
}


def cases() -> list[Any]:
    marks = {case: [pytest.mark.xfail(strict=True, reason=reason)] for case, reason in HOLES.items()}
    return [
        pytest.param(mode, change, marks=marks.get((mode, change), []), id=f"{mode}, {change}")
        for mode in MODES
        for change in CHANGES
    ]


@pytest.mark.parametrize(("mode", "change"), cases())
def test_a_failed_step_is_undone(mode: str, change: str) -> None:
    one = world(mode)
    for _ in range(2):
        one.train()
    before = census_of(**one.roots)
    snapshot = one.state.snapshot()
    CHANGES[change](one)
    changed = differences(before, census_of(**one.roots))
    assert changed or change == "nothing"
    one.state.apply(snapshot)
    assert differences(before, census_of(**one.roots)) == {}
    assert one.state.status is StateStatus.COMPLETE


@pytest.mark.parametrize("change", ["weights in place", "weights through .data"])
def test_a_rank_whose_weights_were_changed_before_the_optimizer_is_no_source_for_others(change: str) -> None:
    one = world("commit")
    one.train()
    snapshot = one.state.snapshot()
    CHANGES[change](one)
    one.state.apply(snapshot)
    assert one.state.status is StateStatus.PARTIAL


@pytest.mark.parametrize(
    ("mode", "change"), [(mode, name) for mode in MODES for name in (*CHANGES, "each") if (mode, name) not in HOLES]
)
def test_steps_that_failed_leave_no_trace_in_the_run(mode: str, change: str) -> None:
    """A change in the second of three steps, which fails and is repeated: the run ends as without it."""
    undisturbed = world(mode)
    for _ in range(3):
        undisturbed.train()
    expected = census_of(**undisturbed.roots)
    one = world(mode)
    one.train()
    for name in [name for name in CHANGES if (mode, name) not in HOLES] if change == "each" else [change]:
        snapshot = one.state.snapshot()
        one.backward()
        CHANGES[name](one)
        one.state.apply(snapshot)
        one.state.sync(1, 0)
    one.train()
    one.train()
    found = differences(expected, census_of(**one.roots))
    # each process numbers its hooks, and numbers from other generators are drawn by whoever runs here
    apart = {path: text for path, text in found.items() if not re.search(r"hooks\.\d+|^random\.(python|numpy)", path)}
    assert apart == {}


def test_a_step_that_fails_in_its_evaluation_leaves_the_flags_of_training() -> None:
    one = world("commit")
    one.train()
    snapshot = one.state.snapshot()
    one.backward()
    one.optimizer.step()
    one.layer.eval()
    one.layer.linear.requires_grad_(False)
    one.state.apply(snapshot)  # the optimizer has stepped: the step counts, and goes on from there
    one.state.sync(1, 0)
    assert one.state.step == 2
    assert one.layer.training
    assert one.layer.norm.training
    assert one.layer.linear.weight.requires_grad


# --- the copies that this is made of ----------------------------------------------------------------------------------


def undone(owner: Any, change: Any) -> dict[str, str]:
    before = census_of(owner=owner)
    restores = attributes_of(owner, "owner")
    change(owner)
    assert differences(before, census_of(owner=owner))
    for restore in restores:
        restore()
    return differences(before, census_of(owner=owner))


def test_attributes_of_any_object_are_put_back() -> None:
    owner = SimpleNamespace(
        number=1,
        nested=[{"a": [1, 2]}, {3}],
        window=deque([1, 2], maxlen=2),
        array=np.arange(3),
        tensor=torch.zeros(2),
        spread=torch.ones(1).expand(3),
    )

    owner.nested.append(owner.nested)

    def change(owner: Any) -> None:
        owner.number, owner.more = 2, 3
        owner.nested[0]["a"].append(3)
        owner.nested[1].add(4)
        owner.nested.append(5)
        owner.window.append(3)
        owner.array += 1
        owner.tensor.add_(1)
        owner.spread = torch.zeros(5)

    assert undone(owner, change) == {}


def test_what_is_too_large_to_be_copied_before_each_step_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    owner = SimpleNamespace(
        replay=list(range(MOST_VALUES + 1)), memory=torch.zeros(SMALL_BYTES), small=[0], array=np.zeros(SMALL_BYTES)
    )
    name = "owner of too much"
    for _ in range(2):
        attributes_of(owner, name)
    told = [record.getMessage().split(" is too large")[0] for record in caplog.records]
    assert told == [f"{name}.replay", f"{name}.memory", f"{name}.array"]


def test_a_module_whose_parameters_are_made_by_its_first_step_is_undone_from_then_on() -> None:
    module = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.Linear(3, 1))
    structure = ModuleStructure(module)
    kept = structure.copy()
    module(torch.zeros(2, 4))
    kept.put()
    assert type(module[0]) is torch.nn.Linear
    module(torch.zeros(2, 4))
    kept = structure.copy()
    module.eval()
    kept.put()
    assert module[0].training


def test_modules_and_attributes_that_come_between_two_steps_are_undone_like_the_others() -> None:
    layer: Any = Layer()
    structure = ModuleStructure(layer)
    structure.copy()
    layer.add_module("head", torch.nn.Linear(4, 2))
    layer.later = []
    layer.linear.register_forward_hook(lambda *_: None)
    before = census_of(layer=layer)
    kept = structure.copy()
    layer.head.eval()
    layer.later.append(1)
    layer.linear._forward_hooks.clear()
    del layer.head
    assert differences(before, census_of(layer=layer))
    kept.put()
    assert differences(before, census_of(layer=layer)) == {}


def test_copies_that_are_kept_are_not_overwritten_by_later_ones() -> None:
    layer = Layer()
    structure = ModuleStructure(layer)
    first = structure.copy()
    layer.running.add_(1)
    second = structure.copy()
    layer.running.add_(1)
    third = structure.copy()
    second.put()
    assert layer.running.tolist() == [1.0] * 4
    first.put()
    assert layer.running.tolist() == [0.0] * 4
    third.put()
    assert layer.running.tolist() == [2.0] * 4


def of_inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(2)


ODD: dict[str, Callable[[], Any]] = {
    "read-only array": lambda: np.broadcast_to(np.zeros(1), 3),
    "array of objects": lambda: np.array([1, None], dtype=object),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "meta": lambda: torch.empty(3, device="meta"),
    "spread": lambda: torch.ones(1).expand(4),
    "8 bit": lambda: torch.ones(2).to(torch.float8_e4m3fn),
    "of inference": of_inference,
    "of a graph": lambda: torch.ones(2, requires_grad=True) * 2,
}


@pytest.mark.parametrize("kind", ODD)
def test_values_of_any_kind_end_no_step(kind: str) -> None:
    value = ODD[kind]()
    module: Any = torch.nn.Module()
    module.attribute = value
    if isinstance(value, torch.Tensor):
        module.register_buffer("buffer", value)
    structure = ModuleStructure(module)
    for _ in range(2):
        kept = structure.copy()
        module.added = 1
        kept.put()
        assert module.attribute is value
        assert not hasattr(module, "added")


def test_an_object_that_is_undone_but_neither_sent_nor_saved_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    module = torch.nn.Linear(2, 1)
    extra = {"metric": Metric(), "scaler": torch.amp.GradScaler(enabled=False), "count": 1}
    state = torchelastic.ModelState(module, torch.optim.SGD(module.parameters(), lr=0.1), extra=extra)
    for _ in range(2):
        state.sync(1, 0)
    told = [record.getMessage() for record in caplog.records if "empty state_dict" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("extra['metric'], a Metric, has an empty state_dict")


def test_a_large_plain_value_that_is_copied_before_each_step_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    module = torch.nn.Linear(2, 1)
    replay: deque[tuple[int, int]] = deque()
    state = torchelastic.ModelState(
        module, torch.optim.SGD(module.parameters(), lr=0.1), extra={"replay": replay, "name": "x" * 20_000}
    )
    for _ in range(3):
        replay.extend((1, 2) for _ in range(6_000))
        state.snapshot()
    told = [record.getMessage() for record in caplog.records if "copied before each step" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("extra['replay'] has 12,000 values by now")


def test_a_normal_number_that_numpy_has_drawn_ahead_is_put_back() -> None:
    """It draws two at once, and the second one waits beside the generator's memory."""
    np.random.seed(5)
    generators()
    np.random.randn()
    one_waits = generators()
    expected = np.random.randn(3).tolist()
    one_waits.put()
    np.random.randn()
    generators()  # none waits, and the memory is the same
    one_waits.put()
    generators().put()
    assert np.random.randn(3).tolist() == expected
