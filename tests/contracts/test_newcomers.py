"""What a worker that joins gets: all that its source has, proved by a census of both."""

from __future__ import annotations

import logging
import random
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import torchelastic
from tests.contracts.census import Census, census_of, differences
from tests.contracts.coded_momentum import Coded, CodedMomentum
from tests.contracts.ordinary_programs import Wrapping
from tests.contracts.training_states import CHANGES, Change, World, world
from tests.process.forked_ranks import run_ranks, values
from torchelastic.model import newcomers
from torchelastic.repeated_failures import is_final


def _state_of_its_own(one: World) -> None:
    state: dict[Any, Any] = one.optimizer.state
    state["clipped"] = {"norms": [1, 2]}


#: Beside what a step does: what a script may have changed in modules of its own, between two steps.
OWN_CHANGES: dict[str, Change] = {
    "extra: a module's flags": lambda one: one.state.extra["teacher"].train().requires_grad_(False),
    "extra: a module's buffer": lambda one: setattr(one.state.extra["teacher"], "table", torch.ones(7)),
    "state of the optimizer that is no parameter's": _state_of_its_own,
}
#: Not sent. Each of these fails when it is, so that it is taken from this list.
NOT_SENT = {
    "attribute": "LOCAL, and told: nobody knows whether a plain attribute is a rank's own",
    "attribute that is a list": "the same",
    "attribute that is new": "the same",
    "hook": "LOCAL: code is not sent, a worker that joins has registered its own",
    "extra: an object without state": "told at the start: an object with an empty state_dict says that it has nothing",
}
#: What is refused, so that the worker ends with the reason.
REFUSED = {"a group of parameters": "parameters that are not the model's: a worker that joins has no such"}
#: What is each rank's own: random numbers, gradients, whether an optimizer has stepped in this process; and what an
#: optimizer still has of a parameter that is in none of its groups any more.
OWN = re.compile(r"^random\.|\.grad(\.|$)|^optimizer\._opt_called$|^optimizer\.state\.\[torch\.nn\.parameter")


def joined(change: str) -> tuple[Census, Census]:
    """Of each rank, before the change and after the sync: rank 0 has trained, and rank 1 joins."""
    rank = dist.get_rank()
    one = world(seed=rank + 1, is_alone=rank == 0)
    one.state.extra["teacher"] = teacher = torch.nn.BatchNorm1d(4).eval()
    teacher.register_buffer("table", torch.zeros(0), persistent=False)
    for _ in range(0 if rank else 2):
        one.train()
    before = census_of(**one.roots)
    if rank == 0:
        (CHANGES | OWN_CHANGES)[change](one)
        assert differences(before, census_of(**one.roots)) or change == "nothing"
    one.state.sync()
    return before, census_of(**one.roots)


#: One of each kind for every day.
DAILY = (
    *("nothing", "eval of one layer", "unfreeze", "another parameter, which is trained", "buffer that was None"),
    *("buffer of another size", "buffer of another type", "buffer that is not persistent", "attribute", "hook"),
    *(
        "extra state of a module",
        "state of the optimizer",
        "a group of the model's parameters",
        "a group of parameters",
    ),
    *("order of the optimizer's parameters", "scheduler", "extra: an object without state", "extra: a generator"),
    "extra: a module's buffer",
)


def cases() -> list[Any]:
    reasons = NOT_SENT | REFUSED
    found = []
    for name in (*CHANGES, *OWN_CHANGES):
        marks = [pytest.mark.xfail(strict=True, reason=reasons[name])] if name in reasons else []
        found.append(pytest.param(name, marks=marks if name in DAILY else [*marks, pytest.mark.long], id=name))
    return found


@pytest.mark.parametrize("change", cases())
def test_a_worker_that_joins_has_what_its_source_has(change: str) -> None:
    (_, source), (before, newcomer) = values(run_ranks(joined, change, ranks=2))
    assert differences(source, before)
    assert apart(source, newcomer) == {}


def apart(source: Census, newcomer: Census) -> dict[str, str]:
    """In what they differ, beside what is each rank's own."""
    return {path: text for path, text in differences(source, newcomer).items() if not OWN.search(path)}


