"""`torchelastic checkpoint` and what lies in object storage: fsspec's `memory://`, and a server that nobody runs."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
import torch

from tests.process.command_checkpoints import Capture, lines_of, run
from tests.process.small_tmpfs import small_tmpfs
from tests.waiting import wait_until
from torchelastic.checkpoint import DurableTier, KeepAll
from torchelastic.checkpoint.command import remote
from torchelastic.checkpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager

#: Of a tensor: its shard is too long to be downloaded for a list.
LENGTH = 2**19


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Two checkpoints at a URL."""
    files, place = fsspec.filesystem("memory"), "memory://bucket/run"
    manager = LocalCheckpointManager(tmp_path / "host", durable=DurableTier(place, KeepAll()))
    for step in (1, 2):
        manager.save(BasicTensorAwareStateDict({"weights": torch.full((LENGTH,), float(step))}), step)
        assert manager.wait_for_durable(30)
    manager.close()
    yield place
    files.rm("/bucket", recursive=True)


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are downloaded whole."""
    whole: list[str] = []
    kind = type(fsspec.filesystem("memory"))
    fetch = kind.get_file

    def get_file(self: Any, name: str, *rest: Any, **options: Any) -> Any:
        whole.append(name.rpartition("/")[2])
        return fetch(self, name, *rest, **options)

    monkeypatch.setattr(kind, "get_file", get_file)
    return whole


def test_checkpoints_at_a_url_are_listed_by_their_headers(url: str, capsys: Capture, whole: list[str]) -> None:
    code, out, err = run(capsys, "ls", url)
    assert (code, err) == (0, "")
    assert [line.split()[1:3] for line in out.splitlines()[1:]] == [["2", "1"], ["1", "1"]]
    assert "complete" in out
    assert "manifest.json" in whole
    assert not any(name.endswith(".shard") for name in whole)
    newest = lines_of(capsys, "ls", url)[0]
    assert newest["path"].startswith(f"{url}/step-000000002.")
    assert newest["size_bytes"] > 4 * LENGTH


def test_one_at_a_url_is_shown_by_its_headers(url: str, capsys: Capture, whole: list[str]) -> None:
    code, out, err = run(capsys, "show", url, "--tensors", "--values")
    assert (code, err) == (0, "")
    assert f"[{LENGTH}]" in out
    assert "weights: tensor weights" in out
    assert whole
    assert not any(name.endswith(".shard") for name in whole)


@pytest.mark.parametrize("verb", ["verify", "convert"])
def test_a_temporary_folder_that_is_too_small_is_named_with_what_is_needed(
    url: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, whole: list[str], verb: str
) -> None:
    more = [tmp_path / "one.pt", "--to", "torch"] if verb == "convert" else []
    with small_tmpfs(tmp_path / "tmp", 2**20) as folder:
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        code, _, err = run(capsys, verb, url, *more)
        assert run(capsys, "ls", url)[0] == 0
    assert code == 2
    for words in (str(folder), "MiB, and 1", "are free", "TMPDIR"):
        assert words in err, err
    assert not any(name.endswith(".shard") for name in whole), "nothing is downloaded that does not fit"


def test_it_is_said_that_storage_does_not_answer(url: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(fsspec.filesystem("memory"))
    fetch, said = kind.get_file, ""

    def get_file(self: Any, *names: Any, **options: Any) -> Any:
        nonlocal said
        said = said or wait_until(lambda: capsys.readouterr().err, what="a line about it")
        return fetch(self, *names, **options)

    monkeypatch.setattr(kind, "get_file", get_file)
    monkeypatch.setattr(remote, "SAY_AFTER_S", 0.1)
    assert run(capsys, "ls", url)[0] == 0
    assert said == f"still reading {url}: it is large, or does not answer\n"


def test_one_at_a_url_is_shown_verified_and_converted(url: str, tmp_path: Path, capsys: Capture) -> None:
    code, out, _ = run(capsys, "show", url, "--tensors")
    assert code == 0
    assert "step           2" in out
    code, out, _ = run(capsys, "convert", url, tmp_path / "two.pt", "--to", "torch")
    assert (code, out.split(" -> ")[0].startswith(url)) == (0, True), "it is called by its own name"
    assert float(torch.load(tmp_path / "two.pt")["weights"].unique()) == 2.0
    first = lines_of(capsys, "ls", url)[1]["path"]
    assert run(capsys, "convert", first, tmp_path / "one.pt", "--to", "torch")[0] == 0
    assert float(torch.load(tmp_path / "one.pt")["weights"].unique()) == 1.0

    files, (shard, *_) = fsspec.filesystem("memory"), fsspec.filesystem("memory").glob("/bucket/run/step-*2.*/*.shard")
    content = bytearray(files.cat_file(shard))
    content[-100] ^= 1
    files.pipe_file(shard, bytes(content))
    code, out, _ = run(capsys, "verify", url)
    assert code == 1
    assert "step-000000001" in out.split(": intact")[0].splitlines()[-1]
    assert "/tmp" not in out
    assert f"{url}/step-000000002." in out


@pytest.mark.parametrize("verb", ["ls", "show", "verify"])
@pytest.mark.parametrize("kept", [1, 0], ids=["an older one stays", "a newer one comes"])
def test_one_that_a_run_removes_meanwhile_is_passed_over(
    url: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch, verb: str, kept: int
) -> None:
    """As a run prunes: while the first file of the newest one is downloaded."""
    files = fsspec.filesystem("memory")
    first, second = sorted(files.glob("/bucket/run/step-*"))
    kind = type(files)
    fetch = kind.get_file
    saved = {name: files.cat_file(name) for name in files.find(first)}
    if not kept:
        files.rm(first, recursive=True)

    def get_file(self: Any, name: str, *rest: Any, **options: Any) -> Any:
        if files.exists(second) and name.startswith(second):
            files.rm(second, recursive=True)
            files.pipe(saved)
        return fetch(self, name, *rest, **options)

    monkeypatch.setattr(kind, "get_file", get_file)
    code, out, err = run(capsys, verb, url)
    assert (code, err) == (0, "")
    assert first.rpartition("/")[2] in out
    assert second.rpartition("/")[2] not in out


def test_prune_removes_at_a_url_and_what_was_left_there(
    url: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = fsspec.filesystem("memory")
    first, second = sorted(files.glob("/bucket/run/step-*"))
    folders = [first, second, first.replace("step-000000001", "step-000000009"), second.replace(".g", ".g9")]
    content = files.cat_file(files.glob(f"{first}/*.shard")[0])
    for folder in folders[2:]:  # an older save, under another step, and one that is newer: of a run at work, say
        files.pipe_file(f"{folder}/shard-00000-of-00002.shard", content)
    older, newer = (folder.rpartition("/")[2] for folder in folders[2:])
    code, out, err = run(capsys, "prune", url, "--keep-last", "1", "--dry-run")
    assert (code, err) == (0, "")
    assert f"{older}: would be removed (left over: it has no manifest, and a newer one is complete)" in out
    assert f"{newer}: kept (left alone: not finished" in out
    assert len(files.glob("/bucket/run/step-*")) == 4
    with monkeypatch.context() as patched:

        def refuse(*_: Any, **__: Any) -> None:
            raise PermissionError("AccessDenied")

        patched.setattr(type(files), "rm", refuse)
        patched.setattr(type(files), "rm_file", refuse)
        code, _, err = run(capsys, "prune", url, "--keep-last", "1")
        assert (code, f"at {url}: " in err, "AccessDenied" in err) == (2, True, True)
    code, out, _ = run(capsys, "prune", url, "--keep-last", "1")
    assert code == 0
    assert sorted(files.glob("/bucket/run/step-*")) == sorted([second, folders[3]])
    assert "/tmp" not in out


def test_what_a_url_cannot_do_is_said(url: str, tmp_path: Path, capsys: Capture) -> None:
    code, _, err = run(capsys, "prune", "--dead", url)
    assert (code, "give a folder of this host's memory" in err) == (2, True)
    code, _, err = run(capsys, "convert", url, "s3://bucket/model.pt", "--to", "torch")
    assert (code, "write a file or folder" in err) == (2, True)
    code, _, err = run(capsys, "ls", "memory://bucket/nothing")
    assert (code, "memory://bucket/nothing holds nothing" in err) == (2, True)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody listens there
        code, _, err = run(capsys, "ls", f"http://me:secret@127.0.0.1:{unused.getsockname()[1]}/run")
    assert code == 2
    assert "could not read http://127.0.0.1" in err
    assert "secret" not in err
    fsspec.filesystem("memory").store["/bucket/run/../../outside.shard"] = fsspec.filesystem("memory").store[
        next(name for name in fsspec.filesystem("memory").store if name.endswith("manifest.json"))
    ]
    code, _, err = run(capsys, "ls", url)
    assert (code, "outside of the copy" in err) == (2, True)
    (tmp_path / "empty").mkdir()
    assert run(capsys, "ls", f"file://{tmp_path}/empty")[2] == run(capsys, "ls", tmp_path / "empty")[2]
