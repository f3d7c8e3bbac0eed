"""How lines of the log look: of the agent, of its workers, and of the events of a host."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from torchelastic.agent.event_log import EventLog, events_log
from torchelastic.log_lines import (
    FORMAT_VARIABLE,
    JsonFormatter,
    Position,
    fields,
    json_line,
    set_up_worker_log,
)
from torchelastic.observe.ledger.counters import Counters
from torchelastic.observe.ledger.ledger_events import (
    ComputesWrong,
    Counted,
    End,
    Failure,
    Join,
    LedgerEvent,
    MayHang,
    Save,
    Skipped,
    Start,
    StoreOutage,
    Straggler,
    to_dict,
)
from torchelastic.observe.ledger.meter import Meter

S = 10**9


def documents(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def a_record(message: str = "it is %s", *args: object, **more: Any) -> logging.LogRecord:
    return logging.getLogger("torchelastic.x").makeRecord(
        "torchelastic.x", logging.WARNING, __file__, 1, message, args or ("so",), None, extra=more or None
    )


# --- a line -----------------------------------------------------------------------------------------------------------


def test_a_json_line_says_what_a_line_for_people_says_and_where_it_was() -> None:
    formatter = JsonFormatter(lambda: Position(1, 4, 12), host="a")
    line = formatter.format(a_record(**fields(round=5, more=[1, float("nan")])))
    document = json.loads(line)
    assert "\n" not in line
    assert document.pop("at_s") > 0
    assert document == {
        "host": "a", "level": "WARNING", "kind": "log", "logger": "torchelastic.x", "text": "it is so",
        "rank": 1, "round": 5, "step": 12, "more": [1, None],
    }  # fmt: skip
    assert "rank" not in json.loads(JsonFormatter().format(a_record())), "an agent has none"


def test_a_json_line_is_one_line_whatever_is_in_it() -> None:
    text = 'a\n"b"\u2028\ud800 🏖'
    assert json_line({"text": text}).isascii()
    assert json.loads(json_line({"text": text})) == {"text": text}
    try:
        raise KeyError("x")
    except KeyError:
        record = a_record()
        record.exc_info = __import__("sys").exc_info()
    assert json.loads(JsonFormatter().format(record))["traceback"].endswith("KeyError: 'x'")


# --- of a worker ------------------------------------------------------------------------------------------------------


@contextmanager
def new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Standard error, and loggers as in a new process; no fixture, for pytest adds handlers of its own after those."""
    logger, stream = logging.getLogger("torchelastic"), io.StringIO()
    before = (logger.handlers[:], logger.propagate)
    logger.handlers[:], logger.propagate = [], True  # whatever tests before this one have left
    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr", stream)
        patch.setattr(logging.getLogger(), "handlers", [])
        yield stream
    logger.handlers[:], logger.propagate = before


def test_a_workers_line_says_its_rank_round_and_step_until_the_script_sets_up_its_own_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meter, own = Meter(0), io.StringIO()
    log = logging.getLogger("torchelastic.train_loop")
    with new_process(monkeypatch) as screen:
        for _ in range(2):
            set_up_worker_log(meter.position, {FORMAT_VARIABLE: "human"})
        log.warning("not in a group yet")
        meter.entered(4, 1, 2)
        meter.synchronized(12)
        log.warning("failure %d", 1)
        log.info("nobody wants to know")
        logging.getLogger().addHandler(logging.StreamHandler(own))
        log.warning("the script's own")
    assert screen.getvalue().splitlines() == [
        "WARNING not in a group yet", "WARNING rank 1, round 4, step 12: failure 1",
    ]  # fmt: skip
    assert own.getvalue() == "the script's own\n"


def test_as_json_a_workers_lines_are_json_whatever_the_script_sets_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_process(monkeypatch) as screen:
        set_up_worker_log(lambda: Position(1, 4, 12), {FORMAT_VARIABLE: "json"})
        logging.getLogger().addHandler(logging.StreamHandler(screen))
        logging.getLogger("torchelastic.train_loop").warning("failure 1")
    (document,) = documents(screen.getvalue())
    assert (document["kind"], document["rank"], document["round"], document["step"]) == ("log", 1, 4, 12)


