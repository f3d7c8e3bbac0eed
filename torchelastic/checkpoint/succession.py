"""Who may publish in a folder of `FileSystemCheckpointManager`: of one run only the process that took over last.

    <checkpoint_dir>/.run-<16 digits>/7/.tmp-4711-...    staging folders of the process that took over as the 7th

To take over is to create the next number, and to remove the older ones with whatever is staged in them. So a writer
that was paused in the middle of a save, and wakes up when others have gone on, has nothing to rename: its checkpoint
is not published, however late it is. No clock, lock or server is asked, only that a folder can be created once.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from torchelastic.checkpoint.errors import explained
from torchelastic.checkpoint.staging import remove_folder

_RUN_PREFIX = ".run-"


def take_over(checkpoint_dir: Path, run_id: str) -> Path:
    """From now on only the calling process publishes for this run; called by the rank that saves, once per group.

    Args:
        checkpoint_dir: the folder that holds all checkpoints.
        run_id: names the run; writers of other runs are left alone.

    Returns:
        Where to make staging folders; it is gone as soon as another process has taken over.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    root = checkpoint_dir / f"{_RUN_PREFIX}{hashlib.sha256(run_id.encode()).hexdigest()[:16]}"
    with explained("take over the saving of checkpoints", checkpoint_dir):
        root.mkdir(exist_ok=True)
        while True:
            own = root / str(max(_numbers(root), default=0) + 1)
            try:
                own.mkdir()
                break
            except FileExistsError:
                continue  # another process was faster: come after it
        for number in _numbers(root):
            if number < int(own.name):
                remove_folder(root / str(number))
    return own


def staging_dirs(checkpoint_dir: Path) -> list[Path]:
    """Where the writers of all runs stage, dead ones too. Raises: OSError."""
    return sorted(checkpoint_dir.glob(f"{_RUN_PREFIX}*/*"))


def _numbers(root: Path) -> list[int]:
    return [int(path.name) for path in root.iterdir() if path.name.isdecimal()]
