"""docs/ as a site: it builds without a warning, and everything in it leads somewhere and says something."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.pure.commands_in_pages import PAGES
from tests.pure.public_names import front_doors

ROOT = Path(__file__).parents[2]
START = "docs/index.html"


def build(folder: Path) -> str:
    """Build the site as `make docs` does; returns what was complained of."""
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-c", "docs", "-j", "auto", "-W", "--keep-going", "-q"]
    environment = os.environ | {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    doctrees = ["-d", str(folder.with_name("doctrees"))]
    done = subprocess.run(
        [*command, *doctrees, ".", str(folder)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540
    )
    return "" if done.returncode == 0 else done.stderr[-6000:] or f"exit code {done.returncode}"


def ids_of(page: str) -> set[str]:
    return set(map(html.unescape, re.findall(r"""\bid="([^"]+)\"""", page)))


def without_tags(page: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())


def said_of(name: str, page: str) -> str:
    """What the reference says of a name, apart from its signature and its bases."""
    _, _, after = page.partition(f'id="{name}"')
    body = after.partition("</dt>")[2].partition("<dd>")[2]
    own = re.split(r'<dl class="py|</dd>', body, maxsplit=1)[0]
    return re.sub(r"^Bases: .*?(?=<|$)", "", without_tags(re.sub(r"<p>Bases: .*?</p>", "", own, flags=re.DOTALL)))


def dead_links(pages: dict[str, str], folder: Path) -> list[str]:
    """Links and images that lead to no file of the site, or to no place in a page."""
    ids = {name: ids_of(text) for name, text in pages.items()}
    dead = []
    for name, text in pages.items():
        for target in re.findall(r"""(?:href|src)="([^"]+)\"""", text):
            parts = urlsplit(html.unescape(target))
            if parts.scheme or parts.netloc:
                continue
            there = (folder / name).parent / unquote(parts.path) if parts.path else folder / name
            at = os.path.normpath(os.path.relpath(there, folder))
            if not there.exists() or (parts.fragment and at in ids and unquote(parts.fragment) not in ids[at]):
                dead.append(f"{name} -> {target}")
    return dead


def reachable(pages: dict[str, str]) -> set[str]:
    """The pages that one comes to from the first one."""
    seen, ahead = {START}, [START]
    while ahead:
        name = ahead.pop()
        for target in re.findall(r'href="([^"#:]+\.html)', pages[name]):
            at = os.path.normpath(Path(name).parent / target)
            if at in pages and at not in seen:
                seen.add(at)
                ahead.append(at)
    return seen


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_site_builds_without_a_warning_and_everything_in_it_leads_somewhere(tmp_path: Path) -> None:
    folder = tmp_path / "site"
    assert build(folder) == ""
    pages = {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in folder.rglob("*.html")}
    made = [name for name in pages if not name.startswith(("genindex", "py-modindex", "search"))]

    sources = {str(path.relative_to(ROOT).with_suffix(".html")) for path in (ROOT / "docs").rglob("*.md")}
    assert {name for name in sources if not name.startswith("docs/_build/")} <= set(made)
    assert set(made) - reachable(pages) == set()
    assert dead_links(pages, folder) == []

    of_reference = {name: text for name, text in pages.items() if name.startswith("docs/api/")}
    doors = set(front_doors().values())
    place = {door: text for text in of_reference.values() for door in ids_of(text) & doors}
    assert doors - set(place) == set(), "add them to a page in docs/api"
    assert [door for door in sorted(doors) if len(said_of(door, place[door])) < 8] == []

    of_this_machine = (str(ROOT), str(folder), sys.prefix, str(Path.home()) + "/")
    assert [(name, one) for name, text in pages.items() for one in of_this_machine if one in text] == []
    assert [name for name, text in pages.items() if re.search(r" at 0x[0-9a-f]{6}", text)] == []


def test_addresses_outside_are_well_formed() -> None:
    """`make docs-links` asks for them."""
    wrong = []
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/*/README.md")]:
        text = page.read_text(encoding="utf-8")
        for address in re.findall(r"\]\((\w+:[^)]*)\)", text):
            parts = urlsplit(address)
            if parts.scheme != "https" or "." not in (parts.hostname or "") or re.search(r"\s|[.,;]$", address):
                wrong.append(f"{page.relative_to(ROOT)}: {address}")
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_shell_can_read_the_shell_blocks_of_a_page(page: Path) -> None:
    """The commands in them are looked at in tests/pure/test_commands_in_pages.py."""
    for block in re.findall(r"^```(?:sh|bash)\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S):
        read = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
        assert read.returncode == 0, f"{read.stderr}\n{block}"
