"""The README of a folder of the package names files that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "torchelastic"
READMES = sorted(PACKAGE.rglob("README.md"))


@pytest.mark.parametrize("readme", READMES, ids=lambda readme: str(readme.parent.relative_to(PACKAGE)))
def test_each_file_that_a_readme_names_is_there(readme: Path) -> None:
    names = set(re.findall(r"`([\w/]+\.py)`", readme.read_text()))
    around = [readme.parent, *(folder for folder in readme.parents if folder.is_relative_to(PACKAGE))]
    missing = [name for name in names if not any((folder / name).is_file() for folder in around)]
    assert missing == []
