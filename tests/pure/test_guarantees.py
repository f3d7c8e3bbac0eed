"""What README and docs/guarantees.md promise names tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("page", "promises"), [("README.md", 10), ("docs/guarantees.md", 44)])
def test_each_promise_names_tests_that_are_there(page: str, promises: int) -> None:
    rows = [line.strip("| ").split(" | ") for line in (ROOT / page).read_text().splitlines() if "| `" in line]
    rows = [row for row in rows if "test" in row[-1] or "make " in row[-1]]
    assert len(rows) == promises
    for row in rows:
        folder = Path()
        for name in re.findall(r"`([^`]+)`", row[-1]):
            if name.startswith("make "):
                continue
            path = Path(name) if name.startswith("tests/") else folder / name  # the folder of the one before it
            folder = path.parent
            assert sorted(ROOT.glob(str(path))), f"{row[0]}: {name} is not there"


def test_what_the_readme_promises_is_on_the_page() -> None:
    page = (ROOT / "docs" / "guarantees.md").read_text()
    short = [line for line in (ROOT / "README.md").read_text().splitlines() if "| `tests/" in line]
    tests = [re.findall(r"`[^`]+`", line.rsplit(" | ", 1)[1]) for line in short]
    assert all(name in page for names in tests for name in names)
