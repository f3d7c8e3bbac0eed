"""Puts the differences between the scripts into the pages: `python -m examples.migrating.diffs`.

Each page of `PAGES` has one block of a diff, between `before.py` and `after.py` of its folder here. The pages of the
other folders link to the two scripts, which have few lines in common.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

SCRIPTS = Path(__file__).parent
DOCS = SCRIPTS.parents[1] / "docs" / "migrating"

#: Folder here: page.
PAGES = {
    "ddp": "ddp.md",
    "torchelastic_0_1": "torchelastic-0.1.md",
}

_BLOCK = re.compile(r"^```diff\n.*?^```\n", flags=re.MULTILINE | re.DOTALL)


def unified_diff(system: str) -> str:
    """The difference between a folder's two scripts, as `diff -u` has it."""
    before, after = (SCRIPTS / system / f"{name}.py" for name in ("before", "after"))
    lines = difflib.unified_diff(
        before.read_text().splitlines(),
        after.read_text().splitlines(),
        f"{system}/{before.name}",
        f"{system}/{after.name}",
        lineterm="",
    )
    return "\n".join(line.rstrip() for line in lines) + "\n"


def with_diff(page: str, diff: str) -> str:
    """A page with its one block of a diff replaced. Raises ValueError if it has none, or several."""
    blocks = _BLOCK.findall(page)
    if len(blocks) != 1:
        raise ValueError(f"the page has {len(blocks)} blocks of a diff: write one, which may be empty")
    return page.replace(blocks[0], f"```diff\n{diff}```\n")


def main() -> None:
    """Rewrite the pages that differ, and name them."""
    for system, name in PAGES.items():
        page = DOCS / name
        old = page.read_text()
        new = with_diff(old, unified_diff(system))
        if new != old:
            page.write_text(new)
            print(page)


if __name__ == "__main__":
    main()
