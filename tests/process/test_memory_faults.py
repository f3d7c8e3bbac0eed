"""Checkpoints in memory when any process is killed at any moment of a save, and any host is lost then with its memory.

Whatever happens, the job that starts next finds on all ranks the same complete step: the one that was being saved, if
anything said that it is complete, or the one before; bit for bit. Then it saves as if nothing had been.
"""

from __future__ import annotations

import itertools
import queue
import random
import secrets
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.process.forked_ranks import Ended, Stop, run_ranks
from tests.process.log_ears import heard
from tests.process.memory_fault_ranks import (
    EXTRA,
    NEW,
    OLD,
    Fault,
    copies_of,
    copy_of,
    life,
    newest_commit,
    recovered,
)
from tests.process.memory_ranks import JOB, base_of, damage
from tests.process.test_memory_container import commit, committed, save
from torchelastic.checkpoint.compat.flashpoint.commit import Commit
from torchelastic.checkpoint.compat.flashpoint.container import Container
from torchelastic.checkpoint.compat.flashpoint.ids import object_of
from torchelastic.checkpoint.compat.flashpoint.object_manager import CheckpointObjectManager
from torchelastic.checkpoint.replicas.receive import digest_of
from torchelastic.checkpoint.store.received_shards import sealed_bytes
from torchelastic.checkpoint.store.save_id import ShardId

run = partial(run_ranks, others_go_on=True)


@pytest.fixture
def root(memory_folder: Path) -> Path:
    return memory_folder / "job"


# --- one kill, one lost host ------------------------------------------------------------------------------------------


def require_recoverable(root: Path, hosts: str, ended: Sequence[Ended]) -> list[int]:
    """Loses no host, or any one; each time the next job has to find what the commits that are left promise.

    Args:
        root: of the job that has ended.
        hosts: a letter per rank.
        ended: its ranks; where one says that the new step is complete, it has to be there.

    Returns:
        The steps that were found.
    """
    copies = copies_of(root, hosts)
    is_reported = any(one.value and not one.value["skipped"] and NEW in one.value["steps"] for one in ended)
    expected = []
    for lost in copies:
        step = newest_commit(root, hosts.replace(lost, "") if lost else hosts)
        assert step in (OLD, NEW)
        assert step == NEW or not is_reported
        expected.append((step, 0))
    told = run(recovered, [str(copy) for copy in copies.values()], hosts, ranks=len(hosts))
    for one in told:
        assert one.error is None, one.error
        assert [outcome["found"] for outcome in one.value] == expected
        assert [outcome["next"] for outcome in one.value] == [(step + 10, 1) for step, _ in expected]
        assert all(outcome["made"] and not outcome["skipped"] for outcome in one.value)
    for copy in copies.values():
        shutil.rmtree(copy)
    return [step for step, _ in expected]


def sweep(root: Path, hosts: str, victim: int, stride: int, is_async: bool) -> list[list[int]]:
    """Kills a rank at every so many-th call to the disk; which steps were found then, of each."""
    counted = run(life, str(root), hosts, None, is_async, ranks=len(hosts))
    calls = counted[victim].value["calls"]
    seed = secrets.randbits(32)
    print(f"hosts {hosts}, rank {victim}, asynchronous {is_async}, seed {seed}")  # pytest shows it where this fails
    assert len(calls) > 25
    found = []
    for number in range(random.Random(seed).randrange(stride), len(calls), stride):
        each = root.with_name(f"killed-{number}")
        ended = run(life, str(each), hosts, Fault(victim, number), is_async, ranks=len(hosts))
        if not ended[victim].was_killed:  # threads race to tidy up: the last calls are not always the same ones
            assert number >= len(calls) - 4, (number, ended)
            assert number >= len(ended[victim].value["calls"])
            continue
        found.append(require_recoverable(each, hosts, ended))
        shutil.rmtree(each)
    return found


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_during_a_save_and_a_lost_host_leave_the_step_or_the_one_before(root: Path, victim: int) -> None:
    found = sweep(root, "ab", victim, 9, is_async=False)
    assert len(found) >= 3


