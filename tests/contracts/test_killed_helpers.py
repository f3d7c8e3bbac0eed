"""Contract: a helper process that dies costs the save that it was at, and no later one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.contracts import memory_ranks
from tests.older_torch import needs_helper_process
from tests.process.forked_ranks import run_ranks, values


def ended_saves(tmp_path: Path, ranks: int, *, during: bool) -> list[list[str]]:
    """How the three saves of each rank ended; the last rank's helper was killed."""
    work = partial(memory_ranks.save_with_helpers, during=during)
    environment = [{"MASTER_ADDR": "127.0.0.1"}] * ranks
    return values(run_ranks(work, tmp_path, ranks - 1, ranks=ranks, environments=environment))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
@needs_helper_process
def test_saves_go_on_after_the_helper_process_of_a_rank_was_killed(tmp_path: Path, ranks: int) -> None:
    assert ended_saves(tmp_path, ranks, during=False) == [["saved"] * 3] * ranks
    assert values(run_ranks(memory_ranks.recover, tmp_path, ranks=ranks)) == [(3, True)] * ranks


@pytest.mark.long
@needs_helper_process
def test_a_helper_that_is_killed_in_a_save_costs_that_save_alone(tmp_path: Path) -> None:
    for first, second, third in ended_saves(tmp_path, 2, during=True):
        assert (first, third) == ("saved", "saved"), second
    assert values(run_ranks(memory_ranks.recover, tmp_path, ranks=2)) == [(3, True)] * 2
