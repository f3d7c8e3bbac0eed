"""Two real ranks in a gloo group: what one of them cannot do is finalised on none, and both are told."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.process.async_work import PATIENCE_S, fail, wait_for, write
from tests.process.pairs import survivor_of
from torchelastic.checkpoint.async_ckpt import AsyncCallsQueue, AsyncCheckpointError, AsyncRequest, calls_queue

Facts = dict[str, Any]


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def fail_unprintably() -> None:
    raise UnprintableError


def told(function: Callable[..., object], *args: Any) -> list[Any]:
    """What a call returned, or the error that it raised: text, rank, and type of the cause."""
    try:
        return ["returned", function(*args)]
    except AsyncCheckpointError as error:
        return ["raised", str(error), error.rank, type(error.__cause__).__name__]


def poll_until_told(queue: AsyncCallsQueue) -> list[Any]:
    """Poll without blocking, in step with the other rank, until a poll has something to tell."""
    deadline_s = time.monotonic() + PATIENCE_S
    while (answer := told(queue.maybe_finalize_async_calls)) == ["returned", []]:
        assert time.monotonic() < deadline_s
        dist.barrier()  # training's own collective, in the same group: the rounds must not get mixed up with it
    return answer


class Rank:
    """One rank and its queue; every method is called on both ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rank = folder, dist.get_rank()
        self.queue = AsyncCallsQueue(worker="thread", timeout_s=PATIENCE_S)
        self.finalized: list[str] = []

    def schedule(self, name: str, function: Callable[..., object] | None = None, *args: Any) -> list[Any]:
        request = AsyncRequest(function or (lambda: None), args, [lambda: self.finalized.append(name)])
        return told(self.queue.schedule_async_request, request)

    def finalize(self) -> list[Any]:
        return told(self.queue.maybe_finalize_async_calls, True)

    def slow(self) -> list[Any]:
        """Rank 1 is done only when rank 0 has polled: nobody may finalise before."""
        self.schedule("slow", wait_for if self.rank else None, *([self.folder / "go"] if self.rank else []))
        early = [self.queue.maybe_finalize_async_calls() for _ in range(3)]
        dist.barrier()
        if self.rank == 0:
            write(self.folder / "go", "")
        return [early, *poll_until_told(self.queue)]

    def slow_while_waiting(self) -> list[Any]:
        """A rank that waits keeps asking, so that none of its collectives lasts as long as the other one's work."""
        original, begun = dist.all_reduce, threading.Event()
        rounds: list[int] = []

        def reduce(*args: Any, **options: Any) -> Any:
            rounds.append(1)
            if len(rounds) == 3:
                begun.set()
            return original(*args, **options)

        def work() -> None:
            assert begun.wait(PATIENCE_S)

        setattr(dist, "all_reduce", reduce)  # noqa: B010 - mypy refuses the plain assignment
        setattr(calls_queue, "_SLICE_S", 0.01)  # noqa: B010
        self.schedule("waited for", work if self.rank else None)
        answer = self.finalize()
        setattr(dist, "all_reduce", original)  # noqa: B010
        return answer

    def alone_in_between(self) -> list[Any]:
        """What was found about a call that was then finalised without asking says nothing about the next one."""
        queue = AsyncCallsQueue(worker="thread", timeout_s=PATIENCE_S)
        queue.schedule_async_request(AsyncRequest(None, (), []))
        queue.schedule_async_request(AsyncRequest(wait_for, (self.folder / "go on",), []))
        answers = [queue.maybe_finalize_async_calls(no_dist=no_dist) for no_dist in (False, True, False, False)]
        dist.barrier()
        write(self.folder / "go on", "")
        queue.close()
        return answers

    def failing(self) -> list[Any]:
        self.schedule("failing", fail if self.rank else None, *(["disk on fire"] if self.rank else []))
        return [self.finalize(), self.finalize()]

    def failing_unprintably(self) -> list[Any]:
        """Rank 1 fails with a file name that is no UTF-8, then with an exception without a text: rank 0 is told."""
        answers = []
        with AsyncCallsQueue(worker="thread", timeout_s=5.0) as queue:
            for work, args in ((fail, (os.fsdecode(b"no \xff"),)), (fail_unprintably, ())):
                queue.schedule_async_request(AsyncRequest(work if self.rank else None, args if self.rank else (), []))
                answers.append(told(queue.maybe_finalize_async_calls, True))
        return answers

    def failing_before_schedule(self) -> list[Any]:
        """The poll in between lets both ranks know; schedule then tells both."""
        self.schedule("failing 2", fail if self.rank else None, *(["disk on fire"] if self.rank else []))
        marker = self.folder / f"marker-{self.rank}"
        self.schedule("marker", write, marker, "")  # done by the same thread after it, so the failure is known by then
        wait_for(marker)
        self.queue.maybe_finalize_async_calls()
        answers = [self.schedule("refused"), self.schedule("accepted")]
        return [*answers, self.finalize()]

    def failing_in_schedule(self) -> list[Any]:
        """Rank 1 cannot schedule what rank 0 has scheduled: rank 0 is told by the next poll, rank 1 not again."""
        request = AsyncRequest(print, (1, 2), [lambda: self.finalized.append("unstaged")])
        staging = (lambda: fail("no room")) if self.rank else (lambda: None)
        scheduled = "fine"
        try:
            self.queue.schedule_async_request(request._replace(async_fn=lambda *_: None, preload_fn=staging))
        except ValueError as error:
            scheduled = str(error)
        return [scheduled, self.finalize(), self.queue.get_num_unfinalized_calls()]

    def synchronous(self) -> list[Any]:
        bad = AsyncRequest(fail if self.rank else None, ("sync",), [lambda: self.finalized.append("sync")])
        good = bad._replace(async_fn=None)
        return [told(bad.execute_sync), told(good.execute_sync)]

    def different_indexes(self) -> list[Any]:
        request = AsyncRequest(None, (), [lambda: self.finalized.append("different")], call_idx=5 + self.rank)
        return told(request.execute_finalize_fns)

    def out_of_step(self) -> list[Any]:
        """Rank 0 finalises one call on its own, so its oldest is another one than rank 1's."""
        queue = AsyncCallsQueue(worker="thread", timeout_s=PATIENCE_S)
        for name in ("step 1", "step 2"):
            queue.schedule_async_request(AsyncRequest(None, (), [partial(self.finalized.append, name)]))
            if self.rank == 0 and name == "step 1":
                queue.maybe_finalize_async_calls(no_dist=True)
        answer = told(queue.maybe_finalize_async_calls, True)
        return [answer, told(queue.close)]

    def not_coming(self) -> list[Any]:
        """Rank 1 does not poll in a group of the queue's own; rank 0 waits for it no longer than it was told to."""
        group = dist.new_group(backend="gloo")
        with AsyncCallsQueue(worker="thread", process_group=group, timeout_s=1.0) as queue:
            queue.schedule_async_request(AsyncRequest(None, (), [lambda: self.finalized.append("not coming")]))
            answer = told(queue.maybe_finalize_async_calls, True) if self.rank == 0 else []
            queue.close(abort=True)
        dist.barrier()
        return answer


