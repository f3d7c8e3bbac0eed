"""What `torchelastic top` shows of a run, on wide and narrow, tall and short terminals."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.pure.status_runs import NOW_S, a_host, a_run
from torchelastic.launch.status import show
from torchelastic.observe.ledger.accounts import Account
from torchelastic.observe.ledger.figures import Seen
from torchelastic.observe.status.run_screen import Screen, cells_of
from torchelastic.observe.status.run_status import EventLine, HostStatus, RunStatus
from torchelastic.rendezvous.records import NO_ROUND, Round, RoundState


def drawn(status: RunStatus, width: int = 120, *, colours: bool = False, **settings: Any) -> list[str]:
    file = io.StringIO()
    console = Console(
        record=True, width=width, height=40, file=file, force_terminal=colours, legacy_windows=False,
        color_system="truecolor" if colours else None,
    )  # fmt: skip
    console.print(Screen(status, local_time=time.gmtime, **settings))
    return console.export_text(styles=False).rstrip("\n").splitlines()


def test_a_wide_terminal_shows_everything() -> None:
    lines = drawn(a_run(a_host("node-1", 0, 1), a_host("node-2", 2)))
    text = "\n".join(lines)
    said = "run job7 running for 3.0 min round 4 world size 3 step 1200 31.2 steps/s loss 0.125"
    assert " ".join(lines[0].split()) == said
    assert lines[1] == "a newcomer"
    head = next(line for line in lines if line.startswith("rank"))
    assert head.split() == ["rank", "host", "step", "steps/s", "now", "loss", "restarts", "pid", "since"]
    row = next(line for line in lines if line.split()[:1] == ["2"])
    assert row.split() == ["2", "node-2", "1200", "31.2", "productive", "2.125", "0", "4002", "2.0", "h"]
    assert "productive 93.0 %" in text
    assert "data_wait 5.0 %" in text
    assert "was / attainable:  goodput 93.0 / 98.0 %  ettr 93.0 / 98.0 %" in text
    assert "22:12:20  node-1-1/0 (rank 0): saved step 0" in text


def test_less_than_all_never_looks_like_all() -> None:
    amounts = tuple({Account.PRODUCTIVE: 99_999, Account.DETECT: 1}.get(account, 0) * 10**9 for account in Account)
    seen = Seen(10**14, 10**14, amounts, 0, 1, 1200)
    text = "\n".join(drawn(a_run(a_host("node-1", 0, seen=seen))))
    assert "productive > 99.9 %  D detect < 0.1 %" in text
    assert "goodput > 99.9 / 100 %" in text


def test_a_run_that_has_no_group_yet_waits_and_one_that_is_over_has_its_times_in_journals() -> None:
    lines = drawn(replace(a_run(a_host("node-1", 0)), round=NO_ROUND))
    assert lines[0].split("  ")[:2] == ["run job7", "waits for workers"]
    assert lines[1].startswith("no group yet: it forms when enough workers have come")
    over = replace(a_run(), round=Round(4, RoundState.CLOSED), members=())
    text = "\n".join(drawn(over))
    assert "yet" not in text
    assert "torchelastic report DIR" in text


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal_and_ranks_hosts_and_steps_are_always_there(width: int) -> None:
    lines = drawn(a_run(a_host("node-1", 0, 1), a_host("node-2", 2)), width)
    assert max(map(len, lines)) <= width
    rows = [line.split() for line in lines]
    for rank, host in ((0, "node-1"), (1, "node-1"), (2, "node-2")):
        assert any(row[:3] == [str(rank), host, "1200"] for row in rows)
    assert ("pid" in "\n".join(lines)) == (width >= 100)


LONG = "trainer-worker-7d9f8b6c5-abcde.training.svc.cluster.local"


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_of_a_row_that_is_too_wide_the_name_of_the_host_is_cut_and_no_number(width: int) -> None:
    rows = [line.split() for line in drawn(a_run(a_host(LONG, 0, 1), a_host("node-2", 2)), width) if "…" in line]
    assert [row[0] for row in rows if row[0].isdecimal()] == ["0", "1"]
    assert all(row[1].startswith("trainer") and row[2] == "1200" for row in rows if row[0].isdecimal())
    assert ["rank", "host", "step"] in [line.split()[:3] for line in drawn(a_run(a_host(LONG, 0)), width)]


def test_in_a_pipe_nothing_is_cut_unless_it_is_said_how_wide_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    show(a_run(a_host(LONG, 0)))
    lines = capsys.readouterr().out.splitlines()
    assert "…" not in "".join(lines)
    row = next(line.split() for line in lines if line.split()[:2] == ["0", LONG])
    assert row[2:] == ["1200", "31.2", "productive", "0.125", "0", "4000", "2.0", "h"]
    assert f"{LONG}-1/0 (rank 0): saved step 3" in lines[-1]
    assert max(map(len, lines)) < 200, "the bar neither"
    monkeypatch.setenv("COLUMNS", "70")
    show(a_run(a_host(LONG, 0)))
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 70


@pytest.mark.parametrize("height", [12, 15, 20, 24, 40, 60])
@pytest.mark.parametrize("hosts", [1, 6, 40])
@pytest.mark.parametrize("width", [50, 120])
def test_it_fits_into_the_height_and_says_what_is_left_out(height: int, hosts: int, width: int) -> None:
    status = a_run(*(a_host(f"node-{number}", 2 * number, 2 * number + 1) for number in range(hosts)))
    lines = drawn(status, width, height=height, footer="q: quit")
    assert len(lines) <= height
    assert lines[-1].startswith("q: quit")
    shown = sum("productive" in line and "node-" in line for line in lines)
    assert shown >= 1
    left_out = 2 * hosts - shown
    assert (f"and {left_out} more" in "\n".join(lines)) == bool(left_out)
    if len(lines) < height:
        assert not left_out, "there is place"
        assert sum("saved step" in line for line in lines) == min(4 * hosts, 20)


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**15), min_size=1, max_size=9), st.integers(1, 300))
def test_the_cells_of_a_bar_fill_it_and_no_account_with_time_is_without_one(amounts: list[int], width: int) -> None:
    cells = cells_of(amounts, width)
    present = sum(map(bool, amounts))
    assert sum(cells) == (width if 0 < present <= width else 0)
    if 0 < present <= width:
        assert [bool(cell) for cell in cells] == [bool(amount) for amount in amounts]
        for amount, cell in zip(amounts, cells, strict=True):
            assert cell <= width * amount / sum(amounts) + 1.000001 or cell == 1


def test_an_etcd_that_is_away_and_hosts_that_are_silent_are_named() -> None:
    silent = a_host("node-2", 1, at_s=NOW_S - 90)
    never = HostStatus(host="node-3", incarnation="x", at_s=0.0)
    status = a_run(a_host("node-1", 0, is_etcd_away=True), silent, never)
    text = "\n".join(drawn(status, away_s=42.0))
    assert "etcd has not answered for 42 s" in text
    assert "silent: node-2 for 1.5 min, node-3 (has reported nothing)" in text
    assert "etcd is unreachable from: node-1" in text
    assert "etcd" not in "\n".join(drawn(a_run(a_host("node-1", 0))))


def test_what_a_terminal_would_obey_is_written_as_an_escape() -> None:
    event = EventLine(at_s=NOW_S, host="\x1b[2Jh", kind="loss", text="\x1b]0;evil\x07")
    status = a_run(a_host("node\x1b[31m", 0, events=(event,)), because="\x1b[2J")
    text = "\n".join(drawn(replace(status, run_id="job\x1b7")))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\\x1b[2J" in text
