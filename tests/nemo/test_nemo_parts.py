"""What of the adapter for NeMo can be said without NeMo."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from torchelastic.adapters.values import packed, unpack


def test_without_nemo_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['nemo'] = None; import torchelastic.adapters.nemo"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "ImportError: torchelastic.adapters.nemo needs NeMo 2.0" in done.stderr
    assert "nemo_toolkit[lightning]" in done.stderr.splitlines()[-1]


def test_a_packed_folder_comes_out_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "context"
    (folder / "tokenizer" / "empty").mkdir(parents=True)
    (folder / "io.json").write_text("{}")
    (folder / "tokenizer" / "vocabulary").write_bytes(bytes(range(256)))
    file = tmp_path / "context.zip"
    file.write_bytes(packed(folder))
    unpack(file, tmp_path / "out")
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*")}
    assert found == {"io.json", "tokenizer", "tokenizer/vocabulary", "tokenizer/empty"}
    assert (tmp_path / "out" / "tokenizer" / "vocabulary").read_bytes() == bytes(range(256))


def test_unpacking_never_leaves_the_folder(tmp_path: Path) -> None:
    file = tmp_path / "context.zip"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("../escaped", "a")
        archive.writestr("/escaped-too", "b")
    unpack(file, tmp_path / "out")
    assert not (tmp_path / "escaped").exists()
    assert not Path("/escaped-too").exists()


def test_a_damaged_file_is_named_so(tmp_path: Path) -> None:
    file = tmp_path / "context.zip"
    file.write_bytes(b"PK no zip")
    with pytest.raises(zipfile.BadZipFile):
        unpack(file, tmp_path / "out")