def joined_with_inner() -> tuple[Census, bool]:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    module = torch.nn.Linear(3, 2)
    optimizer = Wrapping(torch.optim.Adam(module.parameters(), lr=0.1))
    state = torchelastic.ModelState(module, optimizer)
    if rank == 0:
        state.sync(1, 0)
        for _ in range(2):
            module(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            state.commit()
        optimizer.param_groups[0]["lr"] = 0.02
    state.sync()
    optimizer.steps = 0  # an attribute
    return census_of(module=module, optimizer=optimizer), optimizer.param_groups is optimizer.inner.param_groups


def test_what_an_optimizer_keeps_inside_another_one_is_sent() -> None:
    (source, _), (newcomer, is_shared) = values(run_ranks(joined_with_inner, ranks=2))
    assert "exp_avg" in str(source.keys())
    found = {path for path in apart(source, newcomer) if ".defaults." not in path}  # torch adds to these
    assert found == set()
    assert is_shared, "a scheduler that changes the one's learning rate changes the other's"


def joined_in_accumulation(has_stepped: bool) -> tuple[list[Any], list[Any]]:
    """Gradients when a worker has joined, and weights after the optimizer's next step."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2).double()
    state = torchelastic.ModelState(module, torch.optim.SGD(module.parameters(), lr=0.1))
    if rank == 0:
        state.sync(1, 0)
        for _ in range(2):  # with an average of this worker's sample alone
            state.snapshot()
            state.model(torch.ones(1, 3).double()).sum().backward()
            if has_stepped:
                state.optimizer.step()
            state.commit()
    state.sync()
    gradients = [None if one.grad is None else one.grad.tolist() for one in module.parameters()]
    if has_stepped:
        state.optimizer.zero_grad()
    state.snapshot()
    state.model(torch.ones(1, 3).double()).sum().backward()
    state.optimizer.step()
    state.commit()
    return gradients, [one.tolist() for one in module.parameters()]


def test_gradients_that_steps_have_left_for_the_next_one_are_sent_and_others_are_not() -> None:
    (left, weights), (sent, same) = values(run_ranks(joined_in_accumulation, False, ranks=2))
    assert left == sent == [[[2.0] * 3] * 2, [2.0] * 2]
    torch.manual_seed(0)
    begun = torch.nn.Linear(3, 2).double()
    assert weights == same
    for before, one in zip(begun.parameters(), weights, strict=True):
        assert torch.allclose(torch.tensor(one, dtype=torch.float64), before - 0.1 * 3.0)  # the sum of three steps

    (_, weights), (sent, same) = values(run_ranks(joined_in_accumulation, True, ranks=2))
    assert sent == [None, None]
    assert weights == same


def joined_drawing(alike: frozenset[str]) -> dict[str, float]:
    """What each rank draws in the end: two train, one of them is lost, and comes back as its script has seeded it."""
    rank = dist.get_rank()

    def begun() -> torchelastic.ModelState:
        torch.manual_seed(0 if "torch" in alike else rank)
        random.seed(0 if "python" in alike else rank)
        np.random.seed(0 if "numpy" in alike else rank)
        module = torch.nn.Linear(3, 2)
        return torchelastic.ModelState(module, torch.optim.SGD(module.parameters(), lr=0.1))

    def drawn() -> dict[str, float]:
        return {"torch": float(torch.rand(())), "python": random.random(), "numpy": float(np.random.rand())}

    state = begun()
    state.sync()
    state.snapshot()
    drawn()
    state.commit()
    if rank == 1:
        state = begun()
    state.sync()
    return drawn()


@pytest.mark.parametrize("kinds", ["torch python numpy", "python", "numpy torch"])
def test_a_worker_that_joins_draws_on_with_the_others_from_each_generator_from_which_they_drew_alike(
    kinds: str,
) -> None:
    alike = frozenset(kinds.split())
    source, newcomer = values(run_ranks(joined_drawing, alike, ranks=2))
    assert {kind for kind in source if source[kind] == newcomer[kind]} == alike


#: What is sent, and a change that only this part brings.
PARTS = {
    "module": "weights in place",
    "flags": "eval of one layer",
    "buffers": "buffer that is not persistent",
    "optimizer": "learning rate",
    "scheduler": "scheduler",
    "extra": "extra: a number",
}


def joined_without(part: str) -> tuple[Census, Census]:
    receive = newcomers.receive

    def without(tree: Any, module: Any, own: Any, trained: Any, **options: Any) -> None:
        mine = newcomers.sent(module, own, trained, {})
        if part in mine:
            tree[part] = mine[part]
        else:
            tree["values"][None][part] = mine["values"][None][part]
        receive(tree, module, own, trained, **options)

    newcomers.receive = without  # in this process, which ends with the case
    return joined(PARTS[part])


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS)
def test_without_any_one_part_the_census_would_tell(part: str) -> None:
    (_, source), (_, newcomer) = values(run_ranks(joined_without, part, ranks=2))
    assert apart(source, newcomer)


def refused() -> tuple[str, bool] | None:
    rank = dist.get_rank()
    one = world(seed=rank + 1, is_alone=rank == 0)
    if rank == 0:
        one.train()
        CHANGES["a group of parameters"](one)
    try:
        one.state.sync()
    except Exception as error:
        return f"{type(error).__name__}: {error}", is_final(error)
    return None


def test_a_worker_without_the_parameters_of_a_group_is_refused_by_name() -> None:
    _, newcomer = run_ranks(refused, ranks=2)
    text, ends = newcomer.value
    assert re.search(r"UnfitStateError: .*does not fit the optimizer: .*of group 1 that is not the model's", text), text
    assert "no such parameter here" in text
    assert ends, "no restart can help"


class Heard(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def told() -> list[str]:
    rank = dist.get_rank()
    heard = Heard()
    logging.getLogger("torchelastic").addHandler(heard)
    one = world(seed=rank + 1, is_alone=False)
    one.layer.worker = rank  # type: ignore[assignment]  # a rank's own from the beginning is no news
    if rank == 0:
        one.state.sync(1, 0)
        one.train()
        one.layer.temperature = 0.3
        one.layer.norm.momentum = 0.01
        one.layer.seen.append(4)
        one.layer.fresh = "new"  # type: ignore[assignment]
    one.state.sync()
    return [line for line in heard.lines if "attributes" in line]


def test_attributes_that_have_changed_in_the_run_are_told_once_to_a_worker_that_joins() -> None:
    source, (line,) = values(run_ranks(told, ranks=2))
    assert source == []
    assert line.startswith("step 1: attributes of the model have changed in the run")
    assert "temperature is 0.3 there and 1.0 here, seen is [4] there and [] here, fresh is 'new' there" in line
    assert "and 1 more (there: rank 0)" in line
    assert "worker" not in line.replace("worker that joins", "")


# --- optimizers -------------------------------------------------------------------------------------------------------


def in_order(names: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Three layers of one shape, whose weights the optimizer has in this order."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3, bias=False) for name in "abc"})
    return model, torch.optim.SGD([weight_of(model, name) for name in names], lr=0.1, momentum=0.9)


def weight_of(model: torch.nn.Module, layer: str) -> torch.nn.Parameter:
    return model.get_parameter(f"{layer}.weight")


def momenta_by_name(orders: list[str], trained: int) -> dict[str, list[float]]:
    """Each rank has its own order; those below `trained` have trained before the others join."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model, optimizer = in_order(orders[rank])
    state = torchelastic.ModelState(model, optimizer, on_out_of_sync="raise")
    if rank < trained:
        state.sync(1, 0)
        one_step(state)
    state.sync()
    one_step(state)
    found = {name: optimizer.state[weight_of(model, name)]["momentum_buffer"].flatten().tolist() for name in "abc"}
    stored = state.state_dict()["optimizer"]["state"]  # by number: the same on every rank, for each writes a part
    return {**found, **{str(number): one["momentum_buffer"].flatten().tolist() for number, one in stored.items()}}


def one_step(state: torchelastic.ModelState) -> None:
    state.snapshot()
    losses = [
        weight_of(state.module, name).square().sum() * factor for name, factor in zip("abc", (1, 2, 3), strict=True)
    ]
    state.optimizer.zero_grad()
    torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]  # torch has no types here
    state.optimizer.step()
    state.commit()


