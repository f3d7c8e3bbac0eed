"""`torchelastic checkpoint convert` where something is wrong: nothing runs, nothing is overwritten, nothing is left."""

from __future__ import annotations

import io
import pickle
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from tests.process.command_checkpoints import Harmful
from tests.process.conversions import FORMATS, Capture, refusal, store_everything
from torchelastic.checkpoint.command.foreign import safetensors_file
from torchelastic.checkpoint.command.main import main
from torchelastic.checkpoint.shards import save_tree


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return store_everything(tmp_path_factory.mktemp("stored"))


def test_no_pickle_of_a_source_runs_unless_allowed(tmp_path: Path, capsys: Capture) -> None:
    ran = tmp_path / "ran"
    torch.save({"x": Harmful(str(ran))}, tmp_path / "bad.pt")
    save_tree(tmp_path / "bad.shard", {"x": Harmful(str(ran))}, allow_pickles=True)
    (tmp_path / "root" / "0").mkdir(parents=True)
    shutil.copy(tmp_path / "bad.pt", tmp_path / "root" / "0" / "default")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Harmful(str(ran))))
    for source in ("bad.pt", "bad.shard", "root", "dcp"):
        said = refusal(capsys, tmp_path / source, tmp_path / "t", "--to", "shard")
        assert source in said
        assert "--allow-pickles" in said
        assert not ran.exists()
    main(["convert", str(tmp_path / "bad.pt"), str(tmp_path / "t"), "--to", "shard", "--allow-pickles"])
    assert ran.exists(), "the object was harmful indeed"


def test_nothing_is_overwritten(tmp_path: Path, capsys: Capture) -> None:
    save_tree(tmp_path / "s", {"a": 1})
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "folder", "link"):
        for to in FORMATS:
            assert "exists already" in refusal(capsys, tmp_path / "s", tmp_path / name, "--to", to)
    assert (tmp_path / "file").read_text() == "mine"
    assert "create it" in refusal(capsys, tmp_path / "s", tmp_path / "no" / "t", "--to", "torch")


@pytest.mark.parametrize("to", FORMATS)
def test_ctrl_c_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    save_tree(tmp_path / "s", {"a": torch.ones(3)})

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupt)
    assert main(["convert", str(tmp_path / "s"), str(tmp_path / "t"), "--to", to]) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


class Interrupted(io.FileIO):
    """A file at whose fourth write somebody presses Ctrl-C."""

    writes = 0

    def write(self, data: Any, /) -> int:
        self.writes += 1
        if self.writes == 4:
            raise KeyboardInterrupt
        return super().write(data)


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_ctrl_c_in_the_middle_of_torchs_own_writer_is_still_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, to: str
) -> None:
    save_tree(tmp_path / "s", {f"t{number}": torch.ones(3000) for number in range(9)})
    opens: Any = Path.open

    def interrupted(path: Path, mode: str = "r", *more: Any, **settings: Any) -> Any:
        return Interrupted(path, "w") if mode == "wb" else opens(path, mode, *more, **settings)

    monkeypatch.setattr(Path, "open", interrupted)
    assert main(["convert", str(tmp_path / "s"), str(tmp_path / "t"), "--to", to]) == 130
    assert capsys.readouterr().err == "torchelastic checkpoint convert: interrupted\n"
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize("to", FORMATS)
def test_a_file_that_may_not_grow_leaves_nothing_and_says_why(tmp_path: Path, capsys: Capture, to: str) -> None:
    save_tree(tmp_path / "s", {"a": torch.ones(2**18)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        said = refusal(capsys, tmp_path / "s", tmp_path / "t", "--to", to)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "too large" in said
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_damaged_sources_are_named(stored: dict[str, Path], tmp_path: Path, capsys: Capture) -> None:
    for name in ("torch", "safetensors", "shard"):
        data = stored[name].read_bytes()
        for cut in (len(data) - 100, 20):
            (tmp_path / name).write_bytes(data[:cut])
            assert str(tmp_path / name) in refusal(capsys, tmp_path / name, tmp_path / "t", "--to", "shard")
    shutil.copytree(stored["dcp"], tmp_path / "dcp")
    next((tmp_path / "dcp").glob("*.distcp")).unlink()
    said = refusal(capsys, tmp_path / "dcp", tmp_path / "t", "--to", "shard", "--allow-pickles")
    assert str(tmp_path / "dcp") in said
    (tmp_path / "dcp" / ".metadata").write_bytes(b"\x80nonsense")
    said = refusal(capsys, tmp_path / "dcp", tmp_path / "t", "--to", "shard", "--allow-pickles")
    assert str(tmp_path / "dcp") in said


def test_without_safetensors_the_error_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    save_tree(tmp_path / "s", {"a": torch.ones(3)})
    monkeypatch.setitem(__import__("sys").modules, "safetensors.torch", None)
    assert "torchelastic[convert]" in refusal(capsys, tmp_path / "s", tmp_path / "t", "--to", "safetensors")


def test_a_structure_that_does_not_fit_its_tensors_is_noticed(
    stored: dict[str, Path], tmp_path: Path, capsys: Capture
) -> None:
    with safe_open(stored["safetensors"], framework="pt") as file:
        text = file.metadata()
    tensors = safetensors.torch.load_file(stored["safetensors"])
    del tensors["bf16"]
    safetensors.torch.save_file(tensors, tmp_path / "less", metadata=text)
    said = refusal(capsys, tmp_path / "less", tmp_path / "t", "--to", "shard")
    assert "'bf16'" in said
    assert safetensors_file.STRUCTURE_KEY in said
