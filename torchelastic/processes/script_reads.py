"""Where the user's script reads an environment variable: for what is said when that does not hold any more."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType

#: A script that is larger is no script.
_LARGEST_BYTES = 1 << 20
_MOST_FILES = 100


def reads_of(variable: str) -> list[str]:
    """The places, such as "train.py:12", in the script of this process and in what it has imported from beside it.

    Looks at what is written, and changes nothing about `os.environ`. A read in a library elsewhere is not the user's.
    """
    script = _file_of(sys.modules.get("__main__"))
    if script is None:
        return []
    found = [path for module in list(sys.modules.values()) if (path := _file_of(module)) is not None]
    own = {path for path in found if path.is_relative_to(script.parent) and "site-packages" not in path.parts}
    others = sorted(path for path in own - {script} if not _is_ours(path))[:_MOST_FILES]
    return [
        f"{path.name if path == script else path.relative_to(script.parent)}:{line}"
        for path in (script, *others)
        for line in lines_that_read(variable, _text_of(path))
    ]


def lines_that_read(variable: str, text: str) -> list[int]:
    r"""The lines of a source text that ask `os.environ` or `os.getenv` for a variable. Pure.

    >>> lines_that_read("WORLD_SIZE", "import os\nsize = int(os.environ['WORLD_SIZE'])\nname = 'WORLD_SIZE'")
    [2]
    """
    if variable not in text:
        return []
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return []
    return sorted(
        {node.lineno for node in nodes if isinstance(node, (ast.Subscript, ast.Call)) and _asks(node, variable)}
    )


def _asks(node: ast.Subscript | ast.Call, variable: str) -> bool:
    if isinstance(node, ast.Subscript):
        asked, of, names = node.slice, node.value, ["environ"]
        if not isinstance(node.ctx, ast.Load):
            return False
    else:
        asked, of, names = (node.args or [node])[0], node.func, ["getenv", "environ.get"]
    return isinstance(asked, ast.Constant) and asked.value == variable and ast.unparse(of).endswith(tuple(names))


def _file_of(module: ModuleType | None) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).absolute() if isinstance(file, str) and file.endswith(".py") else None


def _is_ours(path: Path) -> bool:
    return path.is_relative_to(Path(__file__).absolute().parents[1])


def _text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace") if path.stat().st_size <= _LARGEST_BYTES else ""
    except OSError:
        return ""
