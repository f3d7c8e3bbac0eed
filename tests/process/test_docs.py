"""Every python block of the docs runs, page by page, as a reader would type it; every link leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READ_IN_ORDER = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [*READ_IN_ORDER, *sorted(ROOT.glob("*/*/README.md"))]

#: README's script is run under the launcher, as it says.
UNDER_THE_LAUNCHER = {ROOT / "README.md"}


def blocks_in(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    return blocks_in(page.read_text())


def blocks_of_sections(page: Path) -> dict[str, list[str]]:
    """The examples of a reference page, by the section that they are in; each section is read by itself."""
    sections = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)
    return {section.partition("\n")[0]: blocks_in(section) for section in sections if blocks_in(section)}


#: tests/cluster/test_cookbook.py runs each recipe of the cookbook as a script of its own.
WITH_EXAMPLES = [page for page in READ_IN_ORDER if blocks(page) and page.name != "cookbook.md"]
SECTIONS_ALONE = ROOT / "docs" / "checkpoint-interfaces.md"
SCRIPTS = {
    **{str(page.relative_to(ROOT)): (page, blocks(page)) for page in WITH_EXAMPLES if page != SECTIONS_ALONE},
    **{
        f"{SECTIONS_ALONE.name}: {title}": (SECTIONS_ALONE, own)
        for title, own in blocks_of_sections(SECTIONS_ALONE).items()
    },
}


@pytest.mark.long
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_examples_of_a_page_run(name: str, tmp_path: Path) -> None:
    page, of_page = SCRIPTS[name]
    text = "\n".join(of_page)
    script = tmp_path / "page.py"
    script.write_text(text)
    command = [sys.executable, str(script)]
    if page in UNDER_THE_LAUNCHER:
        command[1:1] = ["-m", "torchelastic.launch", "run", "--standalone", "--nproc-per-node=2"]
    environment = {k: v for k, v in os.environ.items() if k != "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"}
    in_a_checkout = "from tests." in text  # in no installed package: such a page says where its reader has to be
    assert not in_a_checkout or "the root of" in page.read_text()
    done = subprocess.run(
        [sys.executable, "-c", text] if in_a_checkout else command,
        cwd=ROOT if in_a_checkout else tmp_path, env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


def anchors(page: Path) -> set[str]:
    """What a link may name behind "#": the page's headings as GitHub writes them, and `(name)=` marks of the site."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = [
        re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    ]
    marks = re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles} | set(marks)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Here each day and quickly; `test_docs_site` asks the built site the same."""
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
        there = page.parent / target if target else page
        assert there.exists(), f"{page.name} links to {target}"
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), f"{page.name} links to {target}#{anchor}"


def test_every_flag_of_run_is_in_the_page_on_launching() -> None:
    text = (ROOT / "docs" / "launching.md").read_text()
    command = [sys.executable, "-m", "torchelastic.launch", "run", "--help"]
    flags = set(re.findall(r"--[a-z-]+", subprocess.run(command, capture_output=True, text=True).stdout))
    assert not {flag for flag in flags - {"--help", "--verbose", "--module", "--epochs"} if flag not in text}
