"""Contract: nothing in a checkpoint is executed when it is read, whoever wrote it, unless the reader allows that."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

from tests.contracts.facades import FACADES, KINDS, Memory, Model, files_in, outcome, weights_at
from tests.contracts.faults import in_child
from torchelastic.checkpoint import BCPState
from torchelastic.checkpoint.command.main import main
from torchelastic.checkpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager
from torchelastic.checkpoint.memory import CheckpointContainerId

SAVED = 7


class Bomb:
    """Leaves a folder behind where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = str(trace)

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.trace,)


def forms_of(bomb: Bomb) -> Iterator[tuple[str, bytes]]:
    """A pickle as it is, and as torch saves it, now and long ago."""
    yield "pickle", pickle.dumps(bomb)
    for name, as_zip in (("torch.save", True), ("torch.save of 2020", False)):
        stream = io.BytesIO()
        torch.save(bomb, stream, _use_new_zipfile_serialization=as_zip)
        yield name, stream.getvalue()


@pytest.mark.parametrize("name", FACADES)
def test_a_pickle_in_place_of_any_file_is_not_run(name: str, tmp_path: Path) -> None:
    facade, folder, trace = FACADES[name], tmp_path / "saved", tmp_path / "run"
    in_child(lambda: facade.save(folder, SAVED))
    files = files_in(folder)
    assert files
    for path in files:
        whole = path.read_bytes()
        for form, content in forms_of(Bomb(trace)):
            path.write_bytes(content)
            found = outcome(lambda: facade.resume(folder))
            for verb in ("ls", "show", "verify"):
                main([verb, str(folder)])
            assert not trace.exists(), (path, form)
            assert found.get("value") in (None, SAVED), found
            assert "error" not in found or "CheckpointError" in found["kinds"], (path, form, found)
        path.write_bytes(whole)
    assert facade.resume(folder) == SAVED


def training(folder: Path, bomb: Bomb) -> None:
    state = BCPState(
        Model(weights_at(SAVED)), None, get_extra_fn=lambda: {"it": bomb}, default_ckpt_path=folder, allow_pickles=True
    )
    state.save()
    state.close()


def local(folder: Path, bomb: Bomb) -> None:
    manager = LocalCheckpointManager(folder, allow_pickles=True)
    manager.save(BasicTensorAwareStateDict({"weights": weights_at(SAVED), "it": bomb}), SAVED)
    manager.close()


def memory(folder: Path, bomb: Bomb) -> None:
    name = CheckpointContainerId.format_version_container(SAVED)
    state = {"weights": weights_at(SAVED), "it": bomb}
    writer = Memory.writer(allow_pickles=True)
    dcp.state_dict_saver.save(state, checkpoint_id=str(folder / name), storage_writer=writer)


@pytest.mark.parametrize("write", [training, local, memory], ids=lambda write: write.__name__)
def test_a_pickle_that_its_writer_allowed_is_run_only_by_a_reader_that_does(
    write: Callable[[Path, Bomb], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, trace = tmp_path / "saved", tmp_path / "run"
    in_child(lambda: write(folder, Bomb(trace)))
    facade = Memory(it=None) if write is memory else KINDS[write.__name__]
    found = outcome(lambda: facade.resume(folder))
    assert not trace.exists()
    assert "allow_pickles" in found["error"], found
    for verb in ("ls", "show", "verify"):
        assert main([verb, str(folder)]) == 0
    code = main(["convert", str(folder), str(tmp_path / "state.pt"), "--to", "torch"])
    assert code == 2 or "left out" in capsys.readouterr().err
    assert not trace.exists()
