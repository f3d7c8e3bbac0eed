"""The pages for those who move over: each name of ours in their tables is there, and "the same" are the same names."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

PAGES = {page.stem: page for page in sorted((Path(__file__).parents[2] / "docs" / "migrating").glob("*.md"))}
#: The five systems that live on here: their pages name every public name.
WITH_EVERY_NAME = ("ml-flashpoint", "nvrx", "pyrecover", "torchelastic-0.1", "velastic")
#: Needs a package that the tests do not have.
NEEDS_NEMO = "torchelastic.adapters.nemo"


def rows(page: Path) -> list[list[str]]:
    """Of all tables: what stands in their cells."""
    return [line.strip("|").split("|") for line in page.read_text().splitlines() if line.startswith("|")]


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES.keys())
def test_each_name_of_ours_in_a_table_is_there(page: Path) -> None:
    cells = [cell for row in rows(page) for cell in row[1:]]  # the first one is of theirs
    names = {name for cell in cells for name in re.findall(r"`(torchelastic(?:\.\w+)+)", cell)}
    for name in names:
        if not name.startswith(NEEDS_NEMO):
            pkgutil.resolve_name(name)  # raises ImportError or AttributeError, which name it


@pytest.mark.parametrize("name", WITH_EVERY_NAME)
def test_the_pages_of_the_five_systems_have_a_table_of_every_name(name: str) -> None:
    assert "## Every public name" in PAGES[name].read_text()


def test_what_is_the_same_as_in_0_1_is_there_under_its_name() -> None:
    checked = 0
    for theirs, ours, *_ in rows(PAGES["torchelastic-0.1"]):
        module, colon, names = theirs.strip().removeprefix("`").partition("`: ")
        if ours.strip() == "the same" and colon:
            for name in re.findall(r"`(\w+)`", names):
                pkgutil.resolve_name(f"{module}.{name}")
                checked += 1
    assert checked > 60