# --- events -----------------------------------------------------------------------------------------------------------

STORY: list[LedgerEvent] = [
    Start(at_ns=1 * S, worker="a-77/0.0"),
    Start(at_ns=1 * S, worker="a-77/1.1"),
    Join(at_ns=2 * S, worker="a-77/0.0", rank=0, round=4, world_size=2, is_first=True),
    Join(at_ns=2 * S, worker="a-77/1.1", rank=1, round=4, world_size=2, is_first=True),
    Counted(at_ns=2 * S, worker="a-77/0.0", tally=Counters.begun(0)),
    Save(at_ns=3 * S, worker="a-77/0.0", rank=0, round=4, step=12),
    End(at_ns=4 * S, worker="a-77/1.1", rank=1, round=4, step=12, exit_code=-9, cause="killed by SIGKILL"),
    Failure(at_ns=5 * S, worker="a-77/0.0", rank=0, round=4, step=12, cause="reset"),
    StoreOutage(at_ns=6 * S),
]


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[logging.LogRecord]]:
    """What is logged of events, of every level."""
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", found.append)
    before = events_log.level
    events_log.addHandler(handler)
    events_log.setLevel(logging.DEBUG)
    yield found
    events_log.removeHandler(handler)
    events_log.setLevel(before)


def test_events_are_lines_with_rank_round_and_step_and_of_the_time_at_which_they_happened(
    records: list[logging.LogRecord],
) -> None:
    log = EventLog("a")
    for event in STORY:
        log.record(100.0 + event.at_ns / S, event)
    assert records == [], "what several workers tell of one moment may still come"
    log.flush()
    assert [(record.created, record.levelname, record.getMessage()) for record in records] == [
        (101.0, "INFO", "2 workers: started"),
        (102.0, "INFO", "2 workers: joined round 4, world size 2 (round 4)"),
        (103.0, "DEBUG", "worker 0 (rank 0, round 4, step 12): saved step 12, training stopped for 0 s"),
        (104.0, "WARNING", "worker 1 (start 2, rank 1, round 4, step 12): lost, signal 9: killed by SIGKILL"),
        (105.0, "WARNING", "worker 0 (rank 0, round 4, step 12): the step after 12 was undone, 0 s of work: reset"),
        (106.0, "WARNING", "etcd is unreachable, training goes on as long as no worker is lost"),
    ]
    log.flush()
    assert len(records) == 6, "each is told once"


def test_for_programs_each_event_is_told_at_once_with_all_that_it_tells(records: list[logging.LogRecord]) -> None:
    log = EventLog("a", each=True)
    told = [event for event in STORY if not isinstance(event, Counted)]
    for number, event in enumerate(told, start=1):
        log.record(100.0 + event.at_ns / S, event)
        assert len(records) == number
    lines = [json.loads(JsonFormatter(host="a").format(record)) for record in records]
    assert [line["kind"] for line in lines] == [event.kind for event in told]
    assert [(line["worker"], line["rank"], line["round"], line["step"]) for line in lines] == [
        (event.worker, event.rank, event.round, event.step) for event in told
    ]
    assert [line["event"] for line in lines] == [to_dict(event) for event in told]
    assert lines[5]["text"] == "lost, signal 9: killed by SIGKILL"


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize(
    "event",
    [
        Skipped(at_ns=0, worker="a-1/0.0"),
        Straggler(at_ns=0, worker="a-1/0.0", relative_percent=10.0),
        MayHang(at_ns=0, worker="a-1/0.0", for_s=2.0, bound_s=3.0),
        ComputesWrong(at_ns=0, worker="a-1/0.0", cause="the gradients differ"),
    ],
    ids=lambda event: event.kind,
)
def test_what_the_screens_mark_is_a_warning_in_the_log(
    event: LedgerEvent, each: bool, records: list[logging.LogRecord]
) -> None:
    log = EventLog("a", each=each)
    log.record(100.0, event)
    log.flush()
    assert [record.levelname for record in records] == ["WARNING"]
