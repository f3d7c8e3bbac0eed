"""The private names of torch: in one room alone, there in the installed torch, and missed by name where one is not."""

from __future__ import annotations

import ast
import importlib
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.few_examples import some_daily
from tests.pure.torch_names import names_made_in, private_names_in
from torchelastic.torch_internals import canary
from torchelastic.torch_internals.table import NAMES, NameKind, PrivateName
from torchelastic.version import NEWEST_TESTED_TORCH, OLDEST_TORCH

PACKAGE = Path(__file__).parents[2] / "torchelastic"
ROOM = PACKAGE / "torch_internals"

#: Not torch's, and not ours: by file, or by folder, each with whose it is.
OF_OTHERS: dict[str, frozenset[str]] = {
    "usage.py": frozenset({"_ActionsContainer"}),  # argparse
    "checkpoint/command/main.py": frozenset({"_SubParsersAction"}),  # argparse
    "p2p/stacks.py": frozenset({"_current_frames"}),  # sys
    "p2p/watchdog.py": frozenset({"_exit"}),  # os
    "doctor/burn_in_party.py": frozenset({"_exit"}),  # os
    "adapters/lightning/elastic_rank_zero.py": frozenset({"_version"}),  # of Lightning's loggers
    "processes/script_import.py": frozenset({"_inheriting"}),  # multiprocessing
    "data/sources/stateful.py": frozenset({"_ex_iterable"}),  # datasets
    "checkpoint/compat/nvrx/local/strategies.py": frozenset({"_parameters"}),  # its own
    "model_state.py": frozenset({"_buffers"}),  # its own
}


def sources() -> dict[str, ast.Module]:
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if ROOM not in path.parents]
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in files}


def test_no_other_room_names_something_private_of_torch() -> None:
    trees = sources()
    own = {name for tree in trees.values() for name in names_made_in(tree)} | {"_fields", "_replace", "_asdict"}
    found = [
        f"torchelastic/{file}:{line} names {name}: call it in torchelastic/torch_internals, and list it in table.py"
        for file, tree in trees.items()
        for line, name in private_names_in(tree, own)
        if name not in OF_OTHERS.get(file, ()) and not (file.startswith("adapters/") and not is_of_torch(name))
    ]
    assert not found, "\n".join(found)


def is_of_torch(name: str) -> bool:
    """What adapters ask of other frameworks is no matter of this test."""
    return name.startswith("torch.") or name in {each.attribute for each in NAMES}


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch._C import _distributed_c10d",
        "from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner",
        "import torch\ntorch._foreach_copy_([], [])",
        "from torch.distributed import distributed_c10d as c10d\nc10d._world.pg_map",
        "from torch.distributed import distributed_c10d as c10d\nc10d._mine()",
        "def names(tensor):\n    return tensor._version",
        "def asks(group):\n    return group._never_seen_before()",
        "def asks(model):\n    return getattr(model, '_never_seen_before', None)",
        "WHERE = 'torch.distributed.checkpoint._async_process_executor'",
        "PREFIX = '_orig_mod.'",
        "import torch\ntorch.save(1, 'x', _use_new_zipfile_serialization=False)",
        "class Mine:\n    def _register_backend(self): ...",
    ],
)
def test_a_private_name_is_found_however_it_is_written(line: str) -> None:
    assert list(private_names_in(ast.parse(line), {"_mine"}))


def test_what_is_public_or_ours_is_not_found() -> None:
    text = "'''Of torch._C.'''\nimport torch\nclass A:\n    def f(self, one):\n        return self._version, one._mine"
    assert not list(private_names_in(ast.parse(text), {"_mine"}))


def test_every_name_that_the_room_has_torch_look_up_is_in_the_table() -> None:
    told = {name.attribute for name in NAMES} | {"_C"}
    for path in ROOM.glob("*.py"):
        tree = ast.parse(path.read_text())
        if path.name not in ("canary.py", "table.py", "c10d_types.py"):
            own = {*names_made_in(tree), "_inner", "_iterator"}
            assert {name for _, name in private_names_in(tree, own) if name.isidentifier()} <= told, path


def test_the_installed_torch_lacks_none() -> None:
    version = canary.installed_version()
    assert [name.path for name in canary.missing(NAMES, version, canary.is_there)] == []


