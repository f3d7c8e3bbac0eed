"""The pages for those who move over: each name of ours in their tables is there."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[2] / "docs" / "migrating").glob("*.md"))
#: torchelastic 0.1 had the same name as we: its page speaks of its modules too.
OF_THE_SAME_NAME = {"torchelastic-0.1"}
#: Needs a package that the tests do not have.
NEEDS_NEMO = "torchelastic.adapters.nemo"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem not in OF_THE_SAME_NAME], ids=lambda page: page.stem
)
def test_each_name_in_a_table_is_there(page: Path) -> None:
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    names = {name for row in rows for name in re.findall(r"`(torchelastic(?:\.\w+)+)", row)}
    for name in names:
        if not name.startswith(NEEDS_NEMO):
            pkgutil.resolve_name(name)  # raises ImportError or AttributeError, which name it
    assert names or page.stem not in ("nvrx", "ml-flashpoint"), "these pages have such tables"
