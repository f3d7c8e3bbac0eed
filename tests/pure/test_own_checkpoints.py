"""Which of a framework's own checkpoints are said not to fit a run that goes on from an older one."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchelastic.adapters.in_process.own_checkpoints import say_which_do_not_fit


def test_newer_ones_and_a_best_one_that_is_gone_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "kept").mkdir()
    found = {"checkpoint-30": 30, "checkpoint-20": 20, "checkpoint-10": 10}
    say_which_do_not_fit("the Trainer", 10, found, [str(tmp_path / "kept"), str(tmp_path / "gone"), "", "s3://b/gone"])
    newer, gone = caplog.messages
    assert "the Trainer's own these are newer: checkpoint-20, checkpoint-30. They" in newer
    assert f"not there any more: {tmp_path / 'gone'}. The steps" in gone


def test_nothing_is_said_where_all_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    say_which_do_not_fit("Lightning", 10, {"a.ckpt": 10}, [str(tmp_path)])
    assert not caplog.messages