def removed(name: PrivateName, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a name out of torch, as a newer release would."""
    owner: Any = canary._value_of(name.owner)
    if name.kind is NameKind.ARGUMENT:
        monkeypatch.setattr(owner, "__init__" if isinstance(owner, type) else "__call__", None)
    for holder in owner.__mro__ if isinstance(owner, type) else [owner, type(owner)]:
        if name.attribute in vars(holder):
            monkeypatch.delattr(holder, name.attribute)


@pytest.mark.parametrize(
    "path",
    [
        "torch._foreach_copy_",
        "torch._C._set_worker_pids",
        "torch.distributed.distributed_c10d._get_default_store",
        "torch.distributed.distributed_c10d._world.group_count",
        "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
        "torch.nn.parallel.DistributedDataParallel._build_params_for_reducer",
        "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers",
    ],
)
def test_a_name_that_a_torch_lacks_is_told_by_name(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = next(each for each in NAMES if each.path == path)
    removed(name, monkeypatch)
    assert [each.path for each in canary.missing(NAMES, canary.installed_version(), canary.is_there)] == [path]


def test_an_attribute_that_instances_have_under_another_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    dataloader = importlib.import_module("torch.utils.data.dataloader")
    kind = dataloader._MultiProcessingDataLoaderIter
    renamed = type("_MultiProcessingDataLoaderIter", (), {"_shutdown_workers": lambda self: self._others})
    monkeypatch.setattr(dataloader, kind.__name__, renamed)
    lacking = canary.missing(NAMES, canary.installed_version(), canary.is_there)
    assert [each.attribute for each in lacking] == ["_workers", "_workers_done_event", "_worker_pids_set", "_rcvd_idx"]


def test_a_name_is_not_missed_in_a_torch_that_does_not_have_it_yet_or_does_not_need_it_any_more() -> None:
    later = PrivateName("torch._later", "tests", "Nothing.", since="2.13")
    earlier = PrivateName("torch._earlier", "tests", "Nothing.", before="2.13")
    assert canary.missing([later, earlier], "2.9.1+cu128", lambda _: False) == [earlier]
    assert canary.missing([later, earlier], "2.13.0a0+git1234", lambda _: False) == [later]


def test_what_is_said_of_a_torch_that_this_package_cannot_work_with() -> None:
    needed = next(name for name in NAMES if name.is_needed)
    optional = next(name for name in NAMES if not name.is_needed)
    assert canary.why_unusable("2.15.0+cpu", ()) is None
    assert canary.why_unusable("99.0.0", [optional]) is None
    assert canary.why_unusable("2.5.1+cu121", ()) == (
        "torch 2.5.1+cu121 is too old for torchelastic, which needs torch 2.6 or newer: pip install 'torch>=2.6'"
    )
    assert canary.why_unusable("99.1.0", [optional, needed]) == (
        f"torch 99.1.0 is newer than this release of torchelastic knows: it has no {needed.path}, which is needed for "
        f"{needed.purpose}; pip install 'torch<={NEWEST_TESTED_TORCH}'"
    )
    assert "not as it was released" in str(canary.why_unusable(OLDEST_TORCH + ".0", [needed]))


TRAINER = "import torchelastic; torchelastic.{name}"


@pytest.mark.parametrize("name", some_daily(["CoordinatorP2P", "ModelState", "ShardedState"], "ModelState".__eq__))
@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param(
            "torch.__version__ = '2.5.1'",
            "ImportError: torch 2.5.1 is too old for torchelastic, which needs torch 2.6",
            marks=pytest.mark.long,
        ),
        (
            "torch.__version__ = '99.0.0'; del torch.distributed.distributed_c10d._world",
            "ImportError: torch 99.0.0 is newer than this release of torchelastic knows: it has no "
            "torch.distributed.distributed_c10d._world, which is needed for forming a group of processes again",
        ),
    ],
)
def test_the_trainer_half_is_not_imported_with_such_a_torch(name: str, change: str, says: str) -> None:
    code = f"import torch; {change}; {TRAINER.format(name=name)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(says), done.stderr


def test_what_is_lost_without_an_optional_name_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    canary.say_missing.cache_clear()
    monkeypatch.delattr("torch._foreach_copy_")
    with caplog.at_level(logging.WARNING, logger="torchelastic"):
        assert canary.found("torch._foreach_copy_") is None
        assert canary.found("torch._foreach_copy_") is None
    canary.say_missing.cache_clear()
    [said] = [record.getMessage() for record in caplog.records]
    assert said.endswith("has no torch._foreach_copy_. Saving a state of many small tensors takes about twice as long.")
