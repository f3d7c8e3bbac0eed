"""Names that are loaded on first use: one list of them, in the package's source, and an import that costs nothing."""

from __future__ import annotations

import importlib
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pure.public_names import ROOT

LAZY = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "torchelastic").rglob("*.py")
    if "\n__getattr__, __dir__ = lazily(__name__)\n" in path.read_text(encoding="utf-8")
)

SOURCE = """
from __future__ import annotations
from typing import TYPE_CHECKING
from torchelastic.lazy_names import lazily
from os.path import sep as sep
if TYPE_CHECKING:
    from fractions import Fraction as Fraction
    from {name}.inner import thing as thing
    from decimal import Decimal  # for annotations only
__getattr__, __dir__ = lazily(__name__)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A package with lazy names that can be imported, each test's under a name of its own."""
    name = f"lazy_{request.node.name}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text(SOURCE.format(name=name))
    (folder / "inner.py").write_text("thing = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_there_are_packages_with_lazy_names() -> None:
    assert {"torchelastic", "torchelastic.checkpoint", "torchelastic.checkpoint.api", "torchelastic.data"} <= set(LAZY)


@pytest.mark.parametrize("name", LAZY)
def test_each_name_of_a_package_is_there_and_it_is_in_its_dir(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__all__
    assert set(module.__all__) <= set(dir(module))
    assert [one for one in module.__all__ if not hasattr(module, one)] == []


def test_the_imports_for_type_checkers_are_the_list(package: Path) -> None:
    module = importlib.import_module(package.name)
    assert module.__all__ == ["Fraction", "sep", "thing"]
    assert {"Fraction", "sep", "thing", "__all__"} <= set(dir(module))
    assert module.thing == 7
    with pytest.raises(AttributeError, match=f"module '{package.name}' has no attribute 'Decimal'"):
        _ = module.Decimal
    starred: dict[str, object] = {}
    exec(f"from {package.name} import *", starred)
    assert set(starred) - {"__builtins__"} == {"Fraction", "sep", "thing"}


def test_the_import_of_a_package_parses_nothing() -> None:
    code = "import sys, torchelastic.checkpoint; print('ast' in sys.modules); torchelastic.checkpoint.CheckpointError"
    code += "; print('ast' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "True"]


def test_bytecode_alone_is_told_apart_from_a_name_that_is_not_there(package: Path) -> None:
    source = package / "__init__.py"
    py_compile.compile(str(source), cfile=str(source.with_suffix(".pyc")))
    source.unlink()
    module = importlib.import_module(package.name)
    with pytest.raises(ImportError, match=r"which is missing: install torchelastic with its \.py files"):
        _ = module.Fraction
