"""The example in the usage guide of NVRx's local checkpointing runs as it is written, but for the import lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from torchelastic.checkpoint.local import CkptID

EXAMPLE = """
from torchelastic.checkpoint.local import LocalCheckpointManager
from torchelastic.checkpoint.local import BasicTensorAwareStateDict

# Initialize CheckpointManager with the checkpoint directory
ckpt_manager = LocalCheckpointManager(ckpt_dir)

# Load the latest checkpoint if available
iteration = ckpt_manager.find_latest()
if iteration != -1:
    ta_state_dict, ckpt_part_id = ckpt_manager.load()
    # Use the loaded state_dict to resume training
    model.load_state_dict(ta_state_dict.state_dict)
else:
    # An iteration value of -1 indicates that no local checkpoint was found.
    # In this case, either return an error or initialize the model from scratch.
    print('Starting training from scratch')

# Training loop
while True:
    # Perform a training iteration

    # Save checkpoint if conditions are met
    if save_condition():
        ta_state_dict = BasicTensorAwareStateDict(state_dict)
        ckpt_manager.save(ta_state_dict, iteration, is_async=False)
"""


class Ended(Exception):  # noqa: N818 - the loop of the example has no other end
    """Training is over."""


def train(ckpt_dir: Path, model: torch.nn.Module, weight: float) -> dict[str, Any]:
    """Runs the example for two iterations, of which the second one saves."""
    names: dict[str, Any] = {"ckpt_dir": ckpt_dir, "model": model, "state_dict": model.state_dict()}
    calls: list[int] = []

    def save_condition() -> bool:
        calls.append(len(calls))
        if len(calls) == 3:
            raise Ended
        names["iteration"] = 10 * len(calls)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(weight)
        return len(calls) == 2

    names["save_condition"] = save_condition
    with pytest.raises(Ended):
        exec(EXAMPLE, names)  # it is the point of this test
    names["ckpt_manager"].close()
    return names


def test_the_example_starts_from_scratch_and_then_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(3, 2)
    train(tmp_path, model, 1.0)
    assert capsys.readouterr().out == "Starting training from scratch\n"
    restarted = torch.nn.Linear(3, 2)
    loaded: list[torch.Tensor] = []
    hook: Any = restarted.register_load_state_dict_post_hook
    hook(lambda *_: loaded.append(restarted.weight.detach().clone()))
    names = train(tmp_path, restarted, 2.0)
    assert capsys.readouterr().out == ""
    assert torch.equal(loaded[0], torch.ones(2, 3))
    assert names["ckpt_part_id"] == CkptID(20, 0, "")
