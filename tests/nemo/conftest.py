"""NeMo's wheel installs a package of the name `tests`, which would hide the helpers that lie here."""

from __future__ import annotations

import importlib
from pathlib import Path

_package = importlib.import_module("tests")
if isinstance(_package.__path__, list):
    _package.__path__.insert(0, str(Path(__file__).parents[1]))
