"""Modules that are compiled, wholly or in part, save and load under the names of the plain ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchelastic
from tests.process.test_model_state import assert_same


def make_state(kind: str, seed: int) -> torchelastic.ModelState:
    torch.manual_seed(seed)
    module: Any = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    if kind == "compiled":
        module = torch.compile(module, backend="eager")
    elif kind == "in part":
        module[0] = torch.compile(module[0], backend="eager")
    return torchelastic.ModelState(module, torch.optim.SGD(module.parameters(), lr=0.1))


def values(state: torchelastic.ModelState) -> list[torch.Tensor]:
    return list(state.module.state_dict().values())


@pytest.mark.parametrize("here", ["plain", "compiled", "in part"])
@pytest.mark.parametrize("there", ["plain", "compiled", "in part"])
def test_a_state_fits_whether_or_not_either_side_is_compiled(here: str, there: str) -> None:
    source, other = make_state(here, seed=0), make_state(there, seed=1)
    tree = source.state_dict()
    assert set(tree["module"]) == set(make_state("plain", seed=0).module.state_dict())
    other.load_state_dict(tree)
    assert_same(values(source), values(other))


def test_a_state_with_the_compilers_names_is_loaded_too() -> None:
    source, other = make_state("compiled", seed=0), make_state("plain", seed=1)
    other.load_state_dict({**source.state_dict(), "module": dict(source.module.state_dict())})
    assert_same(values(source), values(other))


def test_what_does_not_fit_is_refused_as_ever() -> None:
    state = make_state("compiled", seed=0)
    with pytest.raises(ValueError, match="Missing key"):
        state.load_state_dict({**state.state_dict(), "module": {}})
