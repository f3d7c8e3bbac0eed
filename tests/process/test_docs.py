"""Every python block of the docs runs, page by page, as a reader would type it; every link leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READ_IN_ORDER = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [*READ_IN_ORDER, *sorted((ROOT / "torchelastic").rglob("README.md")), *sorted(ROOT.glob("*/*/README.md"))]

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


#: Runs scripts in processes of their own, as `python SCRIPT` does; what takes seconds to import is imported once.
RUNS_SCRIPTS = """
import os, runpy, sys
import torch._dynamo
for line in sys.stdin:
    script, output = line.split()
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(1, 2)
        sys.argv = [script]
        sys.path[0] = os.path.dirname(script)
        os.chdir(sys.path[0])
        runpy.run_path(script, run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
Runs = Callable[[Path], "tuple[int, str]"]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"}


@pytest.fixture(scope="module")
def python() -> Iterator[Runs]:
    """Runs a script in its folder: the exit code, and what it has written."""
    command = [sys.executable, "-c", RUNS_SCRIPTS]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        scripts, exit_codes = parent.stdin, parent.stdout

        def run(script: Path) -> tuple[int, str]:
            assert parent.stdin is not None
            assert parent.stdout is not None
            output = script.with_name("output")
            scripts.write(f"{script} {output}\n")
            scripts.flush()
            return int(exit_codes.readline()), output.read_text()

        yield run


@pytest.mark.long
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_examples_of_a_page_run(name: str, tmp_path: Path, python: Runs) -> None:
    page, of_page = SCRIPTS[name]
    text = "\n".join(of_page)
    script = tmp_path / "page.py"
    script.write_text(text)
    in_a_checkout = "from tests." in text  # in no installed package: such a page says where its reader has to be
    assert not in_a_checkout or "the root of" in page.read_text()
    if page not in UNDER_THE_LAUNCHER and not in_a_checkout:
        code, output = python(script)
        assert code == 0, output[-5000:]
        return
    launcher = ["-m", "torchelastic.launch", "run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, "-c", text] if in_a_checkout else [sys.executable, *launcher, str(script)],
        cwd=ROOT if in_a_checkout else tmp_path, env=environment(), capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_flag_of_run_is_in_the_page_on_launching() -> None:
    text = (ROOT / "docs" / "launching.md").read_text()
    command = [sys.executable, "-m", "torchelastic.launch", "run", "--help"]
    flags = set(re.findall(r"--[a-z-]+", subprocess.run(command, capture_output=True, text=True).stdout))
    assert not {flag for flag in flags - {"--help", "--verbose", "--module", "--epochs"} if flag not in text}