@pytest.mark.slow
@pytest.mark.timeout(900)  # some fifty jobs, each with two others behind it
@pytest.mark.parametrize(("hosts", "victim", "is_async"), [("ab", 1, True), ("abc", 2, True)])
def test_a_rank_killed_at_any_call_and_a_lost_host_leave_the_step_or_the_one_before(
    root: Path, hosts: str, victim: int, is_async: bool
) -> None:
    found = sweep(root, hosts, victim, 1, is_async)
    assert len(found) > 25
    assert {OLD} in map(set, found)
    assert set(found[-1]) == {NEW}
    assert found[-1] != found[0]


NAMED = [
    ("ab", Fault(0, "receive shard"), False, {OLD}),
    ("ab", Fault(1, "receive shard"), True, {OLD}),
    ("ab", Fault(1, "receive commit"), False, {OLD, NEW}),
    ("ab", Fault(1, "receive commit"), True, {OLD, NEW}),
    ("ab", Fault(0, "publish shard"), True, {OLD}),
    ("ab", Fault(0, "rename manifest.json"), True, {OLD}),
    ("ab", Fault(1, "rename manifest.json"), True, {OLD, NEW}),
    ("ab", Fault(1, "remove_folder hidden"), False, {NEW}),
    ("abc", Fault(2, "receive shard"), False, {OLD}),
    ("abc", Fault(1, "receive commit"), False, {NEW}),
    ("abc", Fault(0, "rename manifest.json"), False, {OLD}),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("hosts", "fault", "is_async", "steps"), NAMED, ids=[f"{h}-{f.rank}-{f.at}-{a}" for h, f, a, _ in NAMED]
)
def test_a_rank_killed_in_the_middle_of(root: Path, hosts: str, fault: Fault, is_async: bool, steps: set[int]) -> None:
    ended = run(life, str(root), hosts, fault, is_async, ranks=len(hosts))
    assert [one.was_killed for one in ended] == [rank == fault.rank for rank in range(len(hosts))]
    assert set(require_recoverable(root, hosts, ended)) == steps


# --- a rank that is stopped -------------------------------------------------------------------------------------------


def test_a_rank_stopped_for_a_while_makes_all_leave_the_save_out(root: Path) -> None:
    fault = Fault(1, "receive shard", "pause")
    stop = Stop(1, until=root / "push-failed")
    root.mkdir()
    ended = run(life, str(root), "ab", fault, False, 1.0, ranks=2, stop=stop)
    assert [one.error for one in ended] == [None, None]
    assert ended[0].value["skipped"] == 1
    assert any("rank 1 on host-b has no copy" in text for text in ended[0].value["warnings"])
    assert [one.value["steps"] for one in ended] == [[OLD], [OLD]]
    assert set(require_recoverable(root, "ab", ended)) == {OLD}


# --- flipped bits -----------------------------------------------------------------------------------------------------

SHARDS = ["shard-00000-*", "shard-00001-*"]
COMMIT = "shard-00002-*"
PARTS = ["preamble", "header", "data"]


def damaged(root: Path, name: str, hosts: str, file: str, part: str) -> str:
    """A copy of what a job has left, in which a file of NEW has a flipped bit, on each of these hosts."""
    copy = copy_of(root, name)
    for host in hosts:
        (path,) = base_of(copy, host).glob(f"step-{NEW:09d}.*/{file}")
        damage(path, part)
    return str(copy)


def found_in(copies: Sequence[str]) -> tuple[list[Any], list[list[str]]]:
    """What all ranks found in each copy, and what the two of them warned of then."""
    told = run(recovered, copies, "ab", ranks=2)
    assert [one.error for one in told] == [None, None]
    first, second = (one.value for one in told)
    assert [outcome["found"] for outcome in first] == [outcome["found"] for outcome in second]
    warnings = [one["warnings"] + other["warnings"] for one, other in zip(first, second, strict=True)]
    return [outcome["found"] for outcome in first], warnings


