"""The watchdog on a real thread in real code: what it sees, what it does, and what it costs."""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from torchelastic.p2p.hangs import WARM_UP_STEPS, HangPolicy, Place
from torchelastic.p2p.stacks import lines_of_error, look_at, where
from torchelastic.p2p.stands import Stand
from torchelastic.p2p.watchdog import Watchdog

TIMEOUT_S = 60.0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


MakeDog = Callable[..., tuple[Watchdog, threading.Event]]


@pytest.fixture
def dogs() -> Iterator[MakeDog]:
    """Makes watchdogs in a warm round of two workers, each with the event that says that it has cut the group."""
    made: list[Watchdog] = []

    def make(world_size: int = 2, **policy: Any) -> tuple[Watchdog, threading.Event]:
        has_cut = threading.Event()
        dog = Watchdog(HangPolicy(**{"floor_s": 0.2, **policy}), TIMEOUT_S, has_cut.set)
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
        found, line = look_at(ident)
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


def test_the_line_of_an_error_is_the_users_and_not_torchs() -> None:
    def train_step() -> None:
        torch.ones(2) @ torch.ones(3)

    with pytest.raises(RuntimeError) as caught:
        train_step()
    assert where(lines_of_error(caught.value.__traceback__)).endswith(" train_step")


# --- what it does -----------------------------------------------------------------------------------------------------


def test_who_waits_in_a_collective_cuts_the_group_and_knows_where_it_stood(
    dogs: MakeDog, caplog: pytest.LogCaptureFixture
) -> None:
    dog, has_cut = dogs()
    assert collective(has_cut, 20.0)
    wait_until(lambda: "is given up" in caplog.text)
    assert dog.has_cut
    assert dog.stand is not None
    assert (dog.stand.rank, dog.stand.step) == (1, 7 + WARM_UP_STEPS + 1)
    assert "collective" in dog.stand.where
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
    assert "this worker is in user code, in test_watchdog.py:" in caplog.text
    time.sleep(0.5)  # several looks
    assert len(dumps) == 1
    assert not has_cut.is_set()
    dog.step_ended()
    wait_until(lambda: len(dumps) == 2)


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
    assert dog.stand is not None
    assert dog.stand == Stand(1, 7 + WARM_UP_STEPS + 1, dog.stand.where)
    assert dog.has_noticed_hang
    assert not dog.has_cut
    dog.new_round()
    assert dog.stand is None


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_a_step_costs_no_system_call_and_wakes_nobody(dogs: MakeDog) -> None:
    dog, _ = dogs(floor_s=50.0)
    woken = []
    dog._wake.set = lambda: woken.append(True)  # type: ignore[method-assign]
    seconds = timeit.timeit(dog.step_ended, number=10_000)
    assert not woken
    assert seconds < 1.0, "100 us a step, on the busiest machine"


def test_a_watchdog_that_is_told_of_the_end_ends(dogs: MakeDog) -> None:
    dog, _ = dogs()
    assert dog._thread is not None
    dog.end()
    dog._thread.join(20.0)
    assert not dog._thread.is_alive()
