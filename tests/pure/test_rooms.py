"""The house: which room may import which, what is loaded when, and how large a file or function may get."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "torchelastic"
#: A program of its own beside the tests: its files are to be as small as the package's.
SIMULATION = PACKAGE.parent / "tests" / "simulation"

# outermost last: a room may import rooms of lower floors, and its own
FLOORS: dict[str, int] = {
    "text": -1,
    "version": -1,
    "errors": -1,
    "error_text": -1,
    "ended_iterators": -1,
    "file_systems": -1,
    "odd_one_out": -1,
    "torch_internals": 0,
    "processes": 0,
    "lazy_names": 0,
    "moved_modules": 0,
    "console": 0,
    "usage": 0,
    "loop_observer": 0,
    "log_lines": 0,
    "line_prefix": 0,
    "foreign_json": 0,
    "network": 0,
    "metrics": 1,
    "rendezvous": 1,
    "data": 4,
    "data.shares": 1,  # how a batch is shared out: the reduction of gradients goes by it
    "distributed": 2,
    "inventory": 1,
    "model": 3,
    "coordinator": 2,
    "join_rules": 2,
    "worker_stats": 2,
    "checkpoint.errors": 0,  # what every room may raise
    "checkpoint": 2,  # has floors of its own, below
    "group": 1,
    "observe.ledger": 3,
    "lifetime": 3,
    "repeated_failures": 3,
    "state": 3,
    "observe.status": 4,
    "model_state": 4,
    "sharded": 4,
    "step": 4,
    "loop_failures": 4,
    "train_loop": 5,
    "p2p": 4,
    "adapters": 6,
    "observe.page": 5,
    "observe.report": 5,
    "observe": 5,  # the package alone, which imports nothing
    "agent": 6,
    "doctor": 7,
    "launch": 8,
    "__main__": 9,
    "testing": 9,
    "__init__": 10,
}
#: The rooms of `checkpoint`, likewise: what a save and a restore are made of, lowest first; then what users see of it.
CHECKPOINT_FLOORS: dict[str, int] = {
    "checkpoint.errors": -1,
    "checkpoint.failures": 0,
    "checkpoint.two_states": 0,
    "checkpoint.format": 1,
    "checkpoint.policy": 1,
    "checkpoint.checkpoint_manager": 1,
    "checkpoint.store": 2,
    "checkpoint.replicas": 3,
    "checkpoint.engine": 4,
    "checkpoint.compat": 5,
    "checkpoint.loop_checkpoints": 5,
    "checkpoint.command": 6,
    "checkpoint.api": 7,  # the doors by which users come in
    "checkpoint.memory": 7,
    "checkpoint.local": 7,
    "checkpoint.async_ckpt": 7,
    "checkpoint.replication": 7,
    "checkpoint.shards": 7,
    "checkpoint": 7,
}
#: The rooms of `compat`: each system stands alone, but for the two that save 0.1's streams as 0.1 does.
COMPAT_FLOORS: dict[str, int] = {
    "checkpoint.compat.elastic01": 0,
    "checkpoint.compat.velastic": 1,
    "checkpoint.compat.flashpoint": 1,
    "checkpoint.compat.nvrx.async_ckpt": 1,
    "checkpoint.compat.nvrx.local": 2,
    "checkpoint.compat": 3,
}
NEVER_TORCH = ("agent", "launch", "network", "processes", "metrics", "observe")

#: Names that are longer than the budget, each with its reason.
LARGER: dict[str, str] = {}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """The name of a module inside the package."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def room_named(module: str, floors: Mapping[str, int] = FLOORS) -> str | None:
    """The innermost room of a module, given its name inside the package; None: it is in none of these."""
    while module and module not in floors:
        module = module.rpartition(".")[0]
    return module or None


def _is_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def _is_own_name(node: ast.AST) -> bool:
    """Whether an import makes a name one of the module's own, as `lazy_names` has it: `import name as name`."""
    return isinstance(node, ast.ImportFrom) and all(alias.asname == alias.name for alias in node.names)


@functools.cache
def imports_of(path: Path) -> frozenset[str]:
    """What a module imports, also inside functions, and what it loads on first use; but not for types only."""
    found: set[str] = set()
    nodes = list(ast.walk(ast.parse(path.read_text())))
    for_types = [node for node in nodes if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    inner = [inner for node in for_types for statement in node.body for inner in ast.walk(statement)]
    left_out = {id(node) for node in inner if not _is_own_name(node)}
    for node in nodes:
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if _is_module(name) or node.module == "torchelastic" else node.module for name in whole}
    return frozenset(found)