SCENES = (
    Rank.slow,
    Rank.slow_while_waiting,
    Rank.alone_in_between,
    Rank.failing,
    Rank.failing_unprintably,
    Rank.failing_before_schedule,
    Rank.failing_in_schedule,
    Rank.synchronous,
    Rank.different_indexes,
    Rank.out_of_step,
    Rank.not_coming,
)


def play(folder: Path) -> tuple[Rank, Facts]:
    rank = Rank(folder)
    facts: Facts = {}
    for scene in SCENES:
        rank.finalized.clear()
        answer = scene(rank)
        facts[scene.__name__] = {"answer": answer, "finalized": list(rank.finalized)}
    return rank, facts


def rank_0(folder: Path) -> str:
    rank, facts = play(folder)
    rank.schedule("orphan")
    dist.barrier()
    wait_for(folder / "facts-1")
    try:
        facts["death"] = ["returned", rank.queue.maybe_finalize_async_calls(blocking=True)]
    except RuntimeError:
        facts["death"] = "group is broken"
    rank.queue.close(abort=True)
    return json.dumps(facts)


def rank_1(folder: Path) -> None:
    rank, facts = play(folder)
    rank.schedule("orphan")
    dist.barrier()
    write(folder / "facts-1", json.dumps(facts))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> list[Facts]:
    folder = tmp_path_factory.mktemp("ranks")
    return [json.loads(survivor_of(folder, rank_0, rank_1)), json.loads((folder / "facts-1").read_text())]


