"""velastic's page: its snippets run with changed import lines only, and with the lines that ours adds."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "migrating" / "velastic.md"

EXTRA_STATE = """
def get_extra_state():
    return {
        "iter_num": iter_num,
        "best_val_loss": best_val_loss,
        "X": X,
        "Y": Y,
        "scaler_state": scaler.state_dict(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
    }
"""

INITIALIZE = """
from torchelastic.lifetime import IterManager
from torchelastic.checkpoint import BCPState

# Initialize velastic modules
state = BCPState(model=model, optimizer=optimizer, framework="ddp", get_extra_fn=get_extra_state)
iter_mngr = IterManager(total_iters=max_iters, use_torch_compile=compile)
"""

RESUME = """
extra_state = state.maybe_resume_from_ckpt()
if extra_state is not None:
    # Restore extra state
    iter_num = extra_state['iter_num']
    best_val_loss = extra_state['best_val_loss']
    # Restore other states
    X = extra_state['X']
    Y = extra_state['Y']
    scaler.load_state_dict(extra_state['scaler_state'])
    torch.set_rng_state(extra_state['torch_rng_state'])
    torch.cuda.set_rng_state(extra_state['cuda_rng_state'])
"""

LOOP = """
while True:
    # Call at the beginning of each iteration
    iter_mngr.iter()

    # Save checkpoint based on IterManager's suggestion
    if iter_mngr.should_save_ckpt():
        state.save(sync=False)

    # Other training code...
"""

ITER_MANAGER_ONLY = """
from torchelastic.lifetime import IterManager

# Initialize IterManager
iter_mngr = IterManager(total_iters=max_iters, use_torch_compile=compile)

# In the training loop
while True:
    # Call at the beginning of each iteration
    iter_mngr.iter()

    # Save checkpoint based on IterManager's suggestion
    if iter_mngr.should_save_ckpt():
        # Call the framework's existing checkpoint saving logic
        save_checkpoint()

    # Other training code...
"""

#: What the snippets take for granted, and the training code that they leave out; `end` raises when a test has enough.
BEFORE = """
import torch

compile, max_iters = False, 1000
torch.manual_seed(seed)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu")
iter_num, best_val_loss = 0, 1e9
X, Y = torch.randn(16, 4), torch.randn(16, 1)
"""
TRAINING = """
    loss = (model(X) - Y).square().mean()
    X, Y = torch.randn(16, 4), torch.randn(16, 1)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    losses.append((iter_num, loss.item()))
    end()
"""
DEADLINE = "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP"


class Ended(Exception):  # noqa: N818 - the loops of the page have no other end
    """Training is over."""


@pytest.fixture
def gpu_numbers(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Stands for a GPU's generator, where there is no GPU: what it was set to."""
    found: list[torch.Tensor] = []
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.arange(16, dtype=torch.uint8))
        monkeypatch.setattr(torch.cuda, "set_rng_state", found.append)
    return found


def live(iterations: int, seed: int) -> dict[str, Any]:
    """One life of the page's script, ended after so many iterations; its names."""
    names: dict[str, Any] = {"losses": [], "seed": seed}

    def end() -> None:
        if len(names["losses"]) == iterations:
            raise Ended

    names["end"] = end
    with pytest.raises(Ended):
        exec(BEFORE + EXTRA_STATE + INITIALIZE + RESUME + LOOP + TRAINING, names)
    names["state"].close()
    names["iter_mngr"].close()
    return names


def test_the_snippets_save_before_the_deadline_and_the_next_life_has_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_numbers: list[torch.Tensor]
) -> None:
    monkeypatch.chdir(tmp_path)
    # 5 s are in reserve, so it is time to stop; one save is made before that, as none was ever measured
    monkeypatch.setenv(DEADLINE, f"{time.time() + 5:.3f}")
    first = live(40, seed=1)
    assert first["iter_mngr"].should_stop
    assert first["extra_state"] is None
    assert len(list((tmp_path / ".velastic" / "checkpoint").glob("step-*"))) == 1

    monkeypatch.delenv(DEADLINE)
    second = live(20, seed=2)
    resumed = second["extra_state"]["iter_num"]
    assert 0 < resumed < 20
    assert second["losses"] == first["losses"][resumed : resumed + 20]
    if not torch.cuda.is_available():
        assert [numbers.tolist() for numbers in gpu_numbers] == [list(range(16))]


def test_the_manager_alone_asks_for_one_save_of_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(DEADLINE, f"{time.time() + 15:.3f}")
    names: dict[str, Any] = {"saved": [], "max_iters": 1000, "compile": False}

    def end() -> None:
        if names["iter_mngr"].iter_count == 40:
            raise Ended

    names |= {"end": end, "save_checkpoint": lambda: names["saved"].append(names["iter_mngr"].iter_count)}
    with pytest.raises(Ended):
        exec(ITER_MANAGER_ONLY + "    end()\n", names)
    names["iter_mngr"].close()
    assert len(names["saved"]) == 1
    assert names["saved"][0] > 1


def loop_of_our_page(without: str) -> str:
    """The loop in the page's diff, without the lines that begin so: `+` gives theirs, `-` ours."""
    diff = next(
        one for one in re.findall(r"^```diff\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S) if "while" in one
    )
    return "\n".join(line[1:] for line in diff.splitlines() if not line.startswith(without))


def test_our_page_shows_what_changes_in_their_loop() -> None:
    assert loop_of_our_page(without="+").strip() == LOOP.strip()


def test_the_loop_of_our_page_saves_stops_and_asks_for_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_numbers: list[torch.Tensor]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(DEADLINE, f"{time.time() + 5:.3f}")
    loop, comment, end = loop_of_our_page(without="-").partition("    # Other training code...\n")
    names: dict[str, Any] = {"losses": [], "seed": 1, "end": lambda: time.sleep(0.01)}
    with pytest.raises(SystemExit) as ended:
        exec("import sys\n" + BEFORE + EXTRA_STATE + INITIALIZE + RESUME + loop + comment + TRAINING + end, names)
    assert ended.value.code == 75
    assert len(list((tmp_path / ".velastic" / "checkpoint").glob("step-*"))) >= 1
