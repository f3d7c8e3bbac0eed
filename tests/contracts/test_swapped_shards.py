"""Contract: a shard under the name of another one is damage, like a changed byte; never another rank's state."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.contracts import memory_ranks
from tests.contracts.memory_ranks import shards_of
from tests.process.forked_ranks import run_ranks, values

OLDER, NEWER = 5, 9


@pytest.mark.parametrize(("hosts", "found"), [((0,), NEWER), ((0, 1), OLDER)], ids=["one host", "all hosts"])
def test_two_shards_that_have_changed_their_names_are_replaced_or_all_ranks_step_down(
    tmp_path: Path, hosts: tuple[int, ...], found: int
) -> None:
    values(run_ranks(memory_ranks.save, tmp_path, OLDER, ranks=2))
    older = {host: shards_of(tmp_path, host, OLDER)[0].parent for host in (0, 1)}
    for host, folder in older.items():
        shutil.copytree(folder, tmp_path / f"older-{host}")
    values(run_ranks(memory_ranks.save, tmp_path, NEWER, ranks=2))
    for host, folder in older.items():
        if not folder.exists():
            shutil.copytree(tmp_path / f"older-{host}", folder)
    for host in hosts:
        first, second, _ = shards_of(tmp_path, host, NEWER)
        first.rename(tmp_path / "aside")
        second.rename(first)
        (tmp_path / "aside").rename(second)
    assert values(run_ranks(memory_ranks.recover, tmp_path, ranks=2)) == [(found, True)] * 2
