"""Contract: what of a local checkpoint survives the loss of hosts, a change of their number, and damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.contracts import local_ranks
from tests.process.forked_ranks import run_ranks, values


@pytest.mark.parametrize("lost", ["a", "b"])
def test_hosts_of_unequal_size_keep_copies_for_each_other(tmp_path: Path, lost: str) -> None:
    hosts = "aab"
    values(run_ranks(local_ranks.save_as_if_on, tmp_path, hosts, 7, ranks=3))
    for rank, host in enumerate(hosts):
        if host == lost:
            shutil.rmtree(tmp_path / f"host-{rank}")
    told = values(run_ranks(local_ranks.resume, tmp_path, ranks=3))
    assert [(one["found"], one["loaded"]) for one in told] == [(7, 7)] * 3


def test_what_is_found_is_what_is_loaded_also_after_damage(tmp_path: Path) -> None:
    values(run_ranks(local_ranks.save_two, tmp_path))
    (newest,) = tmp_path.glob("host-0/step-000000002*/shard-*")
    with newest.open("r+b") as file:
        file.seek(-100, 2)
        byte = file.read(1)
        file.seek(-100, 2)
        file.write(bytes([byte[0] ^ 1]))
    (told,) = values(run_ranks(local_ranks.resume, tmp_path))
    assert told["loaded"] == 1, "the damage was noticed, and the older one taken"
    assert told["found"] == told["loaded"]
