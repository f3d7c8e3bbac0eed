"""Progress bars of workers on a terminal: in their place, below all other lines, never among the lines of others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.agent.control_sequences import last_state, plain_text, shown_of, without_sequences
from torchelastic.agent.terminal import Terminal
from torchelastic.agent.worker_environment import memory_variables

RED, OFF = "\x1b[31m", "\x1b[0m"


class Seen:
    """What a terminal is told."""

    def __init__(self, *, one_worker: bool = False) -> None:
        self.written: list[str] = []
        self.below: list[str] = []
        self.terminal = Terminal(
            lambda _stream, text: self.written.append(text),
            below=self.below.append,
            can_move=one_worker,
        )


def test_a_bar_is_one_line_below_the_others_and_then_its_last_state() -> None:
    seen = Seen()
    for percent in (10, 50):
        seen.terminal.rewrites(0, "stderr", f"\r{percent} %")
        seen.terminal.said(1, "stdout", "between")
    seen.terminal.said(0, "stderr", "\r50 %\r100 %")
    assert seen.below == ["[worker 0] 10 %", "[worker 0] 50 %", ""]
    assert seen.written == ["[worker 1] between\n"] * 2 + ["[worker 0] 100 %\n"]


def test_of_several_bars_that_of_the_first_worker_is_shown_and_each_end_is_a_line() -> None:
    seen = Seen()
    for worker in (1, 0, 1):
        seen.terminal.rewrites(worker, "stderr", f"\r{worker}: 10 %")
    assert set(seen.below[1:]) == {"[worker 0] 0: 10 %"}
    seen.terminal.said(0, "stderr", "0: 100 %")
    assert seen.below[-1] == "[worker 1] 1: 10 %"
    seen.terminal.ended(1)
    assert seen.below[-1] == ""


def test_where_the_screen_is_no_terminal_only_the_last_state_of_a_bar_is_a_line() -> None:
    written: list[str] = []
    terminal = Terminal(lambda _stream, text: written.append(text))
    terminal.rewrites(0, "stderr", "\r10 %")
    terminal.progresses(3, "step 3")
    terminal.said(0, "stderr", "\r10 %\r100 %")
    terminal.said(0, "stderr", "\r10 %\r      \r")
    terminal.said(0, "stdout", "")
    assert written == ["[worker 0] 100 %\n", "[worker 0] \n"]
    assert not terminal.is_live


def test_lines_of_the_log_are_not_drawn_over() -> None:
    written: list[str] = []
    logged = 0
    terminal = Terminal(
        lambda _stream, text: written.append(text), below=lambda _line: None, can_move=True, logged=lambda: logged
    )
    row = "\x1b[1A\x1b[2Krow"
    terminal.said(0, "stdout", row)
    logged += 1
    terminal.said(0, "stdout", row)
    terminal.said(0, "stdout", row)
    moves, text = "\x1b[1A\x1b[2K", "[worker 0] row\n"
    assert written == [moves, text, text, moves, text]


_PARTS = st.sampled_from(
    ["\r", "a", "b%", " ", RED, OFF, "\x1b[1A", "\x1b[2K", "\x1b[?25l", "\x1b[7;12H", "\x1b]0;t", "é"]
)


@given(st.lists(_PARTS, max_size=12).map("".join))
def test_what_is_shown_of_any_line_moves_nothing(line: str) -> None:
    moves, shown = shown_of(line)
    assert "\r" not in moves + (shown or "")
    assert not any(f"\x1b[{move}" in (shown or "") for move in ("1A", "2K", "?25l", "7;12H"))
    assert plain_text(line) in (
        without_sequences((shown or "").encode()).decode(),
        plain_text(line) if shown is None else "",
    )
    last = last_state(line)
    assert last is None or "\r" not in last


@pytest.mark.parametrize(
    ("given_", "huge_pages", "wanted"),
    [
        ({}, "always [madvise] never\n", {"THP_MEM_ALLOC_ENABLE": "1"}),
        ({"THP_MEM_ALLOC_ENABLE": "0"}, "always [madvise] never\n", {}),
        ({}, "[always] madvise never\n", {}),
        ({}, "always madvise [never]\n", {}),
        ({}, "", {}),
    ],
)
def test_workers_ask_for_huge_pages_where_the_kernel_waits_to_be_asked(
    given_: dict[str, str], huge_pages: str, wanted: dict[str, str]
) -> None:
    assert memory_variables(given_, huge_pages) == wanted
