"""What a job has that is started again: all that was saved, proved by a census of both; see `test_newcomers.py`."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.contracts.census import Census, census_of, differences
from tests.contracts.training_states import CHANGES, Change, Layer, World
from tests.process.forked_ranks import run_ranks, values
from torchelastic.checkpoint import BCPState, CheckpointError
from torchelastic.checkpoint.compat.velastic import optimizer_trees, random_numbers, training_objects

#: What `get_extra_fn` gives is the script's, and so is what it does with it.
KEPT = {name: change for name, change in CHANGES.items() if not name.startswith(("extra:", "scheduler"))}
#: Not stored. Each of these fails when it is, so that it is taken from this list.
NOT_STORED = {
    "attribute": "LOCAL: a plain attribute may be a rank's own, and the script sets it",
    "attribute that is a list": "the same",
    "attribute that is new": "the same",
    "hook": "LOCAL: code is not stored",
    "eval": "a model that is in evaluation mode as a whole was saved in an evaluation: what trains is not known",
}
#: What `save` refuses by name.
REFUSED = {
    "a group of parameters": r"1 parameter\(s\) that are not in the model",
}
#: Gradients are nobody's between two steps; `_opt_called` says whether an optimizer has stepped in this process.
#: An optimizer may still have state of a parameter that is in none of its groups any more.
OWN = re.compile(r"\.grad(\.|$)|^optimizer\._opt_called$|^optimizer\.state\.\[torch\.nn\.parameter")


def built(seed: int) -> World:
    """As a script builds it."""
    torch.manual_seed(seed)
    layer = Layer()
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.1)
    state: Any = SimpleNamespace(model=layer, snapshot=lambda: None, commit=lambda: None, extra={})
    return World(state, layer, optimizer, SimpleNamespace(step=lambda: None), {})


def bcp_state(one: World, folder: Path) -> BCPState:
    return BCPState(one.layer, one.optimizer, default_ckpt_path=folder)


_NUMBER = re.compile(r"(\S*hooks)\.(\d+)")


def census(one: World) -> Census:
    """As `census_of`; hooks, which the process numbers, are numbered by their containers."""
    found = census_of(model=one.layer, optimizer=one.optimizer)
    numbers: dict[str, list[int]] = {}
    for container, number in (match.groups() for path in found if (match := _NUMBER.match(path))):
        known = numbers.setdefault(container, [])
        known += [] if int(number) in known else [int(number)]

    def renamed(match: re.Match[str]) -> str:
        return f"{match[1]}.{numbers[match[1]].index(int(match[2]))}"

    return {_NUMBER.sub(renamed, path): _NUMBER.sub(renamed, text) for path, text in found.items()}


def restarted(change: Change, folder: Path) -> tuple[Census, Census, Census]:
    """Of who has saved, of the twin before it has loaded, and after."""
    one = built(1)
    state = bcp_state(one, folder)
    for _ in range(2):
        one.train()
    change(one)
    state.save()
    saved = census(one)
    state.close()
    twin = built(2)
    again = bcp_state(twin, folder)
    before = census(twin)
    again.load()
    again.close()
    return saved, before, census(twin)


def apart(one: Census, other: Census) -> dict[str, str]:
    """In what they differ, beside what is nobody's."""
    return {path: text for path, text in differences(one, other).items() if not OWN.search(path)}


def cases() -> list[Any]:
    marks = {name: [pytest.mark.xfail(strict=True, reason=reason)] for name, reason in NOT_STORED.items()}
    return [pytest.param(name, marks=marks.get(name, []), id=name) for name in KEPT if name not in REFUSED]


@pytest.mark.parametrize("change", cases())
def test_a_job_that_is_started_again_has_what_was_saved(change: str, tmp_path: Path) -> None:
    saved, before, after = restarted(KEPT[change], tmp_path)
    assert apart(saved, before)
    assert apart(saved, after) == {}


@pytest.mark.parametrize("change", REFUSED)
def test_what_cannot_be_saved_is_refused_by_name(change: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=REFUSED[change]):
        restarted(KEPT[change], tmp_path)


def by_accelerate(folder: str) -> dict[str, tuple[dict[str, str], dict[str, str]]]:
    """By change: in what the twin of who has saved differs from it, before it has loaded and after."""
    import accelerate  # type: ignore[import-untyped, unused-ignore]

    from torchelastic.adapters.accelerate import MemoryCheckpointer

    def prepared(one: World) -> Any:
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.prepare(one.layer, one.optimizer)
        return accelerator

    found = {}
    for number, (name, change) in enumerate(KEPT.items()):
        one = built(1)
        with MemoryCheckpointer(prepared(one), f"{folder}/{number}", async_save=False) as checkpointer:
            for _ in range(2):
                one.train()
            change(one)
            checkpointer.save(1)
            saved = census(one)
        twin = built(2)
        with MemoryCheckpointer(prepared(twin), f"{folder}/{number}", async_save=False) as checkpointer:
            before = census(twin)
            try:
                assert checkpointer.load() == 1, name
            except CheckpointError as error:
                found[name] = {"refused": str(error)}, differences(before, census(twin))
            else:
                found[name] = apart(saved, before), apart(saved, census(twin))
    return found


@pytest.fixture(scope="module")
def with_accelerate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, str], dict[str, str]]]:
    found: list[dict[str, tuple[dict[str, str], dict[str, str]]]] = values(
        run_ranks(by_accelerate, str(tmp_path_factory.mktemp("memory")))
    )
    return found[0]


@pytest.mark.long
@pytest.mark.parametrize("change", cases())
def test_an_accelerator_that_is_started_again_has_what_was_saved(
    change: str, with_accelerate: dict[str, tuple[dict[str, str], dict[str, str]]]
) -> None:
    before, after = with_accelerate[change]
    assert before
    assert after == {}


@pytest.mark.long
def test_an_accelerator_without_the_parameters_of_a_group_is_refused_by_name_and_stays_as_it_is(
    with_accelerate: dict[str, tuple[dict[str, str], dict[str, str]]],
) -> None:
    refused, changed = with_accelerate["a group of parameters"]
    assert "of group 1 that is not the model's is in the saved groups of the Adam" in refused["refused"]
    assert "Nothing was loaded" in refused["refused"]
    assert changed == {}


#: What is put back, and a change that only this brings.
PARTS: dict[str, tuple[Any, str, str]] = {
    "flags": (training_objects, "put_flags_beside", "freeze"),
    "buffers": (training_objects, "put_buffers_beside", "buffer that is not persistent"),
    "module": (training_objects, "load_into", "weights in place"),
    "optimizer": (optimizer_trees, "load_named_state", "state of the optimizer"),
    "random numbers": (random_numbers, "restore", "random numbers of torch"),
}


@pytest.mark.parametrize("part", PARTS)
def test_without_any_one_part_the_census_would_tell(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, change = PARTS[part]
    monkeypatch.setattr(module, name, lambda *_, **__: [])
    saved, _, after = restarted(KEPT[change], tmp_path)
    assert apart(saved, after)
