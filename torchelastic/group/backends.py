"""What the backends of a process group can do, asked of the backends themselves.

A backend's class or name does not tell: from torch 2.15 on "nccl" makes another class than before, one that is no
subclass of the old one. What matters here is whether a lost peer can go unnoticed. An operation of gloo raises when its
group is given up; a kernel on a GPU ends like one that has succeeded, with anything in its tensors. So a backend is
taken if it is gloo's own, or if it can be asked whether it has failed; any other one is refused when its group is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from torchelastic.errors import UnfitError
from torchelastic.torch_internals.nccl import is_gone
from torchelastic.torch_internals.process_groups import backend_of, unwrapped

GLOO = "gloo"


@dataclass(frozen=True)
class Capabilities:
    """What one backend of a group can do.

    Attributes:
        name: as the group's configuration has it, such as "nccl".
        is_gloo: it is gloo's own: its operations raise when they are given up.
        tells_errors: it can be asked whether it has failed: `get_error`, which torch 2.6 lacks and 2.9 has.
        connects_ahead: its ranks can be connected before the first collective.
        is_abortable: it has an `abort`.
    """

    name: str
    is_gloo: bool
    reports_errors: bool
    connects_ahead: bool
    is_abortable: bool


def why_unfit(backend: Capabilities) -> str | None:
    """Why no group with this backend can be protected from a lost worker, with the remedy; None: it can. Pure."""
    if backend.is_gloo or (backend.reports_errors and backend.is_abortable):
        return None
    lack = "cannot be aborted" if backend.reports_errors else "cannot be asked whether an operation has failed"
    remedy = "use 'nccl' for tensors on GPUs, and 'gloo' for others"
    if backend.name == GLOO:
        remedy = "unset TORCH_DISTRIBUTED_USE_TORCHCOMMS, which replaces torch's own gloo"
    elif backend.name.startswith("nccl"):
        remedy = "install torch 2.9 or later (its older engine is 'nccl-legacy' since 2.14)"
    return (
        f"the backend {backend.name!r} of a process group {lack}, so after the loss of a worker wrong values could "
        f"count: {remedy}"
    )


def capabilities(name: str, backend: Any) -> Capabilities:
    """Ask one backend; see `engines`.

    Args:
        name: as the group's configuration has it.
        backend: not wrapped in torch's checks.
    """
    return Capabilities(
        name,
        isinstance(backend, dist.ProcessGroupGloo),
        _error_of(backend) is not None,
        callable(getattr(backend, "eager_connect_single_device", None)),
        callable(getattr(backend, "abort", None)),
    )


def require_fit(group: dist.ProcessGroup) -> None:
    """Raise UnfitError where a group that was just made has a backend that cannot be protected; see `why_unfit`."""
    for name, backend in backends(group):
        why = why_unfit(capabilities(name, backend))
        if why is not None:
            raise UnfitError(why)


def engines(group: dist.ProcessGroup) -> list[tuple[str, Any]]:
    """Name and backend of what a group has beside gloo."""
    return [(name, backend) for name, backend in backends(group) if not isinstance(backend, dist.ProcessGroupGloo)]


def has_failed(backend: Any) -> bool:
    """Whether a backend has found an error or a time-out by itself; such a backend gives its communicator up."""
    error = _error_of(backend)
    return (error is not None and getattr(error, "name", str(error)) != "SUCCESS") or is_gone(backend)


def device_names(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """The backend's name for each kind of device that a group serves; such as `{"cpu": "gloo", "cuda": "nccl"}`.

    Args:
        group: default: the default group.
    """
    return parsed_config(dist.get_backend_config(group))


def parsed_config(config: str) -> dict[str, str]:
    """What the configuration of a group says.

    >>> parsed_config("cpu:gloo,cuda:nccl")
    {'cpu': 'gloo', 'cuda': 'nccl'}
    """
    return dict(pair.split(":", 1) for pair in config.split(","))


def gpu_backend(group: dist.ProcessGroup | None = None) -> str | None:
    """The name of what a group has for tensors on a GPU, other than gloo: "nccl"; None: gloo sends them, or nothing."""
    return next((name for kind, name in device_names(group).items() if kind != "cpu" and name != GLOO), None)


def backends(group: dist.ProcessGroup) -> Iterator[tuple[str, Any]]:
    """Name and backend for each kind of device that a group serves, without the wrapper of TORCH_DISTRIBUTED_DEBUG."""
    seen: set[int] = set()
    for kind, name in device_names(group).items():
        backend = _backend_of(group, kind)
        if id(backend) not in seen:
            seen.add(id(backend))
            # a group that is its own backend serves all devices, whatever its configuration says
            yield (gpu_backend(group) or name) if backend is group else name, backend


def _backend_of(group: dist.ProcessGroup, kind: str) -> Any:
    backend = backend_of(group, kind)
    return group if backend is None else unwrapped(backend)  # a group that is written in Python is its own backend


def _error_of(backend: Any) -> object | None:
    """An `ErrorType` of torch's; None where the backend tells none: the method of torch's base class only raises."""
    try:
        return backend.get_error()  # type: ignore[no-any-return]
    except (AttributeError, NotImplementedError, RuntimeError):
        return None
