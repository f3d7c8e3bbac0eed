"""The docstring of a package of ours, which says what holds in it, names files that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "torchelastic"
ROOMS = sorted(path.parent for path in PACKAGE.rglob("__init__.py"))


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(PACKAGE)))
def test_a_package_says_what_it_is_and_each_file_that_it_names_is_there(room: Path) -> None:
    told = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8")))
    assert told
    names = set(re.findall(r"`([\w/]+\.py)`", told))
    assert [name for name in names if not (room / name).is_file()] == []
    pages = set(re.findall(r"\bdocs/([\w-]+\.md)", told))
    assert [page for page in pages if not (PACKAGE.parent / "docs" / page).is_file()] == []
