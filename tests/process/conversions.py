"""A state with everything in it, and `torchelastic checkpoint convert` in this process, for its tests."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchelastic.checkpoint.command.main import main
from torchelastic.checkpoint.shards import save_tree

Capture = pytest.CaptureFixture[str]
FORMATS = ("torch", "dcp", "safetensors", "shard")


def trained(*middle: torch.nn.Module) -> tuple[torch.nn.Sequential, torch.optim.Adam]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), *middle, torch.nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def everything() -> dict[str, Any]:
    model, optimizer = trained()
    tied = torch.randn(3)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "bf16": torch.randn(3).bfloat16(),
        "fp8": torch.randn(5).to(torch.float8_e4m3fn),
        "fp8 too": torch.randn(2, 2).to(torch.float8_e5m2),
        "complex": torch.randn(2, dtype=torch.complex64),
        "conjugated": torch.randn(2, dtype=torch.complex64).conj(),
        "bool": torch.tensor([True, False]),
        "uint16": torch.tensor([65535], dtype=torch.uint16),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3),
        "tied": tied,
        "tied too": tied,
        "a/b~c.d": torch.ones(1),
        "view": tied[1:],
        "expanded": torch.ones(1).expand(5),
        "channels_last": torch.randn(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "tuple": (torch.ones(2), 3),
        "list": [1, torch.ones(1), {"deep": [torch.zeros(2)]}],
        "ordered": OrderedDict(z=1, a=2),
        "plain": [None, True, 2**70, 1.5, float("inf"), "text", b"bytes", 1 + 2j, {1, 2}, torch.Size([2])],
        "long bytes": bytes(range(256)) * 20,
        "nothing": {},
        "keys": {1: "int", "1x": "text", (1, 2): "tuple", None: "none"},
    }


def assert_same(left: Any, right: Any, place: str = "") -> None:
    assert type(left) is type(right), place
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), place
        ours, theirs = (t.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for t in (left, right))
        assert torch.equal(ours, theirs), place
    elif isinstance(left, dict):
        assert list(left) == list(right), place
        for key in left:
            assert_same(left[key], right[key], f"{place}/{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), place
        for index, pair in enumerate(zip(left, right, strict=True)):
            assert_same(*pair, f"{place}/{index}")
    elif isinstance(left, np.ndarray):
        assert np.array_equal(left, right), place
    else:
        assert left == right, place


def convert(source: Path, target: Path, to: str, *more: str) -> None:
    assert main(["convert", str(source), str(target), "--to", to, "--allow-pickles", *more]) == 0


def refusal(capsys: Capture, *words: object) -> str:
    """What the command says when it refuses; exactly one line, and nothing is left behind."""
    capsys.readouterr()
    assert main(["convert", *map(str, words)]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert said.err.count("\n") == 1
    return said.err


def store_everything(folder: Path) -> dict[str, Path]:
    """The same state in each format."""
    save_tree(folder / "first.shard", everything(), meta={"step": 7})
    for to in FORMATS:
        convert(folder / "first.shard", folder / to, to)
    return {to: folder / to for to in FORMATS}
