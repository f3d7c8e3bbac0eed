"""Contract: `torchelastic checkpoint` lists, shows, verifies, converts and prunes what each way has saved."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contracts.facades import FACADES, LENGTH, files_in, weights_at
from tests.contracts.faults import in_child
from torchelastic.checkpoint.command.main import main

#: These are folders of shards, in which the manifest comes last.
OF_SHARDS = [name for name in FACADES if name != "streams"]
SAVED = 7

Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, verb: str, *words: Any) -> tuple[int, str, str]:
    """The exit code, and what is printed."""
    code = main([verb, *map(str, words)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """All of them, wherever they are; also in the stream that a state has written."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, bytes):
        yield torch.load(io.BytesIO(tree), weights_only=True)
    elif isinstance(tree, (dict, list, tuple)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(item)


@pytest.fixture(params=FACADES)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with a checkpoint of each kind in turn."""
    in_child(lambda: FACADES[request.param].save(tmp_path / "saved", SAVED))
    return tmp_path / "saved"


def test_it_is_listed_shown_and_verified(saved: Path, capsys: Capture) -> None:
    code, out, _ = run(capsys, "ls", saved)
    assert (code, len(out.splitlines())) == (0, 2), out
    assert out.splitlines()[1].endswith("complete")
    code, out, _ = run(capsys, "show", "--json", saved)
    shown = json.loads(out)
    assert code == 0
    assert shown["complete"]
    assert shown["tensor_bytes"] >= LENGTH * 8
    code, out, _ = run(capsys, "verify", saved)
    assert code == 0
    assert "intact" in out


def test_convert_gives_what_was_saved(saved: Path, tmp_path: Path, capsys: Capture) -> None:
    code, _, err = run(capsys, "convert", saved, tmp_path / "state.pt", "--to", "torch")
    assert code == 0, err
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert any(torch.equal(one, weights_at(SAVED)) for one in tensors_in(loaded) if one.dtype is torch.float64)


def test_a_changed_byte_is_named(saved: Path, capsys: Capture) -> None:
    largest = files_in(saved)[-1]
    data = bytearray(largest.read_bytes())
    at = data.find(weights_at(SAVED).numpy().tobytes()[-64:])
    assert at > 0
    data[at] ^= 1
    largest.write_bytes(data)
    code, out, _ = run(capsys, "verify", saved)
    assert code == 1
    assert str(largest.parent) in out
    assert largest.name in out


def test_prune_removes_none_that_is_to_stay(saved: Path, capsys: Capture) -> None:
    before = files_in(saved)
    code, out, err = run(capsys, "prune", saved, "--keep-last", 1)
    assert (code, "kept" in out, files_in(saved)) == (0, True, before), err


@pytest.mark.parametrize("name", OF_SHARDS)
def test_a_save_that_is_under_way_is_not_called_damaged(name: str, tmp_path: Path, capsys: Capture) -> None:
    """The shards lie there and the manifest comes last; or the job was stopped before that."""
    folder = tmp_path / "saved"
    in_child(lambda: FACADES[name].save(folder, SAVED))
    (manifest,) = folder.rglob("manifest.json")
    manifest.unlink()
    told = {verb: run(capsys, verb, folder) for verb in ("ls", "verify")}
    for code, out, err in told.values():
        assert "damaged" not in out + err
        if name == "local":
            assert code == 0, "it counts: all its ranks have written it"
            assert FACADES[name].resume(folder) == SAVED, "for its manager, too"
        else:
            assert code > 0, "there is no other"
            assert "not finished: it has no manifest" in out