@pytest.mark.long
def test_a_flipped_bit_on_one_host_is_made_good_by_the_other(root: Path) -> None:
    run(life, str(root), "ab", None, ranks=2)
    files = [*SHARDS, COMMIT]
    cases = [(host, file, part) for host in "ab" for file in files for part in PARTS]
    found, warnings = found_in([damaged(root, "-".join(case), *case) for case in cases])
    assert found == [(NEW, 0)] * len(cases)
    assert [case for case, heard in zip(cases, warnings, strict=True) if not heard] == []


# --- threads of one process -------------------------------------------------------------------------------------------

STRESS_S = 2.0


class Busy:
    """What threads of one process do with a container: save, receive, complete, tidy up and look."""

    def __init__(self, root: Path) -> None:
        self.objects = CheckpointObjectManager()
        self.here, self.partner = self.objects.container(root / JOB), Container(root / "partner" / JOB)
        self.commits: queue.Queue[tuple[Commit, bytes] | None] = queue.Queue(2)
        self.is_over = threading.Event()
        self.completed = 0
        self.looks = 0

    def save(self) -> None:
        """Publishes a shard, and receives that of a partner; the next one while this one is being completed."""
        deadline_s = time.monotonic() + STRESS_S
        for step in itertools.count(1):
            save(self.here, step)
            theirs = save(self.partner, step, rank=1)
            self.receive(theirs)
            save(self.partner, step)
            made = commit(self.partner, theirs)
            sealed = sealed_bytes(self.partner.path_of(made.shard))
            assert sealed is not None
            self.commits.put((made, bytes(sealed)), timeout=30)
            del sealed
            self.partner.tidy()
            if time.monotonic() > deadline_s:
                return

    def receive(self, shard: ShardId, content: bytes | None = None) -> None:
        """Receives what the partner has, or had."""
        view = sealed_bytes(self.partner.path_of(shard)) if content is None else memoryview(content)
        assert view is not None
        name, shelf = object_of(JOB, shard), self.objects.shelf
        room = shelf.destination(name, view.nbytes)
        room[:] = view
        room.release()
        shelf.received(name, digest_of(view))

    def complete(self) -> None:
        """By turns as the coordinator does it, and as all other hosts do."""
        while (given := self.commits.get()) is not None:
            one, content = given
            if one.name.step % 2:
                self.here.write_commit(one)
                self.here.tidy()
            else:
                self.receive(one.shard, content)
            self.completed = one.name.step

    def tidy(self) -> None:
        while not self.is_over.wait(0.0005):
            self.here.tidy()

    def look(self) -> None:
        """Something complete is always there, with all that it needs, unless it has just been replaced."""
        while not self.is_over.wait(0.0005):
            completed = self.completed
            newest = next((one for one in self.here.inventory() if one.is_committed), None)
            assert completed == 0 or (newest is not None and newest.name.step >= completed)
            if newest is not None:
                is_whole = newest.ranks == (0, 1, 2) and (self.here.folder_of(newest.name.step) / EXTRA).exists()
                now = next(one for one in self.here.inventory() if one.is_committed)
                assert is_whole or now.name > newest.name, (newest, now)
                self.looks += 1


def test_threads_that_save_receive_complete_and_tidy_up_at_once_remove_nothing_that_is_needed(root: Path) -> None:
    busy = Busy(root)
    with heard() as warnings, ThreadPoolExecutor(5) as threads:
        others = [threads.submit(work) for work in (busy.tidy, busy.tidy, busy.look)]
        completing = threads.submit(busy.complete)
        try:
            busy.save()
        finally:
            busy.commits.put(None, timeout=30)
            completing.result(30)
            busy.is_over.set()
        for other in others:
            other.result(30)
    assert warnings == []
    assert busy.completed > 20
    assert busy.looks > 20
    assert committed(busy.here) == [busy.completed]
