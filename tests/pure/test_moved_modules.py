"""Old paths of modules: each gives the module at the new one, without a warning; documented ones stay for good."""

from __future__ import annotations

import ast
import importlib
import pickle
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from torchelastic.checkpoint.format.described_objects import described, rebuilt
from torchelastic.checkpoint.local import BasicTensorAwareStateDict, CkptID
from torchelastic.moved_modules import FRONT_DOORS, IN_FILES, MOVED, new_path, path_from_files, path_in_files

ROOT = Path(__file__).parents[2]
_IMPORT = re.compile(
    r"^\s*[>+]?\s*(from torchelastic[\w.]* import (?:\([^)]*\)|[^\n(]+)|import torchelastic[\w.]*)", re.M
)

IMPORTED_ONCE = """
import importlib, warnings
warnings.simplefilter("error")
import torchelastic
for old, new in {pairs!r}:
    assert importlib.import_module(old) is importlib.import_module(new), old
    assert importlib.import_module(old).__name__ == new, old
    assert importlib.import_module(old).__spec__.name == new, old
    parent, _, name = old.rpartition(".")
    assert getattr(importlib.import_module(parent), name) is importlib.import_module(new), old
"""


@pytest.mark.parametrize("order", [1, pytest.param(-1, marks=pytest.mark.long)], ids=["in order", "the last one first"])
def test_an_old_path_gives_the_one_module_at_the_new_path(order: int) -> None:
    """What needs a framework, or generated code of etcd's, is only looked for."""
    pairs = []
    for old in sorted(MOVED):
        new = new_path(f"torchelastic.{old}")
        if old in FRONT_DOORS:
            assert new is None
        else:
            assert new is not None
            assert find_spec(new) is not None, new
            pairs.append((f"torchelastic.{old}", new))
    assert len(pairs) > 70
    pairs += [("torchelastic.checkpoint.memory.buffer_io", "torchelastic.checkpoint.compat.flashpoint.buffer_io")]
    pairs += [("torchelastic.ledger.meter", "torchelastic.observe.ledger.meter")]
    program = IMPORTED_ONCE.format(pairs=pairs[::order])
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)


WATCHED = """
import importlib, sys, types
import torchelastic.observe.ledger as moved

written = []
class Watched(types.ModuleType):
    def __setattr__(self, name, value):
        written.append(name)
        super().__setattr__(name, value)

moved.__class__ = Watched
assert importlib.import_module("torchelastic.ledger") is moved
assert importlib.import_module("torchelastic.ledger.events") is moved.ledger_events
assert "events" in written
assert not [name for name in written if name.startswith("__")], written
"""


def test_an_import_by_an_old_path_writes_nothing_into_the_module_that_another_thread_may_see() -> None:
    """Nothing but the module below it: the lazy names of a package, say, are read through its `__spec__`."""
    subprocess.run([sys.executable, "-c", WATCHED], check=True)


def test_a_front_door_is_a_package_from_its_first_moment() -> None:
    """So that another thread finds what was below it while the door itself is still being imported."""
    for door in FRONT_DOORS:
        spec = find_spec(f"torchelastic.{door}")
        assert spec is not None
        assert spec.submodule_search_locations == []
        assert importlib.import_module(f"torchelastic.{door}").__path__ == []


IN_THREADS = """
import importlib, random, sys, threading
import torchelastic
sys.setswitchinterval(1e-6)
names = [name for pair in {pairs!r} for name in pair]
found, together = [dict() for _ in range(4)], threading.Barrier(4)

def imports(mine, seed):
    order = random.Random(seed).sample(names, len(names))
    together.wait()
    for name in order:
        mine[name] = importlib.import_module(name)

threads = [threading.Thread(target=imports, args=(mine, seed)) for seed, mine in enumerate(found)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for mine in found:
    for old, new in {pairs!r}:
        assert mine[old] is mine[new] is sys.modules[new] is sys.modules[old], old
"""


def test_threads_that_import_old_and_new_paths_at_once_get_the_one_module() -> None:
    """Only what needs no torch: that cannot be imported for the first time by several threads."""
    rooms = ("ledger", "report", "status", "agent.events", "network.choice", "checkpoint.policy.failures")
    pairs = [(f"torchelastic.{old}", f"torchelastic.{MOVED[old]}") for old in MOVED if old.startswith(rooms)]
    deeper = {"memory.skipping": "flashpoint.skipping", "local.names": "nvrx.local.names"}
    pairs += [(f"torchelastic.checkpoint.{old}", f"torchelastic.checkpoint.compat.{deeper[old]}") for old in deeper]
    assert len(pairs) > 12
    subprocess.run([sys.executable, "-c", IN_THREADS.format(pairs=pairs)], check=True)


def test_a_class_pickled_under_an_old_path_is_the_one_class() -> None:
    for old, new in (("checkpoint.memory.skipping", "checkpoint.compat.flashpoint.skipping"), ("ledger.events", "")):
        module = importlib.import_module(f"torchelastic.{new or MOVED[old]}")
        classes = [name for name, found in vars(module).items() if getattr(found, "__module__", "") == module.__name__]
        assert classes
        for name in classes:
            assert pickle.loads(f"ctorchelastic.{old}\n{name}\n.".encode()) is getattr(module, name)


def test_a_checkpoint_names_a_class_that_has_moved_as_1_0_did_and_finds_it_by_either_name() -> None:
    ckpt_id = CkptID(3, 1, "session")
    stored = described(ckpt_id)
    assert stored is not None
    assert stored.about["class"] == "torchelastic.checkpoint.local.names:CkptID"
    for name in (stored.about["class"], f"{CkptID.__module__}:CkptID"):
        assert rebuilt(stored.content, {**stored.about, "class": name}) == ckpt_id
    assert BasicTensorAwareStateDict.class_name() == (
        "torchelastic.checkpoint.local.state_dict:BasicTensorAwareStateDict"
    )
    for now, old in IN_FILES.items():
        assert new_path(old) == now
        assert path_from_files(path_in_files(now)) == now


def test_a_path_that_never_was_is_not_found() -> None:
    for name in ("checkpoint.memory.never", "checkpoint.nothing", "ledger.nothing", "ledgers", "pages.server"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"torchelastic.{name}")


def documented() -> set[tuple[str, str | None]]:
    """Every import of ours in the pages, their examples and the example programs: (module, name)."""
    found: set[tuple[str, str | None]] = set()
    paths = [
        ROOT / "README.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/**/*.py"),
        *ROOT.glob("examples/**/*.md"),
    ]
    for path in paths:
        for match in _IMPORT.finditer(path.read_text()):
            if "before" in path.stem:  # another system's package of the same name
                continue
            try:
                (node,) = ast.parse(re.sub(r"^\s*[>+]", "", match[1], flags=re.M)).body
            except SyntaxError:  # prose
                continue
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {(node.module, alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {(alias.name, None) for alias in node.names}
    return found


def test_every_documented_import_works() -> None:
    imports = documented()
    assert len({module for module, _ in imports}) > 20
    optional = ("torchelastic.adapters",)  # their frameworks are not installed everywhere
    missing = []
    for module, name in sorted(imports, key=str):
        if module.startswith(optional):
            assert find_spec(module) is not None, module
            continue
        found = importlib.import_module(module)
        if name is not None and not hasattr(found, name):
            missing.append(f"{module}.{name}")
    assert not missing
