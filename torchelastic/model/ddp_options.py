"""Which of DDP's own options a script may set, and why not the others. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

#: What is passed on, with DDP's default.
PASSED: dict[str, Any] = {
    "broadcast_buffers": True,
    "bucket_cap_mb": None,
    "find_unused_parameters": False,
    "gradient_as_bucket_view": False,
    "static_graph": False,
}

_BY_STATE = "ModelState sets it for each group anew"
_OWN_REDUCTION = "such gradients are not weighted by the ranks' samples, and a failed step could not be undone"
#: What is not, each with the reason.
REFUSED = {
    "module": _BY_STATE,
    "device_ids": _BY_STATE,
    "output_device": _BY_STATE,
    "dim": _BY_STATE,
    "process_group": _BY_STATE,
    "device_mesh": _BY_STATE,
    "init_sync": "ModelState brings the ranks in sync by itself",
    "check_reduction": "DDP itself does not look at it any more",
    "delay_all_reduce_named_params": _OWN_REDUCTION,
    "param_to_hook_all_reduce": _OWN_REDUCTION,
    "mixed_precision": "it keeps copies of the weights that no snapshot knows; use torch.autocast",
    "skip_all_reduce_unused_params": "ranks that use other parameters would wait for each other",
}

#: What torch 2.13 calls one of them, and calls deprecated by its first name.
_NAME, _LATER_NAME = "broadcast_buffers", "forward_sync_buffers"


def for_ddp(options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """What is given to DDP: options that are not its defaults.

    Args:
        options: complete.
        known: the names of the arguments of the installed DDP.

    >>> changed = {**PASSED, "broadcast_buffers": False}
    >>> for_ddp(changed, ["broadcast_buffers"]), for_ddp(changed, ["broadcast_buffers", "forward_sync_buffers"])
    ({'broadcast_buffers': False}, {'forward_sync_buffers': False})
    """
    chosen = {name: value for name, value in options.items() if value != PASSED[name]}
    if _NAME in chosen and _LATER_NAME in known:
        chosen[_LATER_NAME] = chosen.pop(_NAME)
    return chosen


#: The options of a group as numbers, all zero for the defaults.
_FLAGS = ("broadcast_buffers", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")


def checked_options(
    given: Mapping[str, Any] | None, *, find_unused_parameters: bool, salvage: str, logical_shards: int | None
) -> dict[str, Any]:
    """The options for DDP, complete.

    Args:
        given: those that the script sets; None: none.
        find_unused_parameters: set by its own argument.
        salvage: as for `ModelState`.
        logical_shards: as for `ModelState`.

    Raises:
        ValueError: one that is unknown, has a value that it cannot have, or would break what `ModelState` promises.

    >>> checked_options({"static_graph": True}, find_unused_parameters=False, salvage="discard", logical_shards=None)
    ... # doctest: +NORMALIZE_WHITESPACE
    {'broadcast_buffers': True, 'bucket_cap_mb': None, 'find_unused_parameters': False,
     'gradient_as_bucket_view': False, 'static_graph': True}
    """
    given = dict(given or {})
    if _LATER_NAME in given:
        if _NAME in given:
            raise ValueError(f"ddp sets {_NAME} and {_LATER_NAME}, which are the same: give one of them")
        given[_NAME] = given.pop(_LATER_NAME)
    for name, value in given.items():
        if name in REFUSED:
            raise ValueError(f"ddp={{{name!r}: ..}}: {REFUSED[name]}; leave it out")
        if name not in PASSED:
            raise ValueError(f"ddp={{{name!r}: ..}} is no option that ModelState passes on: those are {_names(PASSED)}")
        _check_value(name, value)
    chosen = {name: value for name, value in given.items() if value != PASSED[name]}
    if logical_shards is not None and chosen.keys() - {"find_unused_parameters"}:
        raise ValueError(f"ddp sets {_names(chosen)}, and with logical_shards there is no DDP: leave one of both out")
    if salvage != "discard" and logical_shards is None:
        for name, why in _NOT_SALVAGED.items():
            if chosen.get(name):
                raise ValueError(f"salvage={salvage!r} does not go with ddp={{{name!r}: True}}: {why}")
    if find_unused_parameters and given.get("find_unused_parameters") is False:
        raise ValueError("find_unused_parameters is True, and in ddp it is False: give one of them")
    if find_unused_parameters:
        given["find_unused_parameters"] = True
    return {**PASSED, **given}


#: What does not go with gradients that outlive their step.
_NOT_SALVAGED = {
    "gradient_as_bucket_view": "a gradient that lies in DDP's bucket is lost when a worker is",
    "static_graph": "the gradients kept of a parameter would be lost where the rest of the samples does not use it",
}


def _check_value(name: str, value: Any) -> None:
    if name == "bucket_cap_mb":
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0):
            raise ValueError(f"ddp={{'bucket_cap_mb': {value!r}}}: give MiB, above 0")
    elif not isinstance(value, bool):
        raise ValueError(f"ddp={{{name!r}: {value!r}}}: give True or False")


def _names(options: Mapping[str, Any]) -> str:
    return ", ".join(sorted(options))


def as_numbers(options: Mapping[str, Any]) -> tuple[int, int]:
    """Options as numbers, which ranks compare: with others their buckets would be others, which ends processes.

    >>> as_numbers(PASSED), as_numbers({**PASSED, "static_graph": True, "bucket_cap_mb": 0.5})
    ((0, 0), (8, 512))
    """
    flags = sum((options[name] != PASSED[name]) << place for place, name in enumerate(_FLAGS))
    return flags, round((options["bucket_cap_mb"] or 0) * 1024)


def from_numbers(flags: int = 0, cap_kib: int = 0) -> dict[str, Any]:
    """Those of them that are not the defaults.

    >>> from_numbers(8, 512), from_numbers(0, 0)
    ({'static_graph': True, 'bucket_cap_mb': 0.5}, {})
    """
    chosen = {name: not PASSED[name] for place, name in enumerate(_FLAGS) if flags >> place & 1}
    return chosen | ({"bucket_cap_mb": cap_kib / 1024} if cap_kib else {})
