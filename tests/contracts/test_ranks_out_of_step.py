"""Contract: a rank that does not come, calls something else or cannot save is named on all ranks, and in time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

import pytest
import torch.distributed as dist

from tests.contracts.facades import outcome
from tests.contracts.group_facades import GROUPS, resume
from tests.contracts.local_ranks import rank
from tests.process.forked_ranks import run_ranks, values

RANKS, WRONG = 3, 1
TIMEOUT_S, BOUND_S = 2.0, 20.0
#: DCP has ranks meet by itself, and waits as long as its process group does.
OWN_MEETINGS = [name for name in GROUPS if name != "memory"]

What = Literal["does not come", "calls something else", "cannot save"]


class Custom:
    """No plain value."""


def out_of_step(name: str, what: What, root: Path) -> dict[str, Any]:
    """How the second save ends on a rank, and how long it took."""
    facade, is_wrong = GROUPS[name], rank() == WRONG
    facade.timeout_s = TIMEOUT_S
    facade.save(root, 1)
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    began_s = time.monotonic()
    if what == "does not come" and is_wrong:
        store.wait([f"rank {other} has given up" for other in range(RANKS) if other != WRONG])
        return {"error": None, "took_s": 0.0}
    if what == "calls something else" and is_wrong:
        ended = outcome(lambda: facade.resume(root, RANKS))
    else:
        value = Custom() if what == "cannot save" and is_wrong else None
        ended = outcome(lambda: facade.save(root, 2, value))
    store.set(f"rank {rank()} has given up", "1")
    return {"error": ended.get("error"), "took_s": time.monotonic() - began_s, "ended": ended}


@pytest.mark.parametrize(
    ("what", "said"),
    [("does not come", f"rank {WRONG} did not come"), ("calls something else", f"rank {WRONG} calls ")],
)
@pytest.mark.parametrize("name", OWN_MEETINGS)
def test_a_rank_that_does_something_else_is_named_in_time(name: str, what: What, said: str, tmp_path: Path) -> None:
    told = values(run_ranks(out_of_step, name, what, tmp_path, ranks=RANKS))
    for number, one in enumerate(told):
        if what == "does not come" and number == WRONG:
            continue
        assert one["error"] is not None, told
        assert said in one["error"], one
        assert one["took_s"] < BOUND_S


@pytest.mark.parametrize("name", GROUPS)
def test_a_rank_that_cannot_save_is_named_on_all_and_the_checkpoint_before_stays(name: str, tmp_path: Path) -> None:
    told = values(run_ranks(out_of_step, name, "cannot save", tmp_path, ranks=RANKS))
    for one in told:
        assert one["error"] is not None, told
        assert "custom" in one["error"].lower(), one
        assert one["took_s"] < BOUND_S
    for number, one in enumerate(told):
        assert number == WRONG or f"rank {WRONG}" in one["error"], one
    found = values(run_ranks(resume, name, tmp_path, RANKS, ranks=RANKS))
    assert [one.get("value") for one in found] == [1] * RANKS, found
