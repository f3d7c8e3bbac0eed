"""What the page of symptoms quotes is what the programs say, and its shape is one that a person at night can use."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"

#: What others say: etcd, gloo, torch, the kernel, a shell. Looked up in their sources, or seen.
OF_OTHERS = {
    "torchelastic: command not found",
    "Address already in use",
    "gloo connect timed out",
    "Gloo connectFullMesh failed",
    "Connection refused",
    "mvcc: database space exceeded",
    "etcdserver: request timed out",
    "bus error",
    "unable to write to file </torch_..>",
    "received 0 items of ancdata",
    "Too many open files",
    "CUDA out of memory",
    "Expected more than 1 value per channel",
}
#: Words that are no message: files, names of ours in a symptom.
_NO_MESSAGE = re.compile(r"[\w/_-]*|killed by SIG\w+|--[\w-]+|\w+_timeout")


@cache
def said_by_the_package() -> str:
    """All texts in the package's code, those of one message joined as Python does."""
    texts = []
    for path in sorted((ROOT / "torchelastic").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                texts.append("".join(map(str, parts)))
    return "\n".join(texts)


def rows() -> list[list[str]]:
    """The cells of every row about a symptom."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 3 and not cells[0].startswith(("---", "what you see")):
            found.append(cells)
    return found


QUOTES = sorted({quote for cells in rows() for quote in re.findall(r"`([^`]+)`", cells[0])})


@pytest.mark.parametrize("quote", [one for one in QUOTES if not _NO_MESSAGE.fullmatch(one) and one not in OF_OTHERS])
def test_a_message_on_the_page_is_one_of_the_package(quote: str) -> None:
    for part in re.split(r"\.\.", quote):
        for phrase in re.split(r"%\w|\0", part):
            assert phrase.strip() in said_by_the_package(), f"nothing in torchelastic says {phrase.strip()!r}"


def test_every_symptom_has_a_meaning_and_a_remedy() -> None:
    assert len(rows()) > 40
    assert [cells[0] for cells in rows() if min(map(len, cells)) < 3] == []


def test_no_symptom_stands_there_twice() -> None:
    symptoms = [cells[0] for cells in rows()]
    assert len(symptoms) == len(set(symptoms))
