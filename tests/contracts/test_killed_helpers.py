"""Contract: a helper process that dies costs the save that it was at, and no later one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contracts import memory_ranks
from tests.process.forked_ranks import run_ranks, values


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_saves_go_on_after_the_helper_process_of_a_rank_was_killed(tmp_path: Path, ranks: int) -> None:
    preload = ("tests.contracts.memory_ranks",)
    environment = [{"MASTER_ADDR": "127.0.0.1"}] * ranks
    ended = values(
        run_ranks(
            memory_ranks.save_with_helpers, tmp_path, ranks - 1, ranks=ranks, environments=environment, preload=preload
        )
    )
    assert ended == [["saved"] * 3] * ranks
    assert values(run_ranks(memory_ranks.recover, tmp_path, ranks=ranks, preload=preload)) == [(3, True)] * ranks
