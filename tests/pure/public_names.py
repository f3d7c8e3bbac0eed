"""The public names of the package as text, read from its source: annotations and defaults as they are written.

Nothing is imported, so the text is the same with every Python and every torch, and adapters count whose frameworks are
not installed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: Where users import from, front doors first: a name is described at the first of them that has it.
PUBLIC_MODULES = (
    "torchelastic",
    "torchelastic.p2p",
    "torchelastic.rendezvous",
    "torchelastic.data",
    "torchelastic.sharded",
    "torchelastic.distributed",
    "torchelastic.checkpoint",
    "torchelastic.checkpoint.api",
    "torchelastic.checkpoint.policy",
    "torchelastic.checkpoint.store",
    "torchelastic.checkpoint.memory",
    "torchelastic.checkpoint.replication",
    "torchelastic.checkpoint.local",
    "torchelastic.checkpoint.async_ckpt",
    "torchelastic.checkpoint.shards",
    "torchelastic.adapters.lightning",
    "torchelastic.adapters.transformers",
    "torchelastic.adapters.elastic_trainer",
    "torchelastic.adapters.elastic_accelerator",
    "torchelastic.adapters.accelerate",
    "torchelastic.adapters.megatron",
    "torchelastic.adapters.nemo",
    "torchelastic.lifetime",
    "torchelastic.lifetime.sources",
    "torchelastic.metrics",
    "torchelastic.observe.ledger",
    "torchelastic.observe.status",
    "torchelastic.testing",
)

#: Signatures that are longer have a line for each argument.
_LONGEST = 110

#: Decorators that change how a name is used.
_TOLD = ("dataclass", "property", "cached_property", "classmethod", "staticmethod", "abstractmethod", "contextmanager",
         "overload", "runtime_checkable")  # fmt: skip

#: Names with two underscores that nobody relies on.
_NOT_CALLED = ("__hash__", "__post_init__", "__repr__", "__slots__")

_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.AnnAssign | ast.Assign
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Found:
    """A definition, and the module that holds it."""

    module: str
    name: str
    node: _Definition


def path_of(module: str) -> Path:
    """The file of a module of the package."""
    folder = ROOT.joinpath(*module.split("."))
    package = folder / "__init__.py"
    return package if package.exists() else folder.with_suffix(".py")


@cache
def tree_of(module: str) -> ast.Module:
    """A module's source, parsed."""
    return ast.parse(path_of(module).read_text(encoding="utf-8"))


def exported(module: str) -> tuple[str, ...]:
    """The public names of a module: its `__all__`, or what it imports `as` itself (the rule of `lazily`)."""
    names: list[str] = []
    for node in tree_of(module).body:
        if isinstance(node, ast.AugAssign) or (
            isinstance(node, ast.Assign) and "__all__" in map(ast.unparse, node.targets)
        ):
            names += ast.literal_eval(node.value)
    if not names:
        imports = (node for node in statements(tree_of(module).body) if isinstance(node, ast.ImportFrom))
        names = [alias.name for node in imports for alias in node.names if alias.asname == alias.name]
    if not names:
        raise LookupError(f"{module} has no __all__")
    return tuple(names)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module or class, also those under `if` and `try`."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from statements(node.body)
            yield from statements(node.orelse)
        elif isinstance(node, ast.Try):
            yield from statements(node.body)


def find(module: str, name: str) -> Found | None:
    """Where a name that a module has is defined; None: outside of the package."""
    fallback = None
    for node in statements(tree_of(module).body):
        if isinstance(node, (ast.ClassDef, *_FUNCTIONS)) and node.name == name:
            return Found(module, name, node)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            return Found(module, name, node)
        if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
            fallback = Found(module, name, node)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torchelastic"):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return find(node.module, alias.name)
    return fallback


def public_names() -> dict[str, Found | None]:
    """Every public name in full (`torchelastic.data.BatchShare`), and its definition."""
    return {f"{module}.{name}": find(module, name) for module in PUBLIC_MODULES for name in exported(module)}


@cache
def front_doors() -> dict[str, str]:
    """Every public name, and under which it is described: its own, or a shorter one of the same thing."""
    first: dict[tuple[str, str], str] = {}
    doors = {}
    for full, found in public_names().items():
        key = (full, "") if found is None else (found.module, found.name)
        doors[full] = first.setdefault(key, full)
    return doors


def described() -> Iterator[str]:
    """The lines of the list about modules and their names."""
    doors, definitions = front_doors(), public_names()
    for module in PUBLIC_MODULES:
        yield f"module {module}"
        for name in sorted(exported(module), key=str.lower):
            full = f"{module}.{name}"
            found = definitions[full]
            if found is None:
                yield f"  {name}: defined outside of torchelastic"
            elif doors[full] != full:
                yield f"  {name} = {doors[full]}"
            else:
                yield from (f"  {line}" for line in definition(found, name))
        yield ""


