"""Contract: a job resumes what was saved last, also where a run has gone back to an older step and saved that again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.contracts import facades
from tests.contracts.facades import Facade, Local
from tests.contracts.faults import in_child
from torchelastic.checkpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager

FACADES: Mapping[str, Facade] = {
    **facades.FACADES,
    "local, older ones kept": Local(keep=4),
}
SAVED = [20, 11, 30, 30, 12]


@pytest.mark.parametrize("name", FACADES)
def test_what_was_saved_last_is_resumed_whatever_its_step(name: str, tmp_path: Path) -> None:
    facade = FACADES[name]

    def resumed(step: int) -> int | None:
        facade.save(tmp_path / "saved", step)
        return facade.resume(tmp_path / "saved")

    assert in_child(lambda: [resumed(step) for step in SAVED]).value == SAVED


def test_the_local_manager_that_saves_says_so_at_once(tmp_path: Path) -> None:
    manager = LocalCheckpointManager(tmp_path, keep=4)
    told = []
    for step in SAVED:
        manager.save(BasicTensorAwareStateDict({"weights": torch.zeros(1)}), step)
        told.append(manager.latest_iteration)
    manager.close()
    assert told == SAVED
