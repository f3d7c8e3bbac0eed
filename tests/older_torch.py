"""What the oldest torch that this package takes has not: marks for the tests that need it, and how they ask for it.

`make test-torch TORCH=2.6.0` skips those; `make test` runs them.
"""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any, Literal

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

_RUN_IT = "run it with a newer one: `make test`, or `make test-torch TORCH=2.9.1`"

HAS_HELPER_PROCESS = importlib.util.find_spec("torch.distributed.checkpoint._async_process_executor") is not None
NO_HELPER_PROCESS = f"DCP of torch {torch.__version__} has no AsyncCheckpointerType.PROCESS; {_RUN_IT}"

needs_fsdp2_on_cpus = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"),
    reason=f"FSDP2 of torch {torch.__version__} does not run on CPUs; {_RUN_IT}",
)

needs_helper_process = pytest.mark.skipif(not HAS_HELPER_PROCESS, reason=NO_HELPER_PROCESS)


needs_cached_plans = pytest.mark.skipif(
    "enable_plan_caching" not in inspect.signature(DefaultSavePlanner).parameters,
    reason=f"DCP of torch {torch.__version__} caches no plans; {_RUN_IT}",
)


KEEPS_THE_INTERPRETER = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7)
NO_OTHER_THREADS = f"torch {torch.__version__} keeps the interpreter while it waits here, for ever; {_RUN_IT}"

needs_released_interpreter = pytest.mark.skipif(KEEPS_THE_INTERPRETER, reason=NO_OTHER_THREADS)


def async_save_in(place: Literal["thread", "process"]) -> dict[str, Any]:
    """Where DCP's `async_save` is to save, as arguments for it; torch 2.6 has a thread, and no word for it."""
    if place == "thread" and not HAS_HELPER_PROCESS:
        return {}
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    return {"async_checkpointer_type": AsyncCheckpointerType[place.upper()]}