@pytest.mark.parametrize("trained", [0, 1])
def test_momenta_come_to_their_parameters_whatever_order_each_rank_has(trained: int) -> None:
    """Without the names two ranks of equal shapes would exchange them, and a checkpoint would mix them."""
    first, *others = values(run_ranks(momenta_by_name, ["abc", "cab", "bca"], trained, ranks=3))
    assert all(other == first for other in others)
    assert len({str(first[name]) for name in "abc"}) == 3


def built_otherwise(kind: str) -> str | None:
    rank = dist.get_rank()
    model, optimizer = in_order("abc" if kind == "another parameter" else "ab")
    if kind == "shared" and rank == 0:
        model.get_submodule("c").register_parameter("weight", weight_of(model, "a"))
    if rank == 1 and kind == "more groups":
        optimizer.add_param_group({"params": [weight_of(model, "c")]})
    if rank == 0 and kind == "another parameter":
        del optimizer.param_groups[0]["params"][2]
    state = torchelastic.ModelState(model, optimizer)
    try:
        state.sync()
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("more groups", "has 1 parameter group.*this SGD has 2"),
        ("another parameter", "group 0 of this SGD holds c.weight, and that one's does not"),
        ("shared", "'c.weight' is one with 'a.weight' there and a parameter of its own here"),
    ],
)
def test_a_model_or_an_optimizer_that_was_built_otherwise_is_refused_by_name(kind: str, reason: str) -> None:
    _, newcomer = run_ranks(built_otherwise, kind, ranks=2)
    assert re.search(reason, newcomer.value), newcomer.value


