from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from torchelastic.inventory.held import held_by


class Dice:
    pass


class Loaded(Dice):
    pass


class Box:
    def __init__(self, **inside: Any) -> None:
        self.__dict__.update(inside)


class Closed(Box):
    pass


class Slots:
    __slots__ = ("inside",)


class OfFile(Mapping[str, Dice]):
    """Its values are read when they are asked for."""

    def __getitem__(self, key: str) -> Dice:
        raise AssertionError("this reads the file")

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("this reads the file")

    def __len__(self) -> int:
        return 1


def held(root: Any, depth: int = 6) -> list[Any]:
    return held_by(root, (Dice,), depth=depth, closed=(Closed,))


DIE = Dice()


@pytest.mark.parametrize(
    "root",
    [DIE, Box(die=DIE), [DIE], (1, DIE), {"die": DIE}, Box(box=Box(of=[{"more": (DIE,)}])), {"one": DIE, "two": [DIE]}],
    ids=["itself", "attribute", "list", "tuple", "dict", "deep", "twice"],
)
def test_what_an_object_is_or_holds_is_found_once(root: Any) -> None:
    assert held(root) == [DIE]


def test_what_inherits_is_found_too_and_circles_end() -> None:
    loaded = Loaded()
    box = Box(die=DIE, other=loaded)
    vars(box)["itself"] = box
    assert held([box, box]) == [DIE, loaded]


@pytest.mark.parametrize(
    "root",
    [[DIE] * 3000, Closed(die=DIE), types.ModuleType("holds"), Dice, OfFile(), Slots(), 5],
    ids=["data", "closed", "module", "class", "file", "slots", "number"],
)
def test_it_does_not_look_into_data_into_files_or_into_what_is_closed(root: Any) -> None:
    if isinstance(root, types.ModuleType):
        root.die = DIE  # type: ignore[attr-defined]
    assert held(root) == []


def test_it_looks_so_deep_and_no_deeper() -> None:
    assert held([[[DIE]]], depth=4) == [DIE]
    assert held([[[DIE]]], depth=3) == []
