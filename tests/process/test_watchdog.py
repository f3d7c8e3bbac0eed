"""The watchdog on a real thread in real code: what it sees, what it does, and what it costs."""

from __future__ import annotations

import faulthandler
import hashlib
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from tests.waiting import wait_until
from torchelastic.observe.ledger.meter import Meter
from torchelastic.p2p import hangs
from torchelastic.p2p.busy import BusySigns
from torchelastic.p2p.hang_location import HangLocation
from torchelastic.p2p.hangs import DEFAULT_TIMEOUT_MS, WARM_UP_STEPS, AbortedStep, HangPolicy, Place, ThreadSample
from torchelastic.p2p.heartbeat import Heartbeat
from torchelastic.p2p.stacks import sample_thread
from torchelastic.p2p.watchdog import Watchdog
from torchelastic.rendezvous.loss import MissedProgress

TIMEOUT_S = 60.0


MakeDog = Callable[..., tuple[Watchdog, threading.Event]]


@pytest.fixture
def dogs() -> Iterator[MakeDog]:
    """Makes watchdogs in a warm round of two workers, each with the event that says that it has cut the group."""
    made: list[Watchdog] = []

    def make(
        world_size: int = 2, timeout_s: float = TIMEOUT_S, keeps_timeout: bool = False, **policy: Any
    ) -> tuple[Watchdog, threading.Event]:
        has_cut = threading.Event()
        policies = HangPolicy(**{"floor_s": 0.2, **policy})
        dog = Watchdog(policies, timeout_s, has_cut.set, keeps_timeout=keeps_timeout)
        made.append(dog)
        dog.new_round()
        dog.begin(1, world_size, 7)
        for _ in range(WARM_UP_STEPS + 1):
            dog.step_ended()
        return dog, has_cut

    yield make
    for dog in made:
        dog.end()


def collective(event: threading.Event, timeout_s: float) -> bool:
    """Wait below a frame that is one of torch.distributed's by its file."""
    source = "def all_reduce(event, timeout_s):\n    return event.wait(timeout_s)\n"
    scope: dict[str, Any] = {}
    exec(compile(source, torch.distributed.__file__, "exec"), scope)
    return bool(scope["all_reduce"](event, timeout_s))


# --- what it sees -----------------------------------------------------------------------------------------------------


def test_a_look_tells_user_code_from_a_collective_and_names_the_users_line() -> None:
    seen: list[tuple[Place, str]] = []
    ident, done = threading.get_ident(), threading.Event()

    def look() -> None:
        found, line = sample_thread(ident)
        seen.append((found.place, line))
        done.set()

    threading.Timer(0.1, look).start()
    collective(done, 10.0)
    done.clear()
    threading.Timer(0.1, look).start()
    done.wait(10.0)
    assert seen[0][0] is Place.COLLECTIVE
    assert seen[0][1].startswith("test_watchdog.py:")
    assert seen[0][1].endswith(" collective")
    assert seen[1][0] is Place.USER_CODE


def test_a_thread_that_others_leave_no_processor_is_seen_to_wait_for_one() -> None:
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this kernel has no scheduler statistics: run it on one with CONFIG_SCHEDSTATS")
    only = min(os.sched_getaffinity(0))
    ends = threading.Event()

    def computes() -> None:
        os.sched_setaffinity(0, {only})
        while not ends.is_set():
            hashlib.sha256(bytes(1 << 20)).digest()

    busy = subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{only}}})\nwhile True: pass"])
    thread = threading.Thread(target=computes)
    thread.start()
    try:
        ident = thread.ident or 0
        first, _ = sample_thread(ident)
        wait_until(lambda: sample_thread(ident)[0].queued_s > first.queued_s + 0.2)
    finally:
        ends.set()
        thread.join()
        busy.kill()
        busy.wait()


# --- what it does -----------------------------------------------------------------------------------------------------


def test_who_waits_in_a_collective_cuts_the_group_and_knows_where_it_stood(
    dogs: MakeDog, caplog: pytest.LogCaptureFixture
) -> None:
    dog, has_cut = dogs()
    assert collective(has_cut, 20.0)
    wait_until(lambda: "is aborted" in caplog.text)
    assert dog.has_cut
    assert dog.location is not None
    assert (dog.location.rank, dog.location.step) == (1, 7 + WARM_UP_STEPS + 1)
    assert "collective" in dog.location.where
    dog.leave()
    assert dog.patience_s < TIMEOUT_S / 2, "whoever does not come is not waited for as long as a time-out"


