"""torch.distributed.checkpoint (DCP) in one process, and its helper process. On the training thread."""

from __future__ import annotations

import sys
from typing import Any

from torchelastic.torch_internals.canary import check_torch, found, installed_version, say_missing
from torchelastic.torch_internals.table import PLANS

check_torch()

_DCP = "torch.distributed.checkpoint"
_EXECUTOR = f"{_DCP}._async_process_executor"
_PROCESS = "_CHECKPOINT_PROCESS"


def load_all(storage_reader: Any) -> dict[str, Any]:
    """Everything that a reader of DCP's finds, without a process group.

    Raises:
        NotImplementedError: this torch cannot.
    """
    make_planner, load = (
        found(f"{_DCP}.default_planner._EmptyStateDictLoadPlanner"),
        found(f"{_DCP}.state_dict_loader._load_state_dict"),
    )
    if make_planner is None or load is None:
        raise NotImplementedError(f"torch {installed_version()} does not read such a folder in one process")
    tree: dict[str, Any] = {}
    load(tree, storage_reader=storage_reader, planner=make_planner(), no_dist=True)
    return tree


def set_in_state(state: Any, path: Any, value: Any) -> bool:
    """Put a value where a planner has it in a nested state; False: this torch leaves that to the planner."""
    put = found(f"{_DCP}._traverse.set_element")
    if put is None:
        return False
    put(state, path, value)
    return True


def helper_process() -> Any:
    """The process of `async_save` (AsyncCheckpointerType.PROCESS); None: there is none.

    torch starts it once, and keeps it also when it is dead.
    """
    executor = sys.modules.get(_EXECUTOR)
    if executor is None:
        return None
    if not hasattr(executor, _PROCESS):
        say_missing(f"{_EXECUTOR}.{_PROCESS}")
        return None
    holder = getattr(executor, _PROCESS)
    if holder is not None and not hasattr(holder, "_save_process"):
        say_missing(f"{_EXECUTOR}._AsyncCheckpointProcess._save_process")
    return getattr(holder, "_save_process", None)


def forget_plans() -> None:
    """Have torch make the plans of saves anew that `enable_plan_caching=True` keeps, by the class of the planner."""
    planner = getattr(sys.modules.get(f"{_DCP}.planner"), "SavePlanner", None)
    for name in PLANS if planner is not None else ():
        kept = getattr(planner, name, None)
        if kept is None:
            say_missing(f"{_DCP}.planner.SavePlanner.{name}")
        else:
            kept.clear()


def take_helper() -> list[Any]:
    """Have torch start another helper process for the next save; the list has the last reference to the former one.

    To let go of that ends the process, which takes up to five seconds. Empty: there is none.
    """
    executor = sys.modules.get(_EXECUTOR)
    held = [getattr(executor, _PROCESS, None)]
    if held[0] is None:
        return []
    forget_helper_process()
    return held


def forget_helper_process() -> None:
    """Have torch start another one for the next save."""
    setattr(sys.modules[_EXECUTOR], _PROCESS, None)
