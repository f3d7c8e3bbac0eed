"""The generators of Python, numpy, torch and CUDA, as a tree of plain values and tensors, and back."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def capture() -> dict[str, Any]:
    """The generators of this process as they are now; numpy's and CUDA's only where they are in use."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    if "numpy" in sys.modules:
        import numpy as np

        state["numpy"] = np.random.get_state()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no types here
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore(state: dict[str, Any]) -> str | None:
    """Back to what `capture` returned.

    Returns:
        What could not be restored, in words; None if everything was.
    """
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy as np

        np.random.set_state(state["numpy"])
    saved = state.get("cuda", [])
    here = torch.cuda.device_count() if saved and torch.cuda.is_available() else 0
    if len(saved) != here:
        return f"the random numbers of CUDA: {len(saved)} GPU(s) were visible when it was saved, and {here} are now"
    if saved:
        torch.cuda.set_rng_state_all(saved)
    return None
