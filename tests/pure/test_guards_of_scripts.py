"""Every script that this project shows can be imported by the processes that it starts, or starts none.

Since Python 3.14 `multiprocessing` forks no more by default: what it starts imports the script.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = [*sorted((ROOT / "examples").rglob("*.py")), *sorted((ROOT / "deploy").rglob("*.py"))]

#: What has a script start processes that import it, or may have.
STARTS = ("num_workers", "multiprocessing")
#: What a process that only imports the script must not come to.
TRAINS = ("train", "steps", "main")


def scripts() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        yield from ((f"{page.relative_to(ROOT)}, block {number}", text) for number, text in enumerate(blocks))
    yield from ((str(path.relative_to(ROOT)), path.read_text()) for path in EXAMPLES)


def starts_processes(text: str) -> bool:
    tree = ast.parse(text)
    given = {word.arg for word in ast.walk(tree) if isinstance(word, ast.keyword)}
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return bool((given | names | modules) & set(STARTS))


def trains_when_imported(text: str) -> bool:
    """Whether a line at the top of the script trains, or calls its `main`."""
    body = [statement for statement in ast.parse(text).body if not isinstance(statement, DEFINITIONS | ast.If)]
    calls = [node.func for statement in body for node in ast.walk(statement) if isinstance(node, ast.Call)]
    names = {call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls}
    return not names.isdisjoint(TRAINS)


DEFINITIONS = ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom


SCRIPTS = dict(scripts())


@pytest.mark.parametrize("where", SCRIPTS)
def test_a_script_that_starts_processes_trains_below_its_guard(where: str) -> None:
    text = SCRIPTS[where]
    may_be_imported = not trains_when_imported(text) or not (starts_processes(text) or where.startswith("examples"))
    assert may_be_imported, f'{where}: put what it runs below `if __name__ == "__main__":`'


def test_what_the_test_looks_for_is_found() -> None:
    loader = "loader = ElasticLoader(data, sampler, num_workers=2)\n"
    assert starts_processes(loader)
    assert starts_processes("import multiprocessing")
    assert trains_when_imported("torchelastic.train(coordinator, step, state)")
    assert trains_when_imported("for step in torchelastic.steps(coordinator, state):\n    pass")
    guarded = 'if __name__ == "__main__":\n    torchelastic.train(coordinator, step, state)'
    assert not trains_when_imported(guarded)
    assert not trains_when_imported("def main():\n    train(1)")
