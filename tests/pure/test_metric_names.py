"""docs/observing.md against the code."""

from __future__ import annotations

import re
from pathlib import Path

from torchelastic.observe.ledger.ledger_events import Counted, LedgerEvent

ROOT = Path(__file__).parents[2]
_PUBLISHED = re.compile(r"_?publish(?:_metric)?\(\s*(?:\"torchelastic\"|_GROUP),\s*f?\"([a-z_.{}]+)\"", re.DOTALL)


def names_in_the_code() -> set[str]:
    found = set()
    for path in (ROOT / "torchelastic").rglob("*.py"):
        found |= set(_PUBLISHED.findall(path.read_text(encoding="utf-8")))
    return found


def is_told(name: str, page: str) -> bool:
    """In full, or as `.last.parts` behind a name with the same beginning."""
    fixed = name.split("{")[0].rstrip(".")
    parts = fixed.split(".")
    return fixed in page or any("`." + ".".join(parts[at:]) in page for at in range(1, len(parts)))


def test_every_metric_stands_on_the_page_on_observing() -> None:
    page = (ROOT / "docs" / "observing.md").read_text(encoding="utf-8")
    names = names_in_the_code()
    assert len(names) > 10
    assert [name for name in sorted(names) if not is_told(name, page)] == []


def test_every_kind_of_event_of_the_json_log_is_on_the_page() -> None:
    page = (ROOT / "docs" / "observing.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith("| `start`, ")]
    kinds = {event.kind for event in LedgerEvent.__subclasses__() if event is not Counted}
    assert set(re.findall(r"`(\w+)`", row.split(" | ")[0])) == kinds
