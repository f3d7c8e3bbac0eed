"""Contract: checkpoints in the memory of hosts are copied to durable storage, and read there after the hosts' loss."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest

from tests.contracts import durable_ranks
from tests.older_torch import HAS_HELPER_PROCESS, NO_HELPER_PROCESS
from tests.process.forked_ranks import run_ranks, values
from torchelastic.checkpoint.engine.durable_copies import ANSWER_S

pytestmark = pytest.mark.parametrize("kind", sorted(durable_ranks.KINDS))


def _lose(root: Path, *hosts: int) -> None:
    for host in hosts:
        shutil.rmtree(root / f"host-{host}")


def _copies(root: Path) -> list[int]:
    """The steps that are published in the store."""
    manifests = root.glob("store/step-*/manifest.json")
    return sorted(int(path.parent.name.split(".")[0].removeprefix("step-")) for path in manifests)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_that_has_lost_all_hosts_goes_on_with_the_copy(tmp_path: Path, kind: str, ranks: int) -> None:
    values(run_ranks(durable_ranks.save, kind, tmp_path, [3, 7], ranks=ranks))
    assert _copies(tmp_path) == [3, 7]
    _lose(tmp_path, *range(ranks))
    assert values(run_ranks(durable_ranks.resume, kind, tmp_path, 9, ranks=ranks)) == [7] * ranks
    assert _copies(tmp_path) == [7, 9], "the job that went on has copied its save, and pruned"
    _lose(tmp_path, *range(ranks))
    assert values(run_ranks(durable_ranks.resume, kind, tmp_path, ranks=ranks)) == [9] * ranks


def test_a_copy_is_read_by_fewer_ranks(tmp_path: Path, kind: str) -> None:
    values(run_ranks(durable_ranks.save, kind, tmp_path, [3], ranks=3))
    _lose(tmp_path, 0, 1, 2)
    assert values(run_ranks(durable_ranks.resume, kind, tmp_path, ranks=2)) == [3, 3]


def test_copies_are_as_rare_as_they_are_wanted_and_the_newer_save_on_the_hosts_is_taken(
    tmp_path: Path, kind: str
) -> None:
    values(run_ranks(durable_ranks.save, kind, tmp_path, list(range(1, 10)), 4, ranks=2))
    assert _copies(tmp_path) == [4, 8]
    assert values(run_ranks(durable_ranks.resume, kind, tmp_path, ranks=2)) == [9, 9]
    _lose(tmp_path, 0, 1)
    assert values(run_ranks(durable_ranks.resume, kind, tmp_path, ranks=2)) == [8, 8]


@pytest.mark.long
def test_what_a_process_of_its_own_has_saved_is_copied_too(tmp_path: Path, kind: str) -> None:
    if kind == "memory" and not HAS_HELPER_PROCESS:
        pytest.skip(NO_HELPER_PROCESS)
    values(run_ranks(durable_ranks.save_aside, kind, tmp_path, 4, ranks=2))
    _lose(tmp_path, 0, 1)
    assert values(run_ranks(durable_ranks.resume, kind, tmp_path, ranks=2)) == [4, 4]


def test_saves_go_on_while_a_copy_is_made_and_it_is_what_it_was(tmp_path: Path, kind: str) -> None:
    values(run_ranks(durable_ranks.save_on, kind, tmp_path, [1, 2, 3, 4, 5], ranks=2))
    assert _copies(tmp_path) == [1, 5], "none of those between, and the next one when the first was done"
    shutil.rmtree(next(tmp_path.glob("store/step-000000005.*")))
    _lose(tmp_path, 0, 1)
    assert values(run_ranks(durable_ranks.resume, kind, tmp_path, ranks=2)) == [1, 1]


def test_what_is_damaged_on_all_hosts_is_read_in_the_store(tmp_path: Path, kind: str) -> None:
    values(run_ranks(durable_ranks.save, kind, tmp_path, [5], ranks=2))
    damaged = list(tmp_path.glob("host-*/**/shard-00001-of-*.shard"))
    assert len(damaged) == 2, "the own one and the copy of the partner"
    for path in damaged:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    assert values(run_ranks(durable_ranks.resume, kind, tmp_path, ranks=2)) == [5, 5]


@pytest.mark.parametrize("damage", ["cut", "empty"])
def test_where_all_that_was_completed_is_damaged_nobody_begins_afresh(tmp_path: Path, kind: str, damage: str) -> None:
    values(run_ranks(durable_ranks.save, kind, tmp_path, [5], ranks=2))
    _lose(tmp_path, 0, 1)
    (folder,) = tmp_path.glob("store/step-000000005.*")
    for path in folder.iterdir():
        if damage == "empty" or path.name.startswith("shard-00001"):
            path.write_bytes(path.read_bytes()[: 100 if damage == "cut" else 0])
    ended = run_ranks(durable_ranks.resume, kind, tmp_path, ranks=2)
    for one in ended:
        assert one.error is not None, one.value
        assert one.error.startswith("CorruptCheckpointError: no checkpoint can be loaded, from any host or durable")
        assert folder.name in one.error


def test_a_job_that_is_killed_in_a_copy_goes_on_with_the_one_before_and_removes_what_is_left(
    tmp_path: Path, kind: str
) -> None:
    killed = run_ranks(durable_ranks.save_and_die_in_the_copy, kind, tmp_path, [5, 6], ranks=2)
    assert [one.was_killed for one in killed] == [True, True]
    (left,) = tmp_path.glob("store/step-000000006.*")
    there = {path.name[:11] for path in left.iterdir()}
    assert "shard-00000" in there, "it was under way"
    assert not {"shard-00001", "manifest.js"} & there, "and not done"
    _lose(tmp_path, 0, 1)
    assert values(run_ranks(durable_ranks.resume, kind, tmp_path, 8, ranks=2)) == [5, 5]
    assert not left.exists()
    assert _copies(tmp_path) == [5, 8]


@pytest.mark.long
def test_a_store_that_does_not_answer_costs_the_copies_and_is_not_taken_for_an_empty_one(
    tmp_path: Path, kind: str
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody listens there
        store = f"http://127.0.0.1:{unused.getsockname()[1]}/store"
        ((found, then),) = values(run_ranks(durable_ranks.save_without_a_store, kind, tmp_path, store))
    assert found == 1
    assert "durable storage does not answer" in then
    assert store in then


def test_a_job_that_began_without_the_store_copies_when_it_is_back(tmp_path: Path, kind: str) -> None:
    for step in (4, 5):
        values(run_ranks(durable_ranks.resume, kind, tmp_path, step))
        _lose(tmp_path, 0)  # it does not know either how many jobs there were
    values(run_ranks(durable_ranks.save_while_the_store_comes_back, kind, tmp_path))
    assert _copies(tmp_path) == [5, 7]
    _lose(tmp_path, 0)
    assert values(run_ranks(durable_ranks.resume, kind, tmp_path, 8)) == [7]
    assert _copies(tmp_path) == [7, 8]


def test_a_job_that_was_replaced_copies_nothing_any_more(tmp_path: Path, kind: str) -> None:
    assert values(run_ranks(durable_ranks.save_while_replaced, kind, tmp_path)) == [7], "its own is older than that"
    assert _copies(tmp_path) == [5, 7], "the first job has published after the second one"


@pytest.mark.long
def test_a_job_that_begins_while_the_store_is_silent_saves_soon_and_copies_when_it_answers(
    tmp_path: Path, kind: str
) -> None:
    (took_s,) = values(run_ranks(durable_ranks.save_while_the_store_is_silent, kind, tmp_path))
    assert took_s < durable_ranks.COPIED_S / 2
    assert _copies(tmp_path) == [4, 5]


@pytest.mark.long
def test_the_first_save_of_a_new_group_does_not_wait_for_the_store(tmp_path: Path, kind: str) -> None:
    took_s = values(run_ranks(durable_ranks.save_in_a_new_group, kind, tmp_path, ranks=2))
    assert max(took_s) < ANSWER_S, "it has asked the store"
    assert _copies(tmp_path) == [4, 5]
