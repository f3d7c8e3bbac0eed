"""Where does a source file name something private of torch?"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator

from torchelastic.torch_internals.table import NAMES

#: The last parts of the names in the table.
OF_TORCH = frozenset(name.attribute for name in NAMES if name.attribute.startswith("_")) - {"_C"}
#: Those of classes that this package extends: a method of that name is called by torch.
_EXTENDED = ("ProcessGroup", "Work", "DistributedDataParallel")
CALLED_BY_TORCH = frozenset(name.attribute for name in NAMES if name.owner.rpartition(".")[2] in _EXTENDED)

_PRIVATE_PATH = re.compile(r"\btorch(\.\w+)*\._(?!_)")
_ASKING = frozenset({"getattr", "hasattr", "setattr", "delattr"})


def is_private(name: str) -> bool:
    """Whether a name begins with one underscore."""
    return name.startswith("_") and not name.startswith("__")


def names_made_in(tree: ast.AST) -> Iterator[str]:
    """What a file gives names to: attributes, functions, classes, fields, variables."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def private_names_in(tree: ast.Module, own: Collection[str]) -> Iterator[tuple[int, str]]:
    """The line and the name of each private name of torch, or of nobody that this package knows.

    Args:
        tree: of one file.
        own: the names that the package gives, see `names_made_in`.
    """
    from_torch = {name for node in ast.walk(tree) for name in _bound_to_torch(node)}
    texts_for_people = {id(text) for node in ast.walk(tree) for text in _docstrings(node)}
    for node in ast.walk(tree):
        if id(node) in texts_for_people:
            continue
        for name in _named_by(node, from_torch, own):
            yield getattr(node, "lineno", 0), name


def _named_by(node: ast.AST, from_torch: Collection[str], own: Collection[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if _PRIVATE_PATH.match(alias.name))
    elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
        paths = (f"{node.module}.{alias.name}" for alias in node.names)
        yield from (path for path in paths if _PRIVATE_PATH.match(path))
    elif isinstance(node, ast.Attribute) and is_private(node.attr) and not _is_own(node.value):
        if node.attr in OF_TORCH or node.attr not in own or _root_of(node) in from_torch:
            yield node.attr
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        if node.value.strip(".") in OF_TORCH or _PRIVATE_PATH.search(node.value):
            yield node.value
    elif isinstance(node, ast.Call):
        yield from _asked_for(node, own)
        yield from (word.arg for word in node.keywords if word.arg in OF_TORCH)
    elif isinstance(node, ast.FunctionDef) and node.name in CALLED_BY_TORCH:
        yield node.name


def _asked_for(call: ast.Call, own: Collection[str]) -> Iterator[str]:
    """The name in `getattr(object, "name")`, where it is private."""
    if isinstance(call.func, ast.Name) and call.func.id in _ASKING and len(call.args) > 1:
        name = call.args[1]
        if isinstance(name, ast.Constant) and isinstance(name.value, str) and is_private(name.value):
            yield from {name.value} - {*own}


def _bound_to_torch(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == "torch":
                yield alias.asname or "torch"
    elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
        yield from (alias.asname or alias.name for alias in node.names)


def _root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_own(receiver: ast.expr) -> bool:
    """`self` and the like: what a class of this package keeps may be called as anything."""
    return isinstance(receiver, ast.Name) and receiver.id in ("self", "cls")


def _docstrings(node: ast.AST) -> Iterator[ast.Constant]:
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            yield first.value