@pytest.mark.parametrize("floors", [FLOORS, CHECKPOINT_FLOORS, COMPAT_FLOORS], ids=["all", "checkpoint", "compat"])
def test_imports_point_inwards(floors: Mapping[str, int]) -> None:
    outwards = []
    for path in modules():
        room = room_named(name_of(path), floors)
        for name in imports_of(path):
            other = room_named(name.removeprefix("torchelastic."), floors) if name.startswith("torchelastic.") else None
            if room is not None and other is not None and other != room and floors[other] >= floors[room]:
                outwards.append(f"{path.relative_to(PACKAGE)}: {room} must not import {other}")
    assert not outwards, "\n".join(outwards)


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Not even inside of a room; what is imported within a function counts."""
    known = {f"torchelastic.{name_of(path)}": path for path in modules() if path.name != "__init__.py"}
    imported = {name: sorted(imports_of(path) & known.keys()) for name, path in known.items()}
    try:
        tuple(graphlib.TopologicalSorter(imported).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("room", NEVER_TORCH)
def test_what_runs_in_the_agent_does_not_name_torch(room: str) -> None:
    for path in modules():
        if name_of(path).split(".")[0] == room:
            assert not {name for name in imports_of(path) if name.split(".")[0] == "torch"}, path


def loaded_by(statement: str) -> set[str]:
    """Besides what Python has loaded before, which depends on how packages are installed."""
    code = f"import sys; before = set(sys.modules); {statement}; print(*(sys.modules.keys() - before))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("statement", ["import torchelastic", "import torchelastic.rendezvous"])
def test_the_package_alone_loads_nothing_heavy(statement: str) -> None:
    assert not loaded_by(statement) & {"torch", "grpc", "etcd3", "google.protobuf"}


def test_the_agent_loads_no_torch() -> None:
    loaded = loaded_by("import torchelastic.launch.main, torchelastic.agent.__main__")
    assert "torch" not in loaded


def rooms_among(loaded: set[str]) -> set[str | None]:
    return {room_named(name.removeprefix("torchelastic.")) for name in loaded if name.startswith("torchelastic.")}


def test_the_agent_of_one_process_loads_only_what_lets_that_join() -> None:
    """It was started by hand, and waits for this: the status is loaded when there is a group, the rest never."""
    loaded = loaded_by("import torchelastic.agent.__main__")
    assert not rooms_among(loaded) & {"observe.ledger", "observe.page", "observe.status", "lifetime", "metrics"}
    assert not {name for name in loaded if name.startswith("torchelastic.checkpoint")}
    of_launchers = {"launcher_agent", "supervisor", "worker", "causes", "health_check", "plain_member"}
    assert not loaded & {f"torchelastic.agent.{name}" for name in of_launchers}
    assert not loaded & {"email", "http.client", "http.server", "prometheus_client", "psutil", "urllib.request"}


@pytest.mark.parametrize("entry", ["launch.run", "agent.plain_member"])
def test_what_starts_workers_loads_no_source_of_deadlines_and_no_checkpoints(entry: str) -> None:
    loaded = loaded_by(f"import torchelastic.{entry}")
    lifetime = {name for name in loaded if name.startswith("torchelastic.lifetime.")}
    assert lifetime <= {"torchelastic.lifetime.deadline", "torchelastic.lifetime.grace"}
    assert not {name for name in loaded if name.startswith(("torchelastic.checkpoint.format", "torchelastic.data"))}


def test_the_package_alone_loads_next_to_nothing_of_pythons_own() -> None:
    assert not loaded_by("import torchelastic") & {"asyncio", "logging", "socket", "subprocess", "tempfile", "pathlib"}


HELP = """
import contextlib, io
from torchelastic.launch.main import main
for words in ([], ["run"], ["drain"], ["status"], ["top"], ["events"], ["report"], ["simulate-esi"], ["doctor"],
              ["checkpoint"], ["checkpoint", "prune"]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main([*words, "--help"])
"""


def test_the_help_loads_no_room_that_does_the_work() -> None:
    loaded = loaded_by(f"exec({HELP!r})")
    without_work = {"console", "lazy_names", "line_prefix", "log_lines", "moved_modules", "text", "usage", "version"}
    assert rooms_among(loaded) <= {"launch", "checkpoint", "checkpoint.errors", *without_work}
    assert not loaded & {"torch", "numpy", "asyncio", "aiohttp", "grpc", "jinja2", "msgspec", "psutil", "rich"}


def test_the_trainer_loads_neither_grpc_nor_protobuf_nor_what_costs_torch_a_second() -> None:
    rooms = ("p2p", "model_state", "train_loop", "checkpoint.engine.tiered_manager")
    loaded = loaded_by(f"import {', '.join(f'torchelastic.{room}' for room in rooms)}")
    assert "torch" in loaded
    assert not loaded & {"grpc", "etcd3", "google.protobuf", "torch.distributed.tensor", "torch._dynamo"}


def test_files_and_functions_keep_within_their_size() -> None:
    larger = []
    for path in [*modules(), *SIMULATION.glob("*.py")]:
        name, text = str(path.relative_to(PACKAGE.parent)), path.read_text()
        lines = len(text.splitlines())
        larger += [f"{name} has {lines} lines"] if lines > 500 and name not in LARGER else []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                docstring = ast.get_docstring(node, clean=False) or ""
                size = (node.end_lineno or 0) - node.lineno + 1 - len(docstring.splitlines())
                function = f"{name}:{node.name}"
                larger += [f"{function} has {size} lines"] if size > 45 and function not in LARGER else []
    assert not larger, "\n".join(larger)


def test_there_is_no_room_for_odds_and_ends() -> None:
    assert not list(PACKAGE.rglob("util*.py"))
    assert not [path for path in modules() if name_of(path) != "__init__" and room_named(name_of(path)) is None]
    inside = [name_of(path) for path in modules() if name_of(path).startswith("checkpoint.")]
    assert not [name for name in inside if room_named(name, CHECKPOINT_FLOORS) == "checkpoint"]
