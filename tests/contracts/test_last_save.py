"""Contract: a job resumes what was saved last, also where a run has gone back to an older step and saved that again."""

from __future__ import annotations

from pathlib import Path

from tests.contracts.facades import KINDS, VARIANTS, do
from tests.process.forked_ranks import run_ranks, values


def test_what_was_saved_last_is_resumed_whatever_its_step(tmp_path: Path) -> None:
    names = [*KINDS, *VARIANTS]
    saved = (20, 11, 30, 30, 12)
    lines = [
        line
        for name in names
        for step in saved
        for line in (("save", name, tmp_path / name, step), ("resume", name, tmp_path / name, 0))
    ]
    (answers,) = values(run_ranks(do, lines, preload=("tests.contracts.facades",)))
    for place, name in enumerate(names):
        mine = answers[2 * len(saved) * place : 2 * len(saved) * (place + 1)]
        assert [answer.get("error") for answer in mine] == [None] * len(mine), name
        assert [answer["value"] for answer in mine[1::2]] == list(saved), name
        assert [text for answer in mine for text in answer["warnings"]] == [], name