def definition(found: Found, name: str) -> Iterator[str]:
    """The lines about one name."""
    node = found.node
    if isinstance(node, ast.ClassDef):
        yield from _decorators(node)
        bases = [ast.unparse(one) for one in (*node.bases, *node.keywords)]
        yield f"class {name}({', '.join(bases)})" if bases else f"class {name}"
        members = _members(found)
        for member in sorted(members, key=lambda one: _place(one, members[one])):
            yield from (f"  {line}" for line in members[member])
    elif isinstance(node, _FUNCTIONS):
        yield from _function(node, name)
    else:
        yield _constant(node, name)


def _place(name: str, lines: list[str]) -> tuple[int, str, str]:
    """Where a member stands in the list of its class: fields and values first, as they were written, for that is how
    they may be given; then the constructor, then everything else by its name.
    """
    if lines[0].startswith((name + ":", name + " =")):
        return 0, "", ""
    return 1 if name == "__init__" else 2, name.lower(), name


def _members(found: Found) -> dict[str, list[str]]:
    """The public members of a class, those of its bases inside the package too: where a member is written is ours."""
    node = found.node
    members: dict[str, list[str]] = {}
    if not isinstance(node, ast.ClassDef):
        return members
    for base in reversed(node.bases):
        known = find(found.module, ast.unparse(base).partition("[")[0])
        if known is not None:
            members |= _members(known)
    own: dict[str, list[str]] = {}
    for statement in statements(node.body):
        if isinstance(statement, _FUNCTIONS):
            if _is_public(statement.name) and not _is_setter(statement):
                own.setdefault(statement.name, []).extend(_function(statement, statement.name))
            elif _is_setter(statement) and _is_public(statement.name):
                own[statement.name].append(f"{statement.name}: may be set")
            if statement.name == "__init__":
                members |= _attributes(statement)
        elif isinstance(statement, (ast.AnnAssign, ast.Assign)):
            target = ast.unparse(statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0])
            if _is_public(target):
                own[target] = [_constant(statement, target)]
    return members | own


def _attributes(constructor: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, list[str]]:
    """What a constructor sets on `self`; the annotation if there is one, the value is no promise."""
    found = {}
    for node in ast.walk(constructor):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        flat = [one for target in targets for one in (target.elts if isinstance(target, ast.Tuple) else [target])]
        for target in flat:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self" and _is_public(target.attr):
                annotation = f": {ast.unparse(node.annotation)}" if isinstance(node, ast.AnnAssign) else ""
                found[target.attr] = [f"self.{target.attr}{annotation}"]
    return found


def _is_public(name: str) -> bool:
    return not name.startswith("_") or (name.endswith("__") and name not in _NOT_CALLED)


def _is_setter(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(one).endswith(".setter") for one in node.decorator_list)


def _decorators(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for one in node.decorator_list:
        text = ast.unparse(one)
        if text.partition("(")[0].rpartition(".")[2] in _TOLD:
            yield f"@{text}"


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Iterator[str]:
    yield from _decorators(node)
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    line = f"{keyword} {name}({_plain(node.args)}){returns}"
    if len(line) <= _LONGEST:
        yield line
    else:
        yield f"{keyword} {name}("
        yield from (f"    {argument}," for argument in _arguments(node.args))
        yield f"){returns}"


def _arguments(args: ast.arguments) -> Iterator[str]:
    """Each argument of a signature as text, with `/` and `*` where they stand."""
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    for at, (one, default) in enumerate(zip(positional, defaults, strict=True)):
        yield _argument(one, default)
        if args.posonlyargs and at + 1 == len(args.posonlyargs):
            yield "/"
    if args.vararg is not None:
        yield f"*{_plain(args.vararg)}"
    elif args.kwonlyargs:
        yield "*"
    for one, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield _argument(one, default)
    if args.kwarg is not None:
        yield f"**{_plain(args.kwarg)}"


def _argument(one: ast.arg, default: ast.expr | None) -> str:
    return _plain(one) if default is None else f"{_plain(one)}={_plain(default)}"


def _constant(node: _Definition, name: str) -> str:
    annotation = f": {_plain(node.annotation)}" if isinstance(node, ast.AnnAssign) else ""
    value: ast.expr | None = getattr(node, "value", None)
    return f"{name}{annotation}" if value is None or name == "__version__" else f"{name}{annotation} = {_plain(value)}"


def _plain(node: ast.AST) -> str:
    """Source text; Python 3.10 writes `lambda :`."""
    return ast.unparse(node).replace("lambda :", "lambda:")
