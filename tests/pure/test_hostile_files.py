"""Whatever stands in a field of a file that torchelastic reads back, of any magnitude and depth: taken, or refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.pure.hostile_json import VALUES, with_field
from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.lifetime.manager_state import FILE_NAME, SCHEMA, ManagerState, read_state
from torchelastic.lifetime.sources.metadata import parse_json
from torchelastic.lifetime.sources.notice import InvalidAnswerError
from torchelastic.observe.ledger.host_ledger import HostLedger, ledger_to_dict
from torchelastic.observe.ledger.journal import VERSION, Head, read_journal
from torchelastic.observe.ledger.ledger_events import KINDS, Failure, LedgerFormatError, ReForm, Start, to_dict

WORKER = "h-1/0.0"
#: Files are written anew for each example.
each = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
BOOK = HostLedger().after(Start(at_ns=0, worker=WORKER)).after(Failure(at_ns=3, worker=WORKER, round=1))
HEAD: dict[str, Any] = {
    "kind": "head", "version": VERSION, **asdict(Head("r", "h", 1, 2, 3)), "brought_forward": ledger_to_dict(BOOK),
}  # fmt: skip
EVENT = to_dict(ReForm(at_ns=3, worker=WORKER, round=1, phases_ns={"detect": 1}))


def journal_of(folder: Path, *lines: bytes) -> Path:
    path = folder / "ledger-h.000001.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


@each
@pytest.mark.parametrize("name", HEAD)
@given(value=VALUES)
def test_whatever_a_field_of_a_journals_head_holds(tmp_path: Path, name: str, value: str) -> None:
    path = journal_of(tmp_path, with_field(HEAD, name, value))
    try:
        read_journal([path])
    except LedgerFormatError:
        return


@each
@pytest.mark.parametrize("name", HEAD["brought_forward"])
@given(value=VALUES)
def test_whatever_a_field_of_a_book_holds(tmp_path: Path, name: str, value: str) -> None:
    book = with_field(HEAD["brought_forward"], name, value).decode()
    path = journal_of(tmp_path, with_field(HEAD, "brought_forward", book))
    try:
        read_journal([path])
    except LedgerFormatError:
        return


@each
@pytest.mark.parametrize("name", EVENT)
@given(value=VALUES)
def test_whatever_a_field_of_an_event_holds(tmp_path: Path, name: str, value: str) -> None:
    journal = read_journal([journal_of(tmp_path, json.dumps(HEAD).encode(), with_field(EVENT, name, value))])
    assert journal.damaged + journal.unknown + len(journal.events) == 1
    assert all(type(event) is KINDS[event.kind] and event.at_ns < 2**70 for event in journal.events)
    journal.book()


STATE = {"schema": SCHEMA, **asdict(ManagerState(save_times_s={"disk": (1.0,)}))}


@each
@pytest.mark.parametrize("name", STATE)
@given(value=VALUES)
def test_whatever_a_field_of_an_iteration_managers_state_holds(tmp_path: Path, name: str, value: str) -> None:
    (tmp_path / FILE_NAME).write_bytes(with_field(STATE, name, value))
    try:
        state = read_state(tmp_path)
    except CorruptCheckpointError:
        return
    assert state is not None
    float(state.total_iters), float(state.iter_count), float(state.completed_iters)


@given(VALUES)
def test_whatever_a_metadata_service_answers(value: str) -> None:
    try:
        json.dumps(parse_json("the answer", value, object))
    except InvalidAnswerError:
        return
