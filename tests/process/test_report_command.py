"""`torchelastic report` with journals on disk: whole, torn, missing, of another version, copied, of several runs."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.pure.report_runs import Host, killed_run
from torchelastic.launch.main import main
from torchelastic.observe.ledger.host_ledger import HostLedger
from torchelastic.observe.ledger.journal import JournalWriter

ROOT = Path(__file__).parents[2]


def written(folder: Path, hosts: Sequence[Host], max_bytes: int = 2**20, keep: int = 8) -> Path:
    """The journals of these hosts, by the class that agents write them with."""
    for host in hosts:
        writer = JournalWriter(folder, f"ledger-{host.name}-a1", host.head(), max_bytes=max_bytes, keep=keep)
        book = HostLedger()
        for event in host.events:
            writer.write(event, book)
            book = book.after(event)
        writer.close()
    return folder


def file_of(folder: Path, host: str) -> Path:
    (path,) = folder.glob(f"ledger-{host}-*.jsonl")
    return path


def reported(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, object]:
    """What the command says as JSON."""
    assert main(["report", *map(str, words), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert isinstance(document, dict)
    return document


def lacks(document: dict[str, object]) -> str:
    sentences = document["lacks"]
    assert isinstance(sentences, list)
    return " ".join(sentences)


def test_the_command_writes_the_page_where_it_is_told_to_and_says_where(tmp_path: Path) -> None:
    logs = written(tmp_path / "logs", killed_run())
    words = [sys.executable, "-m", "torchelastic.launch", "report", str(logs)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "report: report.html\n", "")
    page = tmp_path / "report.html"
    text = page.read_text(encoding="utf-8")
    assert text.endswith("</html>\n")
    assert all(name in text for name in ("alpha/0.0", "beta/1.1", "run-1"))
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(page.stat().st_mode) == 0o666 & ~mask
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "report.html"]


def test_a_torn_line_a_damaged_line_and_one_of_a_later_version_are_said_and_the_rest_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = written(tmp_path, killed_run())
    path = file_of(logs, "beta")
    lines = path.read_bytes().splitlines(keepends=True)
    extra = [b'{"kind":"of tomorrow","at_ns":1}\n', b"rubbish\n", b"rubbish\n"]
    path.write_bytes(b"".join([*lines[:20], *extra, *lines[20:-1], lines[-1][:-9]]))
    document = reported(capsys, logs)
    assert "Skipped in ledger-beta-a1: 2 damaged lines." in lacks(document)
    assert "1 line of a kind that a later torchelastic has added" in lacks(document)
    assert "The last line of ledger-beta-a1 is torn" in lacks(document)
    assert "beta/1.1 is without an end" in lacks(document)
    assert document["sums_are_exact"] is True
    assert document["is_over"] is False


def test_what_lacks_of_another_run_in_the_folder_is_not_said_of_this_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = written(tmp_path, killed_run())
    (other,) = killed_run("run-2")[:1]
    other.name = "gamma"
    written(tmp_path, [other])
    path = file_of(logs, "gamma")
    path.write_bytes(path.read_bytes()[:-9])
    assert "gamma" not in lacks(reported(capsys, logs, "--run-id", "run-1"))
    assert "The last line of ledger-gamma-a1 is torn" in lacks(reported(capsys, logs, "--run-id", "run-2"))
    assert main(["events", "--journal", str(logs), "--rdzv-id", "run-1"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("damage", ["later version", "no head", "no book"])
def test_a_journal_that_cannot_be_read_is_named_and_the_others_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    logs = written(tmp_path, killed_run())
    path = file_of(logs, "beta")
    first, *rest = path.read_text().splitlines(keepends=True)
    head = json.loads(first)
    head.update({"later version": {"version": 99}, "no head": {"kind": "x"}, "no book": {"brought_forward": 1}}[damage])
    path.write_text("".join([json.dumps(head) + "\n", *rest]))
    document = reported(capsys, logs)
    assert "ledger-beta-a1 is skipped" in lacks(document)
    assert "Round 1 had 4 workers, and the journals know of 2" in lacks(document)
    assert main(["report", str(path)]) == 1
    error = capsys.readouterr().err
    assert str(path) in error
    assert "is skipped" in error


def test_without_a_journal_the_exit_code_is_1_and_the_error_says_what_to_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 1
    assert "--log-dir" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nowhere")]) == 1
    assert capsys.readouterr().err == f"torchelastic report: No such file or directory: {tmp_path}/nowhere\n"
    (tmp_path / "a.txt").write_text("no journal\n")
    assert main(["report", str(tmp_path / "a.txt")]) == 1
    assert "a.txt" in capsys.readouterr().err
    written(tmp_path, killed_run())
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "no" / "such.html")]) == 1
    assert capsys.readouterr().err == (
        f"torchelastic report: -o {tmp_path}/no/such.html cannot be written: No such file or directory\n"
    )
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(tmp_path), "--compare-run-id", "x"])
    assert stopped.value.code == 2


def test_journals_of_several_runs_need_a_choice_and_can_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = written(tmp_path / "a", killed_run("monday"))
    for path in written(tmp_path / "b", killed_run("tuesday")).iterdir():
        path.rename(logs / path.name.replace("-a1", "-b2"))
    assert main(["report", str(logs)]) == 1
    assert "--run-id (of --compare: --compare-run-id): monday, tuesday" in capsys.readouterr().err
    page = tmp_path / "page.html"
    words = ["--run-id", "monday", "--compare", str(logs), "--compare-run-id", "tuesday", "-o", str(page)]
    assert main(["report", str(logs), *words]) == 0
    assert "the other one: tuesday" in page.read_text()
    capsys.readouterr()
    assert reported(capsys, logs, *words[:-2])["run_id"] == "monday"


def test_a_page_that_cannot_be_written_leaves_the_one_before_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logs, page = written(tmp_path / "logs", killed_run()), tmp_path / "report.html"
    page.write_text("before")

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(Path, "replace", full)
    assert main(["report", str(logs), "-o", str(page)]) == 1
    assert "No space left" in capsys.readouterr().err
    assert page.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "report.html"]
