"""What the simulator reports: a table for people, a document for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from torchelastic.launch.simulation_of_instances.instance import write_whole
from torchelastic.launch.simulation_of_instances.lives import How, Life, describe_exit, given_up_s, steps_lost, totals
from torchelastic.launch.simulation_of_instances.simulation import Order, Outcome

#: The layout of the document.
SCHEMA = 1
_TITLES = ("life", "ended", "exit", "used s", "given up s", "from step", "to step", "saved", "steps lost")
#: Where there is no terminal: as wide as the table ever gets.
_WIDTH = 110


def document(order: Order, outcome: Outcome) -> dict[str, Any]:
    """Everything that is known, for `json.dumps`; see docs/simulate-esi.md."""
    used_s, all_given_up_s, lost = totals(outcome.lives)
    return {
        "schema": SCHEMA,
        "command": order.command,
        "timeout_s": order.timeout_s,
        "grace_s": order.grace_s,
        "finished": bool(outcome.lives) and outcome.lives[-1].how is How.FINISHED,
        "goes_on": outcome.verdict.goes_on,
        "reason": outcome.verdict.reason,
        "used_s": round(used_s, 3),
        "given_up_s": round(all_given_up_s, 3),
        "steps_lost": lost,
        "lives": [
            _life(number, life, of_it)
            for number, (life, of_it) in enumerate(zip(outcome.lives, steps_lost(outcome.lives), strict=True), 1)
        ],
    }


def write_report(path: Path, order: Order, outcome: Outcome) -> None:
    """Puts the document into a file, in one step. Raises OSError."""
    write_whole(path, json.dumps(document(order, outcome), indent=1, allow_nan=False) + "\n")


def rows(lives: Sequence[Life]) -> list[tuple[str, ...]]:
    """The lines of the table, with the sums last."""
    shown = [
        (
            str(number),
            life.how.value,
            describe_exit(life.ending.exit_code).removeprefix("exit code "),
            f"{life.ending.used_s:.1f}",
            f"{given_up_s(life):.1f}",
            _text(life.told.resumed_step),
            _text(life.told.committed_step),
            _text(life.told.saved_step),
            _text(lost),
        )
        for number, (life, lost) in enumerate(zip(lives, steps_lost(lives), strict=True), 1)
    ]
    used_s, all_given_up_s, lost = totals(lives)
    return [*shown, ("all", "", "", f"{used_s:.1f}", f"{all_given_up_s:.1f}", "", "", "", _text(lost))]


def print_table(outcome: Outcome, stream: TextIO) -> None:
    """The table, with the verdict under it."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in _TITLES:
        table.add_column(title, justify="left" if title in ("life", "ended", "exit") else "right", overflow="fold")
    for row in rows(outcome.lives):
        table.add_row(*row)
    console = Console(file=stream, width=None if stream.isatty() else _WIDTH, highlight=False, markup=False)
    console.print(table)
    console.print(f"simulate-esi: {outcome.verdict.reason}", soft_wrap=True)


def _life(number: int, life: Life, lost: int | None) -> dict[str, Any]:
    return {
        "life": number,
        "how": life.how.name.lower(),
        "exit_code": life.ending.exit_code,
        "used_s": round(life.ending.used_s, 3),
        "given_up_s": round(given_up_s(life), 3),
        "killed_processes": life.ending.killed,
        "resumed_step": life.told.resumed_step,
        "committed_step": life.told.committed_step,
        "saved_step": life.told.saved_step,
        "total_steps": life.told.total_steps,
        "steps_lost": lost,
    }


def _text(value: int | None) -> str:
    return "?" if value is None else str(value)
