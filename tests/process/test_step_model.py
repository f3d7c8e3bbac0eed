"""`state.model` answers as the user's module does, at any size of the group; its call alone is DDP's."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchelastic
from tests.process.local_ranks import crew_of, form_ours, succeeded

REGISTRY: dict[str, type] = {}


def log_of(name: str) -> list[str]:
    """What is logged there from now on."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    return said


class Net(nn.Module):
    """Has what users' models have: attributes, methods that call it, a list of its kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 2)
        self.temperature = 1.0
        self.register_buffer("seen", torch.zeros(1))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        REGISTRY[cls.__name__] = cls

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.relu(self.body(inputs)))
        return logits / self.temperature

    def loss(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self(inputs)
        return logits.square().mean()


class Narrow(Net):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs)


class HasModule(nn.Module):
    """Uses a name of DDP's itself."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.module(inputs)
        return result

    def no_sync(self) -> str:
        return "mine"


def state_of(module: nn.Module, **options: Any) -> torchelastic.ModelState:
    state = torchelastic.ModelState(module, torch.optim.SGD(module.parameters(), lr=0.1), **options)
    state.sync()
    return state


def asked(kind: type[nn.Module]) -> dict[str, Any]:
    """What a script may ask `state.model` for."""
    torch.manual_seed(0)
    module: Any = kind()
    state = state_of(module)
    model: Any = state.model
    calls: list[int] = []
    hook = module.register_forward_hook(lambda *_: calls.append(1))
    rank = dist.get_rank() if dist.is_initialized() else 0
    inputs = torch.full((3, 4), float(rank + 1))
    model.loss(inputs).backward()
    gradient = module.head.bias.grad.clone()
    hook.remove()  # it could not be pickled
    model.temperature = 2.0
    model.eval()
    return {
        "names": list(model.state_dict()),
        "parameters": [name for name, _ in model.named_parameters()],
        "is one": isinstance(model, kind),
        "text": repr(model) == repr(module),
        "head": model.head is module.head,
        "temperature": module.temperature,
        "training": (module.training, module.head.training),
        "module": model.module is module,
        "calls": len(calls),
        "gradient": gradient,
        "copy": type(copy.deepcopy(model)) is kind and type(pickle.loads(pickle.dumps(model))) is kind,
    }


def test_it_is_the_users_module_at_any_size() -> None:
    alone = asked(Narrow)
    with crew_of(2) as crew:
        of_two = succeeded(crew.run(asked, Narrow, ranks=2))
    assert alone["is one"]
    assert alone["names"] == ["seen", "body.weight", "body.bias", "head.weight", "head.bias"]
    assert alone["calls"] == 1, "one call, and hooks run once"
    for name, value in alone.items():
        if name != "gradient":
            assert [one[name] for one in of_two] == [value] * 2, name
    # a method that calls the model is averaged over the ranks, too
    assert torch.equal(of_two[0]["gradient"], of_two[1]["gradient"])
    assert not torch.equal(of_two[0]["gradient"], alone["gradient"])
    assert {"Narrow": Narrow} == REGISTRY


def one_object_for_the_run() -> bool:
    module = Net()
    state = torchelastic.ModelState(module, torch.optim.SGD(module.parameters(), lr=0.1))
    model = state.model
    form_ours()
    state.sync()
    during = state.model
    state.sync(1, 0)
    return model is during is state.model


def test_it_stays_the_same_object_through_groups() -> None:
    with crew_of(2) as crew:
        assert succeeded(crew.run(one_object_for_the_run, ranks=2)) == [True, True]


def test_names_of_the_users_own_class_stay_its_own() -> None:
    module = HasModule()
    model: Any = state_of(module).model
    assert model.module is module.module
    assert model.no_sync() == "mine"


def no_sync_adds_up() -> list[float]:
    torch.manual_seed(0)
    module = nn.Linear(1, 1, bias=False)
    state = state_of(module)
    model: Any = state.model
    value = torch.full((1, 1), float(dist.get_rank()))
    with model.no_sync():
        model(value).sum().backward()
    gradient = module.weight.grad
    assert gradient is not None
    own = gradient.item()
    model(value).sum().backward()
    return [own, gradient.item()]


def test_gradients_add_up_where_they_are_not_to_be_exchanged_yet() -> None:
    with crew_of(2) as crew:
        assert succeeded(crew.run(no_sync_adds_up, ranks=2)) == [[0.0, 1.0], [1.0, 1.0]]


def no_sync_around_the_backward_pass_alone() -> list[str]:
    module = nn.Linear(1, 1, bias=False)
    state, said = state_of(module), log_of("torchelastic.model.reduction")
    for _ in range(2):
        outputs = state.model(torch.ones(1, 1))
        with state.no_sync():
            outputs.sum().backward()
    return said


def test_no_sync_around_a_backward_pass_alone_is_said_once_to_exchange_gradients_all_the_same() -> None:
    with crew_of(2) as crew:
        for said in succeeded(crew.run(no_sync_around_the_backward_pass_alone, ranks=2)):
            (line,) = said
            assert "because its forward pass was outside: put both inside" in line


def calls_of(kind: str) -> list[str]:
    """The classes that a step's call goes to, outermost first."""
    module = nn.Linear(4, 2)
    made: Any = torch.jit.script(module) if kind == "script" else torch.compile(module, backend="eager")
    state = state_of(made)
    state.model(torch.ones(2, 4)).sum().backward()
    return [type(state.model).__name__, str(isinstance(state.model, DistributedDataParallel))]


@pytest.mark.parametrize(("kind", "expected"), [("script", "True"), ("compiled", "False")])
def test_modules_of_other_kinds_are_called_as_before(kind: str, expected: str) -> None:
    with crew_of(2) as crew:
        assert {is_ddp for _, is_ddp in succeeded(crew.run(calls_of, kind, ranks=2))} == {expected}


def test_a_state_that_was_pickled_has_one_of_its_own() -> None:
    state = state_of(nn.Linear(4, 2))
    other = pickle.loads(pickle.dumps(state))
    assert other.model.module is other.module
    assert other.module is not state.module