def test_who_is_in_user_code_writes_its_stacks_once_and_cuts_nobody(
    dogs: MakeDog,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dumps: list[bool] = []
    monkeypatch.setattr(faulthandler, "dump_traceback", lambda *_, **__: dumps.append(True))
    dog, has_cut = dogs()
    wait_until(lambda: len(dumps) == 1)
    assert "this worker is in user code, in waiting.py:" in caplog.text
    time.sleep(0.5)  # several looks
    assert len(dumps) == 1
    assert not has_cut.is_set()
    dog.step_ended()
    wait_until(lambda: len(dumps) == 2)


def test_a_time_out_that_the_user_has_chosen_is_kept_by_who_is_in_its_own_code(
    dogs: MakeDog, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumps: list[float] = []
    monkeypatch.setattr(faulthandler, "dump_traceback", lambda *_, **__: dumps.append(time.monotonic()))
    guesses: list[tuple[float, str]] = []
    monkeypatch.setattr(Meter, "may_hang", lambda _self, _for_s, bound_s, where: guesses.append((bound_s, where)))
    began_s = time.monotonic()
    dogs(timeout_s=2.0, keeps_timeout=True)
    wait_until(lambda: dumps, 20.0)
    assert dumps[0] - began_s >= 2.0, "ten bounds later"
    assert [(bound_s, where.partition(":")[0]) for bound_s, where in guesses] == [(2.0, "waiting.py")]
    assert "nothing is seen of work" not in caplog.text, "nothing is guessed of it before"


def test_what_is_guessed_is_said_before_anything_is_done(dogs: MakeDog, caplog: pytest.LogCaptureFixture) -> None:
    dogs(floor_s=1.0)
    wait_until(lambda: "its stacks" in caplog.text)
    said = [record.getMessage() for record in caplog.records]
    (guess,) = [number for number, text in enumerate(said) if "nothing is seen of work" in text]
    assert re.search(
        r"in waiting.py:\d+ wait_until, .* after 1.0 s the others take that for a hang, a guess", said[guess]
    )
    assert guess < next(number for number, text in enumerate(said) if "its stacks" in text)


def test_a_process_that_works_is_a_sign_of_work() -> None:
    busy = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
    with ThreadPoolExecutor(1) as looks, subprocess.Popen([sys.executable, "-c", busy]) as works:

        def sample() -> ThreadSample:
            return looks.submit(sample_thread, threading.main_thread().ident or 0).result()[0]

        try:
            first = sample()
            wait_until(lambda: hangs.children_work(first, sample()), what="it is seen to work")
            assert hangs.has_worked(replace(first, point=()), replace(sample(), point=(), cpu_s=first.cpu_s))
        finally:
            works.kill()


def test_a_worker_that_is_alone_waits_for_nobody(dogs: MakeDog, caplog: pytest.LogCaptureFixture) -> None:
    _, has_cut = dogs(world_size=1)
    assert not collective(has_cut, 1.0)
    assert "user code" in caplog.text


def test_nothing_is_timed_while_a_checkpoint_is_saved_or_a_group_is_left(
    dogs: MakeDog, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    dog, has_cut = dogs()
    with dog.resting():
        assert not collective(has_cut, 0.8)
        assert dog.patience_s == TIMEOUT_S, "who saves is waited for"
    dog.leave()
    assert dog.patience_s == pytest.approx(0.2)
    assert not collective(has_cut, 0.8)
    assert "no step" not in caplog.text


def test_an_error_tells_where_the_step_was_given_up_and_whether_that_was_a_time_out(
    dogs: MakeDog,
) -> None:
    dog, _ = dogs()
    try:
        raise RuntimeError("Timed out waiting 1000ms for recv operation to complete")
    except RuntimeError as error:
        dog.failed(error)
    assert dog.location is not None
    assert dog.location == HangLocation(1, 7 + WARM_UP_STEPS + 1, dog.location.where)
    assert dog.has_noticed_hang
    assert not dog.has_cut
    dog.new_round()
    assert dog.location is None


# --- work that is no hang --------------------------------------------------------------------------------------------


def test_nothing_is_timed_in_a_slow_section_and_the_step_begins_anew_after_it(
    dogs: MakeDog, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    dog, has_cut = dogs()
    with dog.slow_section(), dog.slow_section():
        assert not collective(has_cut, 0.8)
        over_s = time.monotonic()
    assert "no step" not in caplog.text
    assert dog._step.began_s is not None
    assert dog._step.began_s >= over_s
    assert collective(has_cut, 20.0), "a hang after it is noticed"
    dog.leave()
    with dog.slow_section():
        pass
    assert dog._step.began_s is None, "outside of steps it times nothing"


def test_a_step_in_which_this_worker_computed_is_neither_reported_nor_measured(
    dogs: MakeDog, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hangs, "MAX_WAITING_CPU", 0.01)  # a busy machine leaves it less than 0.2
    dog, has_cut = dogs(floor_s=1.0)  # and the dog no time to look twice within 0.2 s
    ends_s = time.monotonic() + 3.0
    while time.monotonic() < ends_s:
        sum(number * number for number in range(1000))
    dog.step_ended()
    assert not has_cut.is_set()
    assert "no step" not in caplog.text
    assert dog._step.slowest_s is not None
    assert dog._step.slowest_s < 1.0


def test_who_was_ended_while_its_process_ran_widens_the_bound_and_one_that_was_stopped_does_not(
    dogs: MakeDog, caplog: pytest.LogCaptureFixture
) -> None:
    for ran in (None, HangLocation(0, 10, "train.py:41 evaluate")):
        dog, _ = dogs()
        before_s = dog.bound_s
        collective(threading.Event(), 0.3)
        dog.failed(RuntimeError("Connection closed by peer"))
        dog._ran = ran
        dog._timeouts.step_aborted(AbortedStep(another_ran=ran is not None))
        assert dog.came_back([MissedProgress("host-0-1")]).total_seconds() == TIMEOUT_S
        dog.begin(1, 2, 10)
        assert (dog.bound_s > before_s) is (ran is not None)
    assert "rank 0 was ended while its process still ran, in train.py:41 evaluate" in caplog.text


@pytest.mark.parametrize(("timeout_s", "later_s"), [(DEFAULT_TIMEOUT_MS / 1000, 100.0), (11.0, 11.0)])
def test_a_time_out_that_ended_the_work_of_another_rank_grows_if_nobody_has_chosen_it(
    dogs: MakeDog, caplog: pytest.LogCaptureFixture, timeout_s: float, later_s: float
) -> None:
    dog, has_cut = dogs(timeout_s=timeout_s)
    store, other = HashStore(), BusySigns(0, time.monotonic)
    heartbeat = Heartbeat(store, 1, 2)
    dog.enter("forming the group", heartbeat)
    dog.begin(1, 2, 7)
    for _ in range(WARM_UP_STEPS + 1):
        dog.step_ended()
    ends_s = time.monotonic() + 3.0
    while time.monotonic() < ends_s:
        other.give(HangLocation(0, 10, "train.py:41 evaluate"), works=True)
        other.exchange(store)
        assert not collective(has_cut, 0.2), "it waits for a rank that works"
    dog.failed(RuntimeError(f"Timed out waiting {1000 * timeout_s:.0f}ms for recv operation to complete"))
    assert "collectives have timed out while the others waited for rank 0, which works in train.py:41" in caplog.text
    assert dog.patience_s == 60.0
    dog.leave()
    assert dog.came_back([]).total_seconds() == later_s


@pytest.mark.parametrize(("timeout_s", "later_s"), [(DEFAULT_TIMEOUT_MS / 1000, 100.0), (11.0, 11.0)])
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_time_out_that_ended_the_sleep_of_a_rank_that_came_back_grows_too_and_what_to_write_is_said(
    dogs: MakeDog, caplog: pytest.LogCaptureFixture, is_lost: bool, timeout_s: float, later_s: float
) -> None:
    dog, _ = dogs(timeout_s=timeout_s)
    dog._ran = HangLocation(0, 10, "train.py:41 upload")
    dog._timeouts.step_aborted(AbortedStep(has_timed_out=True, another_ran=True))
    lost = [MissedProgress("host-0-1")] if is_lost else []
    assert dog.came_back(lost).total_seconds() == (timeout_s if is_lost else later_s)
    said = "while rank 0 only waited, in train.py:41 upload, and came back: put `with coordinator.slow_section():`"
    assert (said in caplog.text) is not is_lost
    assert dog.came_back([]).total_seconds() == (timeout_s if is_lost else later_s), "each step is counted once"


def test_who_may_take_long_tells_a_newcomer_with_the_default_time_out_in_time_that_it_is_late(dogs: MakeDog) -> None:
    dog, _ = dogs(timeout_s=100.0, floor_s=60.0)
    store, newcomer = HashStore(), BusySigns(0, time.monotonic)
    dog.enter("forming the group", Heartbeat(store, 1, 2))
    dog.begin(1, 2, 7)
    for _ in range(WARM_UP_STEPS + 1):
        dog.step_ended()
    newcomer.idle_s()

    def has_heard() -> bool:
        newcomer.exchange(store)
        return newcomer.stuck is not None

    wait_until(has_heard, timeout_s=DEFAULT_TIMEOUT_MS / 1000 - 1.0)


def test_how_long_steps_may_take_is_handed_on_by_rank_0_of_the_next_group(dogs: MakeDog) -> None:
    store = HashStore()
    old, new = dogs()[0], dogs()[0]
    old._step.learn(3.0)
    old.publish(store, 1)
    assert not store.check(["busy/slowest_s"]), "another rank does not say it"
    old.publish(store, 0)
    heartbeat = Heartbeat(store, 1, 2)
    new.enter("forming the group", heartbeat)
    new.begin(1, 2, 10)
    wait_until(lambda: new.bound_s == pytest.approx(30.0))