def test_nobody_finalises_before_all_are_done(facts: list[Facts]) -> None:
    for of_rank in facts:
        assert of_rank["slow"] == {"answer": [[[], [], []], "returned", [1]], "finalized": ["slow"]}


def test_who_waits_goes_on_asking(facts: list[Facts]) -> None:
    for of_rank in facts:
        assert of_rank["slow_while_waiting"] == {"answer": ["returned", [2]], "finalized": ["waited for"]}


def test_what_was_found_about_a_call_says_nothing_about_the_next_one(facts: list[Facts]) -> None:
    assert [of_rank["alone_in_between"]["answer"] for of_rank in facts] == [[[], [1], [], []]] * 2


def test_what_fails_on_one_rank_is_finalised_on_none_and_told_to_both(facts: list[Facts]) -> None:
    for of_rank, cause in zip(facts, ["NoneType", "ValueError"], strict=True):
        (raised, text, rank, cause_here), again = of_rank["failing"]["answer"]
        assert (raised, rank, cause_here) == ("raised", 1, cause)
        assert "call 3 failed on rank 1: ValueError: disk on fire" in text
        assert again == ["returned", []]
        assert of_rank["failing"]["finalized"] == []


def test_a_failure_without_a_plain_text_is_told_to_both(facts: list[Facts]) -> None:
    for of_rank in facts:
        not_utf_8, without = of_rank["failing_unprintably"]["answer"]
        assert "call 1 failed on rank 1: ValueError: no \\udcff" in not_utf_8[1]
        assert "call 2 failed on rank 1: UnprintableError: " in without[1]


def test_schedule_tells_both_ranks_what_the_last_poll_has_found(facts: list[Facts]) -> None:
    for of_rank in facts:
        refused, accepted, finalized = of_rank["failing_before_schedule"]["answer"]
        assert refused[:1] == ["raised"]
        assert "call 4 failed on rank 1" in refused[1]
        assert (accepted, finalized) == (["returned", 6], ["returned", [5, 6]])
        assert of_rank["failing_before_schedule"]["finalized"] == ["marker", "accepted"]


def test_a_rank_that_could_not_schedule_is_named_to_the_other_one(facts: list[Facts]) -> None:
    scheduled, (raised, text, rank, _), left = facts[0]["failing_in_schedule"]["answer"]
    assert (scheduled, raised, rank, left) == ("fine", "raised", 1, 0)
    assert "call 7 failed on rank 1: ValueError: no room" in text
    assert facts[1]["failing_in_schedule"]["answer"] == ["no room", ["returned", []], 0]
    assert [of_rank["failing_in_schedule"]["finalized"] for of_rank in facts] == [[], []]


def test_the_synchronous_form_finalises_on_none_as_well(facts: list[Facts]) -> None:
    for of_rank, cause in zip(facts, ["NoneType", "ValueError"], strict=True):
        (raised, text, rank, cause_here), good = of_rank["synchronous"]["answer"]
        assert (raised, rank, cause_here, good) == ("raised", 1, cause, ["returned", None])
        assert "rank 1: ValueError: sync" in text
        assert of_rank["synchronous"]["finalized"] == ["sync"]


def test_ranks_that_finalise_different_calls_are_named(facts: list[Facts]) -> None:
    for of_rank in facts:
        assert "rank 0 is at call 5; rank 1 is at call 6" in of_rank["different_indexes"]["answer"][1]
        assert of_rank["different_indexes"]["finalized"] == []
        for answer in of_rank["out_of_step"]["answer"]:
            assert "rank 1 is at call 1; rank 0 is at call 2" in answer[1]
    assert [of_rank["out_of_step"]["finalized"] for of_rank in facts] == [["step 1"], []]


def test_a_rank_that_does_not_come_is_named(facts: list[Facts]) -> None:
    assert facts[0]["not_coming"]["answer"][1].startswith("rank 1 did not come within 1 s to poll call 1")
    assert facts[0]["not_coming"]["finalized"] == []


def test_a_dead_rank_breaks_the_wait(facts: list[Facts]) -> None:
    assert facts[0]["death"] == "group is broken"
