"""Contract: what any of the five has saved, no other deletes, hides, calls damaged or starts afresh beside."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.facades import KINDS, VARIANTS, Facade, do
from tests.process.forked_ranks import run_ranks, values

READERS: Mapping[str, tuple[str, Facade]] = {**{name: (name, facade) for name, facade in KINDS.items()}, **VARIANTS}
PAIRS = [(writer, reader) for writer in KINDS for reader, (kind, _) in READERS.items() if kind != writer]
SAVED = 1234


def run(*lines: tuple[str, str, Path, int]) -> list[dict[str, Any]]:
    """Does it all in one process, which ends before this returns."""
    (answer,) = values(run_ranks(do, lines))
    return list(answer)


def name_of(what: str, pair: tuple[str, str]) -> str:
    """A folder for a writer and a reader."""
    return "-".join((what, *pair)).replace(" ", "-")


def digests(folder: Path) -> dict[str, str]:
    """Every visible file below a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    visible = {str(path.relative_to(folder)): path for path in files}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in visible.items()
        if not any(part.startswith(".") for part in Path(name).parts)
    }


@dataclass(frozen=True)
class Answers:
    """What a job of one kind got in a folder with what another has saved, and what was there before and after."""

    alone: Mapping[str, Any]  # it resumes, and saves
    mixed: list[dict[str, Any]]  # beside a checkpoint of its own: it resumes, saves twice, and both resume


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, str], Answers]:
    root = tmp_path_factory.mktemp("kinds")
    saved = [("save", name, root / name, SAVED) for name in KINDS]
    own = [("save", name, root / name, 40) for name in VARIANTS]
    assert [one for one in run(*saved, *own) if "value" not in one] == []
    found = {}
    for reader in READERS:
        lines: list[tuple[str, str, Path, int]] = []
        pairs = [(writer, other) for writer, other in PAIRS if other == reader]
        for pair in pairs:
            alone, mixed = root / name_of("alone", pair), root / name_of("mixed", pair)
            shutil.copytree(root / pair[0], alone)
            shutil.copytree(root / reader, mixed)
            shutil.copytree(root / pair[0], mixed, dirs_exist_ok=True)
            lines += [("resume", reader, alone, 0), ("save", reader, alone, 1)]
            lines += [("resume", reader, mixed, 0), ("save", reader, mixed, 41), ("save", reader, mixed, 42)]
        answered = run(*lines)
        after = run(*(("resume", who, root / name_of("mixed", pair), 0) for pair in pairs for who in (reader, pair[0])))
        for number, pair in enumerate(pairs):
            resumed, saving, *mine = answered[5 * number : 5 * number + 5]
            before, now = digests(root / pair[0]), digests(root / name_of("alone", pair))
            alone_facts = {"resumed": resumed, "saving": saving, "before": before, "now": now}
            found[pair] = Answers(alone_facts, [*mine, *after[2 * number : 2 * number + 2]])
    return found


@pytest.mark.long
@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_a_job_that_finds_only_what_another_kind_has_saved_does_not_start_afresh(
    answers: Mapping[tuple[str, str], Answers], writer: str, reader: str
) -> None:
    resumed = answers[writer, reader].alone["resumed"]
    assert "error" in resumed, f"it resumed {resumed['value']}"
    assert "CheckpointError" in resumed["kinds"], resumed
    assert "CorruptCheckpointError" not in resumed["kinds"], "nothing is damaged"
    assert KINDS[writer].words in resumed["error"], "whose it is"
    assert name_of("alone", (writer, reader)) in resumed["error"], "where it is"
    assert "torchelastic checkpoint ls" in resumed["error"], "what to do"


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_a_save_into_the_folder_of_another_kind_removes_and_changes_nothing(
    answers: Mapping[tuple[str, str], Answers], writer: str, reader: str
) -> None:
    facts = answers[writer, reader].alone
    assert facts["now"] == facts["before"]
    assert KINDS[writer].words in facts["saving"]["error"]
    assert "CheckpointError" in facts["saving"]["kinds"]


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_where_two_kinds_share_a_folder_each_resumes_its_own_and_is_told_of_the_other(
    answers: Mapping[tuple[str, str], Answers], writer: str, reader: str
) -> None:
    resumed, first, second, mine, others = answers[writer, reader].mixed
    assert resumed.get("value") == (40 if reader in VARIANTS else SAVED), resumed
    assert any(KINDS[writer].words in text for text in resumed["warnings"]), resumed["warnings"]
    assert "value" in first, first
    assert "value" in second, second
    assert mine.get("value") == 42, mine
    assert others.get("value") == SAVED, "what the other has saved was pruned or hidden"
