"""The context of a run of NeMo (what model and tokenizer are made from) as one file, which a checkpoint can carry."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

#: The context of a checkpoint in memory: an extra file of it. NeMo has a folder of this name without the ending.
CONTEXT_FILE = "context.zip"


def packed(folder: Path) -> bytes:
    """The files of a folder and of the folders in it as one zip file, not compressed.

    Raises:
        OSError: one of them cannot be read.
    """
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for path in sorted(folder.rglob("*")):
            archive.write(path, path.relative_to(folder))
    return content.getvalue()


def unpack(file: Path, folder: Path) -> None:
    """The inverse: into a folder, and never out of it, whatever the names in the file are.

    Raises:
        OSError: it cannot be written.
        zipfile.BadZipFile: the file is damaged.
    """
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder)  # drops drives, leading slashes and '..'