def coded() -> tuple[list[str], list[float]]:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = torch.nn.Linear(3, 2)
    state = torchelastic.ModelState(model, CodedMomentum(model.parameters()), on_out_of_sync="raise")
    for number in range(5):
        if rank == 0 and number == 0:
            state.sync(1, 0)
        if number == 3:
            state.sync()
        if rank == 0 or number >= 3:
            state.snapshot()
            state.optimizer.zero_grad()
            state.model(torch.full((1, 3), float(number))).sum().backward()
            state.optimizer.step()
            state.commit()
    momenta = [one["momentum"] for one in state.optimizer.state.values()]
    kinds = [f"{type(one).__name__} {one.codes.dtype} {one.has_sign}" for one in momenta if isinstance(one, Coded)]
    return kinds, torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def test_state_that_is_made_of_other_tensors_is_sent_and_compared() -> None:
    (kinds, source), newcomer = values(run_ranks(coded, ranks=2))
    assert newcomer == (kinds, source)
    assert kinds == ["Coded torch.int8 True"] * 2


# --- buffers in a step ------------------------------------------------------------------------------------------------


class Table(torch.nn.Module):
    """A table that is as long as the longest sequence that this process has seen, and buffers of many types."""

    positions: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.register_buffer("positions", torch.zeros(1), persistent=False)
        self.register_buffer("turned", torch.zeros(3, 2).t())
        for dtype in (torch.complex64, torch.int16, torch.uint16, torch.bool, torch.float8_e4m3fn, torch.complex128):
            self.register_buffer(str(dtype).removeprefix("torch."), torch.zeros(3).to(dtype))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        length = inputs.shape[1]
        if length > len(self.positions):
            self.register_buffer("positions", torch.arange(1.0, length + 1), persistent=False)
        result: torch.Tensor = self.linear((inputs * self.positions[:length]).sum(dim=1, keepdim=True))
        return result


def with_tables() -> list[dict[str, Any]]:
    """Steps in which now this rank, now that one sees the longest sequence; what rank 0 writes into its buffers."""
    rank = dist.get_rank()
    module = Table()
    state = torchelastic.ModelState(module, torch.optim.SGD(module.parameters(), lr=0.01), on_out_of_sync="raise")
    state.sync()
    found = []
    for number, lengths in enumerate([(2, 2), (3, 5), (6, 4), (6, 9), (7, 3)]):
        if rank == 0:
            for buffer in module.buffers():
                if buffer is not module.positions:
                    buffer.fill_(number)
        state.snapshot()
        state.optimizer.zero_grad()
        state.model(torch.ones(2, lengths[rank])).sum().backward()
        state.optimizer.step()
        state.commit()
        buffers = {name: str(value.tolist()) for name, value in module.named_buffers() if name != "positions"}
        found.append(
            {**buffers, "weight": module.linear.weight.item(), "enough": len(module.positions) >= lengths[rank]}
        )
    return found


def test_buffers_of_any_type_and_size_are_rank_0s_before_each_forward_pass() -> None:
    first, second = values(run_ranks(with_tables, ranks=2))
    assert first == second
    assert [one["enough"] for one in first] == [True] * 5
    assert first[-1]["complex64"] == str([4 + 0j] * 3)
    assert first[-1]["turned"] == str([[4.0] * 3] * 2)


# --- other ways to build ----------------------------------------------------------------------------------------------


def named_and_compiled() -> tuple[list[Any], dict[str, Any]]:
    """Several optimizers, one with named parameters, which gets a group in the run; a rank has compiled its model."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    model: torch.nn.Module = torch.compile(plain, backend="eager") if rank else plain  # type: ignore[assignment]
    optimizers = {
        "first": torch.optim.SGD(plain[0].named_parameters(prefix="0"), lr=0.1, momentum=0.9),
        "last": torch.optim.AdamW([plain.get_parameter("2.bias")], lr=0.1),
    }
    state = torchelastic.ModelState(model, optimizers, on_out_of_sync="raise")
    for number in range(4):
        if rank == 0 and number == 0:
            state.sync(1, 0)
        if number == 2:
            state.sync()
        if rank == 1 and number < 2:
            continue
        state.snapshot()
        if number == 1:
            optimizers["first"].add_param_group({"params": [("norm", plain[1].weight)], "lr": 0.5})
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        state.model(torch.arange(8.0).reshape(4, 2) * (number + 1)).square().mean().backward()
        for optimizer in optimizers.values():
            optimizer.step()
        state.commit()
    groups = [(group["lr"], group.get("param_names")) for one in optimizers.values() for group in one.param_groups]
    return groups, {name: value.tolist() for name, value in plain.state_dict().items()}


def test_a_worker_that_joins_gets_groups_of_named_parameters_whether_models_are_compiled_or_not() -> None:
    (groups, source), newcomer = values(run_ranks(named_and_compiled, ranks=2))
    assert newcomer == (groups, source)
    assert groups == [(0.1, ["0.weight", "0.bias"]), (0.5, ["norm"]), (0.1, None)]
